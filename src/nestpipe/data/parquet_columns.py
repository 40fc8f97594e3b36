"""What becomes of a Parquet column, by its type.

sparse   integers are ids as they are (uint64 from 2^63 up wraps to a negative int64), booleans are 0 and 1, text and
         binary are hashed (`hash_text`); lists of these are bags.  A null id, a null list and an empty list are empty
         bags; a null inside a list is dropped, with its weight.
weights  numbers, in lists as long as those of the ids (one number for a single id); a null, NaN or infinite weight is
         an error.
dense    numbers; null and NaN mean missing and become 0, infinity is an error.
label    numbers; null, NaN and infinity are errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.hash import hash_text, is_text
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.data.source import DataError


@dataclass(frozen=True)
class Mapped:
    """Which columns are read, and as what."""

    sparse: dict[str, str]
    dense: list[str]
    label: str | None
    """None: samples without labels, to be scored."""
    weights: dict[str, str]

    def columns(self) -> list[str]:
        return list(dict.fromkeys([*self.sparse.values(), *self.weights.values(), *self.dense, *self.labels()]))

    def labels(self) -> list[str]:
        return [] if self.label is None else [self.label]


class BadRow(Exception):
    """A value that cannot be trained on, in row `row` of what was being converted."""

    def __init__(self, row: int, text: str) -> None:
        super().__init__(text)
        self.row = row


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_id(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_id(kind.value_type)
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind) or is_text(kind)


def _is_number(kind: pa.DataType) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal, pa.types.is_null)
    return any(test(kind) for test in tests)


def check_schema(path: str, schema: pa.Schema, mapped: Mapped) -> None:
    """DataError where a mapped column is missing, is there twice, or has a type that cannot be used as mapped."""
    uses = [(column, f"data.sparse.{feature}", "sparse") for feature, column in mapped.sparse.items()]
    uses += [(column, f"data.weights.{feature}", "weights") for feature, column in mapped.weights.items()]
    uses += [(column, "data.dense", "dense") for column in mapped.dense]
    uses += [(column, "data.label", "label") for column in mapped.labels()]
    for column, origin, use in uses:
        found = schema.get_all_field_indices(column)
        if not found:
            raise DataError(f"{path} has no column {column!r} (mapped from {origin}); it has {', '.join(schema.names)}")
        if len(found) > 1:
            raise DataError(f"{path} has {len(found)} columns {column!r} (mapped from {origin})")
        kind = schema.field(column).type
        inner = kind.value_type if _is_list(kind) else kind
        if use == "sparse":
            good, need = _is_id(inner), "integers, text, binary, or lists of these"
        elif use == "weights":
            id_kind = schema.field(mapped.sparse[origin.removeprefix("data.weights.")]).type
            good, need = _is_number(inner) and _is_list(kind) == _is_list(id_kind), f"numbers to go with {id_kind}"
        else:
            good, need = _is_number(kind), "numbers"
        if not good:
            raise DataError(f"{path}: column {column!r} is {kind}, but {origin} needs {need}")


def build_batch(rows: pa.RecordBatch, mapped: Mapped) -> Batch:
    """The samples of `rows`; BadRow where one cannot be used."""
    lengths, values, weights = [], [], []
    for feature, column in mapped.sparse.items():
        length, value, weight = _bags(rows, column, mapped.weights.get(feature))
        lengths.append(length)
        values.append(value)
        weights.append(weight)
    sparse = KeyedJaggedTensor(
        list(mapped.sparse),
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(np.concatenate(weights)) if mapped.weights else None,
        lengths=torch.from_numpy(np.concatenate(lengths)),
        stride=rows.num_rows,
    )
    dense = [_numbers(rows, column, missing=0.0) for column in mapped.dense]
    labels = [torch.from_numpy(_numbers(rows, column, missing=None)) for column in mapped.labels()]
    return Batch(sparse, torch.from_numpy(np.stack(dense, 1)) if dense else None, labels[0] if labels else None)


def _bags(rows: pa.RecordBatch, column: str, weights: str | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths, ids and weights of a column's bags."""
    lengths, ids = _flat(rows.column(column))
    weight = np.ones(len(ids), np.float32)
    if weights is not None:
        weight_lengths, numbers = _flat(rows.column(weights))
        wrong = np.flatnonzero(weight_lengths != lengths)
        if len(wrong):
            row = int(wrong[0])
            raise BadRow(row, f"{lengths[row]} ids in {column!r} but {weight_lengths[row]} weights in {weights!r}")
        weight = _float32(numbers)
        wrong = np.flatnonzero(~np.isfinite(weight) & _there(ids))
        if len(wrong):
            row = int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
            raise BadRow(row, f"a weight in {weights!r} is {weight[wrong[0]]}, which is not a finite number")
    if ids.null_count:
        there = _there(ids)
        kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(there)])
        stops = np.cumsum(lengths)
        lengths = kept[stops] - kept[stops - lengths]
        ids, weight = ids.drop_null(), weight[there]
    return lengths, _int64(ids), weight


def _there(array: pa.Array) -> np.ndarray:
    return array.is_valid().to_numpy(zero_copy_only=False)


def _flat(array: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """Lengths of the bags, and what is in them one after another, nulls included."""
    kind = array.type.value_type if _is_list(array.type) else array.type
    if not _is_list(array.type):
        lengths, flat = np.ones(len(array), np.int64), array
    else:
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        flat = array.flatten()
    if pa.types.is_dictionary(kind) and (flat.dictionary.null_count or not is_text(kind)):
        flat = flat.dictionary_decode()
    return lengths, flat


def _int64(ids: pa.Array) -> np.ndarray:
    if is_text(ids.type):
        return hash_text(ids)
    if pa.types.is_null(ids.type):
        return np.empty(0, np.int64)
    return ids.to_numpy(zero_copy_only=False).astype(np.int64)


def _float32(array: pa.Array) -> np.ndarray:
    """Null becomes NaN; what is too large for float32 becomes infinity."""
    wide = array.cast(pa.float64(), safe=False).fill_null(float("nan")).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        return wide.astype(np.float32)


def _numbers(rows: pa.RecordBatch, column: str, missing: float | None) -> np.ndarray:
    """A column as float32; null and NaN become `missing`, or are errors when that is None, as infinity always is."""
    numbers = _float32(rows.column(column))
    if missing is not None:
        numbers[np.isnan(numbers)] = missing
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        value = rows.column(column)[int(wrong[0])].as_py()
        raise BadRow(int(wrong[0]), f"{column!r} is {'null' if value is None else value}, which is not a finite number")
    return numbers
