"""Text to int64 ids, the same on every machine, in every run, for strings, binary and dictionary columns alike.

FNV-1a over the bytes (UTF-8 for strings), 64 bits, then the finalizer of splitmix64, because the top bits of FNV-1a say
little about the last bytes of a short text.  Two texts share an id by chance: about one pair among 6 billion texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import pyarrow as pa

from nestpipe.data.counter import mix

_BASIS = np.uint64(0xCBF29CE484222325)
_PRIME = np.uint64(0x100000001B3)


@numba.njit(nogil=True, cache=True)
def _hash_spans(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    ids = np.empty(offsets.shape[0] - 1, np.int64)
    for i in range(ids.shape[0]):
        x = _BASIS
        for j in range(offsets[i], offsets[i + 1]):
            x = (x ^ np.uint64(data[j])) * _PRIME
        ids[i] = np.int64(mix(x))
    return ids


def is_text(kind: pa.DataType) -> bool:
    """Whether `hash_text` takes arrays of this type."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    tests = (
        pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view,
        pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary,
    )  # fmt: skip
    return any(test(kind) for test in tests)


def hash_text(texts: Sequence[str] | pa.Array | pa.ChunkedArray) -> np.ndarray:
    """One int64 id for each text, by its bytes alone.  A null has no id: ValueError."""
    if isinstance(texts, pa.ChunkedArray):
        return np.concatenate([np.empty(0, np.int64), *(hash_text(chunk) for chunk in texts.chunks)])
    array = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string())
    if not is_text(array.type):
        raise ValueError(f"only text and binary values are hashed, not {array.type}")
    if array.null_count:
        raise ValueError("a null text has no hash; drop nulls first")
    if isinstance(array, pa.DictionaryArray):
        if array.dictionary.null_count:  # a row may point to that null
            return hash_text(array.dictionary_decode())
        return hash_text(array.dictionary)[array.indices.to_numpy()]
    if array.type not in (pa.large_string(), pa.large_binary()):
        array = array.cast(pa.large_binary())
    if not len(array):
        return np.empty(0, np.int64)
    _, offsets, data = array.buffers()
    spans = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8)
    return _hash_spans(np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8), spans)
