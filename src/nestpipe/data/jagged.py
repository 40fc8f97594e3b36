"""Jagged tensors: features whose samples have different numbers of ids.  Spellings follow TorchRec.

A `KeyedJaggedTensor` holds F named features of B samples.  `values` runs feature by feature, inside a feature sample by
sample; `lengths` has F*B entries in the same order.  Nothing here knows of tables or workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.data.kernels import take_samples


def offsets_of(lengths: Tensor) -> Tensor:
    """[n] lengths to [n+1] offsets, int64."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _check_offsets(lengths: Tensor, offsets: Tensor) -> None:
    """Of those that a caller gave: kernels go by them, and would read past the end."""
    if not offsets.is_cpu:
        return
    if offsets.numel() != lengths.numel() + 1 or int(offsets[0]) != 0 or not torch.equal(offsets.diff(), lengths):
        raise ValueError(
            "offsets and lengths do not belong together: offsets begin with 0 and their differences are lengths"
        )


class JaggedTensor:
    """One feature: sample b owns `values[offsets[b]:offsets[b+1]]`; values may be ids [n] or vectors [n, D]."""

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        host_lengths: Tensor | None = None,
    ) -> None:
        """`host_lengths`: the lengths on the host, where they are known and `lengths` are on a device."""
        if lengths is None and offsets is None:
            raise ValueError("JaggedTensor needs lengths or offsets")
        if lengths is None:
            assert offsets is not None
            lengths = offsets.diff()
        self._values = values
        self._weights = weights
        self._lengths = lengths.to(torch.int64)
        self._offsets = offsets_of(self._lengths) if offsets is None else offsets.to(torch.int64)
        self._host_lengths = host_lengths
        if offsets is not None:
            _check_offsets(self._lengths, self._offsets)

    def values(self) -> Tensor:
        return self._values

    def lengths_on_host(self) -> Tensor:
        """The lengths as host tensor.  Of a batch that a pipeline moved to a device they are known without waiting."""
        if self._host_lengths is None:
            self._host_lengths = self._lengths.cpu()
        return self._host_lengths

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def weights(self) -> Tensor:
        if self._weights is None:
            raise ValueError("this JaggedTensor has no weights")
        return self._weights

    def lengths(self) -> Tensor:
        return self._lengths

    def offsets(self) -> Tensor:
        return self._offsets

    def to_dense(self) -> list[Tensor]:
        """One tensor per sample."""
        return list(torch.split(self._values, self.lengths_on_host().tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[B, L] or [B, L, D]: samples left-aligned, cut at L, the rest filled with `padding_value`."""
        longest = int(self.lengths_on_host().max()) if self._lengths.numel() else 0
        length = longest if desired_length is None else desired_length
        shape = (self._lengths.numel(), length, *self._values.shape[1:])
        padded = self._values.new_full(shape, padding_value)
        sample, place = self.places()
        if length >= longest:
            padded[sample, place] = self._values
        else:
            keep = place < length
            padded[sample[keep], place[keep]] = self._values[keep]
        return padded

    def places(self) -> tuple[Tensor, Tensor]:
        """For every value, the sample it belongs to and its place in that sample."""
        count = self._lengths.numel()
        total, device = self._values.shape[0], self._lengths.device
        sample = torch.repeat_interleave(torch.arange(count, device=device), self._lengths, output_size=total)
        return sample, torch.arange(total, device=device) - self._offsets[sample]

    @staticmethod
    def from_dense(values: list[Tensor]) -> JaggedTensor:
        return JaggedTensor(torch.cat(values), lengths=torch.tensor([v.shape[0] for v in values]))

    def __repr__(self) -> str:
        return f"JaggedTensor(samples={self._lengths.numel()}, values={tuple(self._values.shape)})"


class KeyedJaggedTensor:
    """F named features of B samples each.  Immutable by convention: the engine keeps references to its tensors."""

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        host: KeyedJaggedTensor | None = None,
    ) -> None:
        """`host`: the same on the host, where it is known and the tensors are on a device."""
        if lengths is None and offsets is None:
            raise ValueError("KeyedJaggedTensor needs lengths or offsets")
        if lengths is None:
            assert offsets is not None
            lengths = offsets.diff()
        self._keys = list(keys)
        self._values = values
        self._weights = weights
        self._lengths = lengths.to(torch.int64)
        self._offsets = offsets_of(self._lengths) if offsets is None else offsets.to(torch.int64)
        self._place = {key: place for place, key in enumerate(self._keys)}
        if stride is None:
            stride = self._lengths.numel() // len(self._keys) if self._keys else 0
        self._stride = stride
        self._host = host
        self._check()
        if offsets is not None:
            _check_offsets(self._lengths, self._offsets)

    def _check(self) -> None:
        if len(self._place) != len(self._keys):
            raise ValueError(f"KeyedJaggedTensor has a feature twice: {self._keys}")
        if self._lengths.numel() != self._stride * len(self._keys):
            raise ValueError(f"KeyedJaggedTensor of {len(self._keys)} features has {self._lengths.numel()} lengths")
        if self._values.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"KeyedJaggedTensor values are ids and must be int64, not {self._values.dtype}")
        self._values = self._values.to(torch.int64)
        if self._values.is_cpu and int(self._offsets[-1]) != self._values.numel():
            raise ValueError(
                f"KeyedJaggedTensor lengths add up to {int(self._offsets[-1])}, "
                f"but there are {self._values.numel()} values"
            )
        if self._weights is not None and self._weights.numel() != self._values.numel():
            raise ValueError(
                f"KeyedJaggedTensor has {self._values.numel()} values but {self._weights.numel()} per-sample weights"
            )

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys, values, weights, lengths=lengths)

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys, values, weights, offsets=offsets)

    @staticmethod
    def from_jt_dict(features: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        parts = list(features.values())
        weights = [p.weights_or_none() for p in parts]
        given = [w for w in weights if w is not None]
        if given and len(given) != len(weights):
            raise ValueError("either every feature has weights or none has")
        return KeyedJaggedTensor(
            list(features),
            torch.cat([p.values() for p in parts]),
            torch.cat(given) if given else None,
            lengths=torch.cat([p.lengths() for p in parts]),
        )

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def weights(self) -> Tensor:
        if self._weights is None:
            raise ValueError("this KeyedJaggedTensor has no weights")
        return self._weights

    def lengths(self) -> Tensor:
        return self._lengths

    def offsets(self) -> Tensor:
        return self._offsets

    def lengths_on_host(self) -> Tensor:
        """The lengths as host tensor.  Of a batch that a pipeline moved to a device they are known without waiting."""
        return self._on_host()._lengths

    def offsets_on_host(self) -> Tensor:
        return self._on_host()._offsets

    def _on_host(self) -> KeyedJaggedTensor:
        if self._values.is_cpu:
            return self  # not kept: it would keep itself alive until the garbage collector comes
        if self._host is None:
            self._host = self.to(torch.device("cpu"))
        return self._host

    def stride(self) -> int:
        """The number of samples."""
        return self._stride

    def place(self, key: str) -> int:
        """Which feature `key` is, counted from 0."""
        if key not in self._place:
            raise KeyError(f"no feature {key!r} in this batch; it has {', '.join(self._keys) or 'none'}")
        return self._place[key]

    def places(self, keys: Sequence[str]) -> list[int]:
        return [self.place(key) for key in keys]

    def __getitem__(self, key: str) -> JaggedTensor:
        f, b = self.place(key), self._stride
        here = slice(f * b, (f + 1) * b)
        ends = self.offsets_on_host()[f * b : (f + 1) * b + 1]
        start, stop = int(ends[0]), int(ends[-1])
        return JaggedTensor(
            self._values[start:stop],
            None if self._weights is None else self._weights[start:stop],
            lengths=self._lengths[here],
            offsets=self._offsets[f * b : (f + 1) * b + 1] - start,
            host_lengths=self.lengths_on_host()[here],
        )

    def to_dict(self) -> dict[str, JaggedTensor]:
        return {key: self[key] for key in self._keys}

    def select(self, samples: Tensor) -> KeyedJaggedTensor:
        """The given samples (int64 numbers, in that order) of every feature."""
        if not self._values.is_cpu:
            raise ValueError("samples are selected on the host, before a batch is moved to a device")
        lengths, values, source = take_samples(
            self._values.numpy(), self._offsets.numpy(), samples.numpy(), len(self._keys)
        )
        weights = None if self._weights is None else self._weights[torch.from_numpy(source)]
        return KeyedJaggedTensor(
            self._keys, torch.from_numpy(values), weights, lengths=torch.from_numpy(lengths), stride=samples.numel()
        )

    @staticmethod
    def concat(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The samples of `parts` one after another; all have the same features in the same order."""
        first = parts[0]
        if len(parts) == 1:
            return first
        if any(p.keys() != first.keys() for p in parts):
            raise ValueError("only batches with the same features in the same order can be joined")
        features = range(len(first.keys()))
        pieces: list[Tensor] = []
        weights: list[Tensor] = []
        for f in features:
            for p in parts:
                start, stop = int(p._offsets[f * p._stride]), int(p._offsets[(f + 1) * p._stride])
                pieces.append(p._values[start:stop])
                if p._weights is not None:
                    weights.append(p._weights[start:stop])
        return KeyedJaggedTensor(
            first.keys(),
            torch.cat(pieces),
            torch.cat(weights) if weights else None,
            lengths=torch.cat([p._lengths.view(len(first.keys()), p._stride) for p in parts], dim=1).flatten(),
            stride=sum(p._stride for p in parts),
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedJaggedTensor:
        if self._values.device == device:
            return self
        return self.with_tensors(*(t.to(device, non_blocking=non_blocking) for t in self.tensors()))

    def tensors(self) -> list[Tensor]:
        """All that it consists of: values, lengths, offsets, and weights if it has some."""
        return [self._values, self._lengths, self._offsets, *([] if self._weights is None else [self._weights])]

    def with_tensors(
        self, values: Tensor, lengths: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        """The same, made of copies of its `tensors` on another device."""
        host = self if self._values.is_cpu else self._host
        return KeyedJaggedTensor(
            self._keys,
            values,
            weights,
            lengths=lengths,
            offsets=offsets,
            stride=self._stride,
            host=host if not values.is_cpu else None,
        )

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor(features={self._keys}, samples={self._stride}, values={self._values.numel()})"


class KeyedTensor:
    """PoolRows embeddings: `values` is [B, sum of lengths], one block of columns per key."""

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys = list(keys)
        self._length_per_key = list(length_per_key)
        self._values = values
        self._start: dict[str, int] = {}
        column = 0
        for key, length in zip(self._keys, self._length_per_key, strict=True):
            self._start[key] = column
            column += length
        assert values.shape[1] == column, f"{values.shape[1]} columns for keys that need {column}"

    def keys(self) -> list[str]:
        return self._keys

    def length_per_key(self) -> list[int]:
        return self._length_per_key

    def values(self) -> Tensor:
        return self._values

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._start:
            raise KeyError(f"no feature {key!r} here; there are {', '.join(self._keys)}")
        start = self._start[key]
        return self._values[:, start : start + self._length_per_key[self._keys.index(key)]]

    def to_dict(self) -> dict[str, Tensor]:
        return {key: self[key] for key in self._keys}

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={self._keys}, values={tuple(self._values.shape)})"
