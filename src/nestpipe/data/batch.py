"""What a reader yields and a model receives: the samples of one batch on one worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from nestpipe.data.balance.assign import assign
from nestpipe.data.jagged import JaggedTensor, KeyedJaggedTensor


@dataclass
class Batch:
    """B samples.  Every tensor but `sparse_features` has B as its first axis.

    The model's loss is a mean; `loss_terms[b]` says over how many terms sample b contributes to it (1 each when None;
    the number of predicted positions for a sequence model).  The engine weighs micro-batches and workers by it, so that
    the loss that is trained is the mean over the whole global batch.

    `costs`, where given, is what each sample costs to compute, in any unit: `split` then divides it evenly.  It stays on the
    host and changes no result but by rounding.
    """

    sparse_features: KeyedJaggedTensor
    dense: Tensor | None = None
    labels: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)
    loss_terms: Tensor | None = None
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Ids of the batch as a whole, by feature: every micro-batch has all of them.  They stay on the host."""
    costs: Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor in (("loss_terms", self.loss_terms), ("costs", self.costs)):
            if tensor is not None and tensor.dim() != 1:
                raise ValueError(f"batch.{name} must be one number a sample, not of shape {tuple(tensor.shape)}")
        for name, ids in self.shared.items():
            if ids.dim() != 1 or ids.dtype != torch.int64:
                raise ValueError(f"batch.shared[{name!r}] must be a list of int64 ids")
        fields = {
            "dense": self.dense,
            "labels": self.labels,
            "loss_terms": self.loss_terms,
            "costs": self.costs,
            **self.extras,
        }
        for name, tensor in fields.items():
            if tensor is not None and tensor.shape[:1] != (len(self),):
                raise ValueError(f"batch.{name} has shape {tuple(tensor.shape)}, but the batch has {len(self)} samples")

    def __len__(self) -> int:
        return self.sparse_features.stride()

    def terms(self) -> float:
        return float(len(self)) if self.loss_terms is None else float(self.loss_terms.sum())

    def select(self, samples: Tensor) -> Batch:
        """The given samples, in the given order."""

        def take(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[samples]

        return Batch(
            self.sparse_features.select(samples),
            take(self.dense),
            take(self.labels),
            {name: tensor[samples] for name, tensor in self.extras.items()},
            take(self.loss_terms),
            self.shared,
            take(self.costs),
        )

    def split(self, parts: int) -> list[Batch]:
        """`parts` runs of consecutive samples of as even a size as can be; some are empty when B < parts.

        Where samples have `loss_terms`, as histories of different lengths do, it is these that are divided evenly.  Where they
        have `costs`, parts are not runs: a sample goes where it makes costs most even, in the order of the batch there.
        """
        if parts == 1:
            return [self]
        if self.costs is not None:
            chosen = torch.from_numpy(assign(self.costs.detach().cpu().numpy(), parts))
            return [self.select(torch.nonzero(chosen == part).flatten()) for part in range(parts)]
        total = 0.0 if self.loss_terms is None else float(self.loss_terms.sum())
        if self.loss_terms is None or not total:
            cuts = [len(self) * part // parts for part in range(parts + 1)]
        else:
            ends = torch.cumsum(self.loss_terms.double(), 0)
            middles = ends - self.loss_terms.double() / 2  # a sample goes where its middle lies
            shares = torch.arange(1, parts, dtype=torch.float64) * (total / parts)
            cuts = [0, *torch.searchsorted(middles, shares).tolist(), len(self)]
        return [self.select(torch.arange(start, stop)) for start, stop in pairwise(cuts)]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The samples of `batches` one after another; all have the same fields and shared ids."""
        if len(batches) == 1:
            return batches[0]
        for name in {name for b in batches for name in b.shared}:
            if not all(name in b.shared and torch.equal(b.shared[name], batches[0].shared[name]) for b in batches):
                raise ValueError(f"batches with different batch.shared[{name!r}] cannot be joined")

        def join(tensors: list[Tensor | None]) -> Tensor | None:
            given = [t for t in tensors if t is not None]
            assert len(given) in (0, len(tensors)), "batches with different fields cannot be joined"
            return torch.cat(given) if given else None

        return Batch(
            KeyedJaggedTensor.concat([b.sparse_features for b in batches]),
            join([b.dense for b in batches]),
            join([b.labels for b in batches]),
            {name: torch.cat([b.extras[name] for b in batches]) for name in batches[0].extras},
            join([b.loss_terms for b in batches]),
            batches[0].shared,
            join([b.costs for b in batches]),
        )

    def with_shared_ids(self) -> Batch:
        """The same with its shared ids among its features, as ids of the first sample: so they are looked up."""
        if not self.shared or not len(self):
            return self
        features = self.sparse_features.to_dict()
        for name, ids in self.shared.items():
            features[name] = _before(features[name], ids)
        return replace(self, sparse_features=KeyedJaggedTensor.from_jt_dict(features))

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self.with_tensors([tensor.to(device, non_blocking=non_blocking) for tensor in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """All that a model may see of it."""
        given = (self.dense, self.labels, *self.extras.values(), self.loss_terms)
        return [*self.sparse_features.tensors(), *(tensor for tensor in given if tensor is not None)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Batch:
        """The same, made of copies of its `tensors` on another device."""
        features = self.sparse_features.tensors()
        rest = iter(tensors[len(features) :])

        def next_of(given: Tensor | None) -> Tensor | None:
            return None if given is None else next(rest)

        return Batch(
            self.sparse_features.with_tensors(*tensors[: len(features)]),
            next_of(self.dense),
            next_of(self.labels),
            {name: next(rest) for name in self.extras},
            next_of(self.loss_terms),
            self.shared,
            self.costs,
        )


def _before(feature: JaggedTensor, ids: Tensor) -> JaggedTensor:
    """The feature with more ids of its first sample, before those that it has."""
    lengths = feature.lengths().clone()
    lengths[0] += ids.numel()
    weights = feature.weights_or_none()
    if weights is not None:
        weights = torch.cat([weights.new_ones(ids.numel()), weights])
    return JaggedTensor(torch.cat([ids, feature.values()]), weights, lengths=lengths)
