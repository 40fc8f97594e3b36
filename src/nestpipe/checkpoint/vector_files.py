"""Files of keys and vectors, to exchange with other programs: Parquet, .npz and .npy.  Written and read in parts.

A Parquet file has the columns key (int64), vector (a list of fixed size) and optionally state.  An .npz file has the
arrays keys, vectors and optionally state.  FILE.npy has the vectors, with FILE.keys.npy and optionally FILE.state.npy
beside it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib import format as npy

from nestpipe.checkpoint.plain_file import Place
from nestpipe.errors import NestPipeError
from nestpipe.files import Location

SUFFIXES = (".parquet", ".npz", ".npy")
GROUP_BYTES = 1 << 26
"""Size of a Parquet row group, and of a part that is read."""


class VectorsError(NestPipeError, ValueError):
    """A file of keys and vectors cannot be used.  The message is one line that names it and says what to change."""

    exit_code = 2


def check_suffix(path: Place) -> str:
    suffix = Path(path.leaf if isinstance(path, Location) else path).suffix
    if suffix not in SUFFIXES:
        raise VectorsError(f"'{path}' must end in {', '.join(SUFFIXES)}")
    return suffix


def files_of(path: Path, state: bool) -> dict[str, Path]:
    """The files that make up one export, by content.  `vectors` is the path itself."""
    if path.suffix != ".npy":
        return {"vectors": path}
    found = {"vectors": path, "keys": path.with_suffix(".keys.npy")}
    return found | ({"state": path.with_suffix(".state.npy")} if state else {})


class VectorWriter(Protocol):
    def __enter__(self) -> VectorWriter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def write(self, keys: np.ndarray, vectors: np.ndarray, state: np.ndarray | None) -> None: ...


class ParquetWriter:
    """Writes row groups of about equal size.  Holds one in memory."""

    def __init__(self, path: Path | pa.PythonFile, dim: int, dtype: np.dtype, state_width: int | None) -> None:
        number = pa.from_numpy_dtype(dtype)
        fields = [pa.field("key", pa.int64(), False), pa.field("vector", _list_of(number, dim), False)]
        if state_width is not None:
            fields.append(pa.field("state", _list_of(number, state_width), False))
        self._schema = pa.schema(fields)
        self._file = pq.ParquetWriter(path, self._schema, compression="none", use_dictionary=False)
        row = 8 + dtype.itemsize * (dim + (state_width or 0))
        self._most = max(1, GROUP_BYTES // row)
        self._held: list[pa.RecordBatch] = []
        self._count = 0

    def __enter__(self) -> ParquetWriter:
        return self

    def write(self, keys: np.ndarray, vectors: np.ndarray, state: np.ndarray | None) -> None:
        columns = [pa.array(keys)]
        for field, array in zip(list(self._schema)[1:], (vectors, state)):
            assert array is not None
            columns.append(pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), type=field.type))
        batch = pa.record_batch(columns, schema=self._schema)
        while batch.num_rows:
            part = batch.slice(0, self._most - self._count)
            batch = batch.slice(part.num_rows)
            self._held.append(part)
            self._count += part.num_rows
            if self._count == self._most:
                self._flush()

    def _flush(self) -> None:
        if self._held:
            table = pa.Table.from_batches(self._held)
            self._file.write_table(table, row_group_size=table.num_rows)
            self._held, self._count = [], 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._flush()
        self._file.close()


class NumpyWriter:
    """Writes .npy files, whose headers get the row count at the end.  Packs them into an .npz if asked to."""

    def __init__(
        self, files: dict[str, Path], dim: int, dtype: np.dtype, state_width: int | None, packed: bool
    ) -> None:
        """`packed`: write one .npz at the path of `vectors`."""
        self._packed = packed
        self._final = files["vectors"]
        if packed:
            names = ["vectors", "keys", *([] if state_width is None else ["state"])]
            files = {name: self._final.with_name(f"{self._final.name}-{name}") for name in names}
        self._paths = files
        kinds = {"keys": (np.dtype(np.int64), ()), "vectors": (dtype, (dim,)), "state": (dtype, (state_width or 0,))}
        self._kinds = {name: kinds[name] for name in files}
        self._stack = ExitStack()
        self._files: dict[str, BinaryIO] = {
            name: self._stack.enter_context(path.open("wb")) for name, path in files.items()
        }
        self._count = 0
        self._headers()

    def __enter__(self) -> NumpyWriter:
        return self

    def _headers(self) -> None:
        """Writes the headers, again at the end: numpy leaves space in them for any count."""
        for name, (dtype, shape) in self._kinds.items():
            description = {
                "descr": npy.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": (self._count, *shape),
            }
            self._files[name].seek(0)
            npy.write_array_header_1_0(self._files[name], description)

    def write(self, keys: np.ndarray, vectors: np.ndarray, state: np.ndarray | None) -> None:
        for name, array in (("keys", keys), ("vectors", vectors), ("state", state)):
            if name in self._files and array is not None:
                self._files[name].write(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
        self._count += len(keys)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if error is None:
                self._headers()
        if not self._packed:
            return
        try:
            if error is None:
                with zipfile.ZipFile(self._final, "w", zipfile.ZIP_STORED) as archive:
                    for name in ("keys", "vectors", "state"):
                        if name in self._paths:
                            archive.write(self._paths[name], f"{name}.npy")
        finally:
            for path in self._paths.values():
                path.unlink(missing_ok=True)


def read_vectors(path: Place, dim: int, dtype: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Keys [n] and vectors [n, dim] of a file, in parts.  VectorsError if it does not fit the table.

    Converts vectors to `dtype`.  Keys may have any integer type that fits in int64.
    """
    suffix = check_suffix(path)
    if not path.is_file():
        raise VectorsError(f"no file '{path}' of keys and vectors: check the path")
    most = max(1, GROUP_BYTES // (8 + dtype.itemsize * dim))
    try:
        parts = _read_parquet(path, dim, most) if suffix == ".parquet" else _read_numpy(path, dim, most)
        for keys, vectors in parts:
            with np.errstate(over="ignore"):  # a value too large for `dtype` becomes infinity
                fitting = np.ascontiguousarray(vectors, dtype)
            yield keys.astype(np.int64, copy=False), fitting
    except (OSError, EOFError, pa.ArrowException, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise VectorsError(f"{path} cannot be read: {reason}") from None


def _read_parquet(path: Place, dim: int, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    with _opened(path) as raw, pq.ParquetFile(raw, pre_buffer=isinstance(path, Location)) as file:
        schema = file.schema_arrow
        if not {"key", "vector"} <= set(schema.names) or len(set(schema.names)) < len(schema.names):
            raise VectorsError(f"{path} must have the columns key and vector, but has {', '.join(schema.names)}")
        _check_key_type(path, "column key", schema.field("key").type.to_pandas_dtype())
        kind = schema.field("vector").type
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not lists or not pa.types.is_floating(kind.value_type):
            raise VectorsError(f"{path}: column vector must hold lists of {dim} floating point numbers, not {kind}")
        if pa.types.is_fixed_size_list(kind) and kind.list_size != dim:
            raise VectorsError(
                f"{path} has vectors of {kind.list_size} numbers and the table has dim {dim}: change one of them"
            )
        at = 0
        for batch in file.iter_batches(most, columns=["key", "vector"], use_threads=False):
            keys, vectors = batch.column("key"), batch.column("vector")
            for name, column in (("key", keys), ("vector", vectors)):
                if column.null_count or (name == "vector" and column.flatten().null_count):
                    raise VectorsError(
                        f"{path} has nulls in column {name} in rows {at} to {at + len(keys)}: remove them"
                    )
            flat = vectors.flatten().to_numpy(zero_copy_only=False)
            if not pa.types.is_fixed_size_list(kind):
                lengths = np.diff(vectors.offsets.to_numpy())
                if (lengths != dim).any():
                    wrong = int(np.flatnonzero(lengths != dim)[0])
                    raise VectorsError(
                        f"{path} row {at + wrong} has a vector of {lengths[wrong]} numbers and the table has "
                        f"dim {dim}: change one of them"
                    )
            yield keys.to_numpy(zero_copy_only=False), flat.reshape(len(keys), dim)
            at += len(keys)


def _read_numpy(path: Place, dim: int, most: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    with ExitStack() as stack:
        if check_suffix(path) == ".npz":
            archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(_opened(path))))
            names = archive.namelist()
            if not {"keys.npy", "vectors.npy"} <= set(names):
                raise VectorsError(f"{path} must have the arrays keys and vectors, but has {', '.join(names)}")
            keys: Any = stack.enter_context(archive.open("keys.npy"))
            vectors: Any = stack.enter_context(archive.open("vectors.npy"))
        else:
            keys, vectors = (stack.enter_context(_opened(file)) for file in (_keys_beside(path), path))
        (count,), key_type = _header(path, "keys", keys, 1)
        (rows, width), kind = _header(path, "vectors", vectors, 2)
        _check_key_type(path, "keys", key_type)
        if not np.issubdtype(kind, np.floating):
            raise VectorsError(f"{path}: vectors must be floating point numbers, not {kind}")
        if rows != count:
            raise VectorsError(f"{path} has {count} keys and {rows} vectors: it needs one vector for each key")
        if width != dim:
            raise VectorsError(f"{path} has vectors of {width} numbers and the table has dim {dim}: change one of them")
        for at in range(0, count, most):
            n = min(most, count - at)
            yield _array(path, keys, n, key_type), _array(path, vectors, n * dim, kind).reshape(n, dim)


def _opened(path: Place) -> Any:
    return path.open() if isinstance(path, Location) else path.open("rb")


def _keys_beside(path: Place) -> Place:
    """The file with the keys of FILE.npy."""
    if isinstance(path, Location):
        return path.parent / f"{path.leaf.removesuffix('.npy')}.keys.npy"
    return path.with_suffix(".keys.npy")


def _header(path: Place, name: str, file: BinaryIO, dimensions: int) -> tuple[tuple[int, ...], np.dtype]:
    try:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"version {version}")
        shape, columns_first, dtype = read(file)
    except ValueError as error:
        raise VectorsError(f"{path}: {name} is not a numpy array ({' '.join(str(error).split())})") from None
    if len(shape) != dimensions or (columns_first and dimensions > 1) or dtype.hasobject:
        raise VectorsError(f"{path}: {name} must be rows of numbers, not {dtype} {list(shape)}")
    return shape, dtype


def _array(path: Place, file: BinaryIO, count: int, dtype: np.dtype) -> np.ndarray:
    data = file.read(count * dtype.itemsize)
    if len(data) != count * dtype.itemsize:
        raise VectorsError(f"{path} ends before its last row: write it again")
    return np.frombuffer(data, dtype)


def _check_key_type(path: Place, what: str, kind: Any) -> None:
    if not (isinstance(kind, type | np.dtype) and np.can_cast(kind, np.int64) and np.issubdtype(kind, np.integer)):
        raise VectorsError(f"{path}: {what} must be integers that fit in int64, not {np.dtype(kind).name}")


def _list_of(number: pa.DataType, size: int) -> pa.DataType:
    return pa.list_(pa.field("element", number, False), size)
