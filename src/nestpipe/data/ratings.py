"""MovieLens rating files as they come: `u.data`, `ratings.dat`, `ratings.csv`, a folder of one, or the original zip."""

from __future__ import annotations

import functools
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from nestpipe.data.source import DataError
from nestpipe.data.ties import Ties, sort_events, user_offsets

NAMES = ("ratings.csv", "ratings.dat", "u.data")
COLUMNS = {"userId": pa.int64(), "movieId": pa.int64(), "rating": pa.float32(), "timestamp": pa.int64()}


@dataclass(frozen=True)
class Ratings:
    """All ratings, user by user, each user's in order of time."""

    user: np.ndarray
    item: np.ndarray
    rating: np.ndarray
    time: np.ndarray

    def by_user(self) -> tuple[np.ndarray, np.ndarray]:
        """The user ids, ascending, and the offsets of each user's ratings."""
        offsets = user_offsets(self.user)
        return self.user[offsets[:-1]], offsets


def read_ratings(path: str, ties: Ties = "file", seed: int = 0) -> Ratings:
    """The ratings in `path`, whatever its format; DataError names the file and the row that is wrong.

    Ratings of one second are in the order of the file, or as `ties` says; `seed` is for a random order.
    """
    where = Path(path).expanduser()
    if where.is_dir():
        where = next((where / name for name in NAMES if (where / name).is_file()), where / NAMES[0])
    try:
        stat = where.stat()
    except OSError as error:
        raise DataError(f"data.path: cannot read {where}: {error.strerror}") from None
    return _read(where, stat.st_mtime_ns, stat.st_size, ties, seed if ties == "random" else 0)


# The train and the eval split open the same file, one after the other; time and size tell whether it is still the same.
@functools.lru_cache(maxsize=1)
def _read(where: Path, modified: int, size: int, ties: Ties, seed: int) -> Ratings:
    name, text = _text(where)
    columns = _parse(name, text)
    user, item, rating, time = (columns[column] for column in COLUMNS)
    order = sort_events(user, time, ties, seed)
    return Ratings(user[order], item[order], rating[order], time[order])


def _text(where: Path) -> tuple[str, bytes]:
    try:
        if not zipfile.is_zipfile(where):
            return str(where), where.read_bytes()
        with zipfile.ZipFile(where) as archive:
            members = [m for m in archive.namelist() if m.rsplit("/", 1)[-1] in NAMES]
            if len(members) != 1:
                found = ", ".join(members) or "none"
                raise DataError(f"{where}: a MovieLens zip holds one of {', '.join(NAMES)}; found {found}")
            return f"{where}/{members[0]}", archive.read(members[0])
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {where}: {error}") from None


def _parse(name: str, text: bytes) -> dict[str, np.ndarray]:
    first = text[:1000].split(b"\n", 1)[0]
    if b"::" in first:
        text, delimiter = text.replace(b"::", b"\t"), "\t"
    else:
        delimiter = "\t" if b"\t" in first else ","
    header = not first[:1].isdigit()
    read = pa.csv.ReadOptions(use_threads=False, column_names=None if header else list(COLUMNS))
    try:  # one thread: pyarrow then says which row is wrong
        table = pa.csv.read_csv(
            io.BytesIO(text),
            read_options=read,
            parse_options=pa.csv.ParseOptions(delimiter=delimiter),
            convert_options=pa.csv.ConvertOptions(column_types=COLUMNS, include_columns=list(COLUMNS)),
        )
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise DataError(f"{name}: {str(error).splitlines()[0]}; a rating is user, item, rating, time") from None
    for column in COLUMNS:
        if table[column].null_count:
            row = int(np.flatnonzero(table[column].is_null().to_numpy())[0])
            raise DataError(f"{name} line {row + 1 + header}: no {column}")
    if not table.num_rows:
        raise DataError(f"{name} has no ratings")
    return {column: table[column].to_numpy() for column in COLUMNS}
