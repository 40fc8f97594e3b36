"""What a checkpoint consists of: `manifest.json`, and `COMMIT`, which seals it.

A directory is a checkpoint if `COMMIT` holds the SHA-256 of `manifest.json` and every file that the manifest names is there as it
says; its own name decides nothing.  It got its name by one rename, when all of it was on disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.plain_file import plain_size, read_plain
from nestpipe.checkpoint.tensors import OTHERWISE, Written
from nestpipe.tables.config import DTYPES
from nestpipe.tables.group import MAX_TABLES

MANIFEST, COMMIT = "manifest.json", "COMMIT"
VERSION = 1
_STEP = re.compile(r"step-([0-9]{8,18})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_SHA = re.compile(r"[0-9a-f]{64}")
KINDS = ("rows", "removed", "dense", "worker")
MOST_BYTES = 1 << 28
"""Of a manifest: what is larger is not one of ours."""
_SEAL_BYTES = 65
"""Of COMMIT: 64 digits and an end of line."""
_KEY_BYTES = 10
"""The least that a row takes in a file: its key and its table."""
MOST_WIDE = 1 << 24
"""Numbers in a row: more is no row of ours."""


@dataclass(frozen=True)
class File:
    """One file: rows of a worker's table group, keys that went since the base, the dense model, or a worker's random state."""

    name: str
    bytes: int
    sha256: str
    kind: str
    worker: int
    group: int = -1
    rows: int = 0

    @property
    def written(self) -> Written:
        return Written(self.name, self.bytes, self.sha256)


SIGHTINGS = "sightings"
"""In place of an optimizer's name."""


@dataclass(frozen=True)
class Group:
    """A table group: what must be alike where its rows are loaded."""

    tables: list[str]
    dim: int
    dtype: str
    state_width: int
    optimizer: str
    rows: int = 0
    """Rows in this checkpoint with all that it stands on, over all workers."""

    @property
    def waiting(self) -> bool:
        """Not rows, but (sightings, last batch) of keys that have none yet: whole numbers in the bits of float32."""
        return self.optimizer == SIGHTINGS


@dataclass(frozen=True)
class Base:
    """A checkpoint that this one stands on, by name and by the digest of its manifest."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    """Batches trained."""
    workers: int
    files: list[File]
    groups: list[Group]
    base: list[Base] = field(default_factory=list)
    """In the order in which they are applied; empty: this one is complete in itself."""
    data: dict[str, Any] = field(default_factory=dict)
    """Where the data goes on."""
    life: dict[str, Any] = field(default_factory=dict)
    """Of admission and eviction, where tables have such: keys evicted so far, and what its clock knows."""
    trainer: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Held-out metrics at this step, where there was an evaluation."""
    recipe: str = ""
    created: str = ""
    version: int = VERSION

    @property
    def full(self) -> bool:
        return not self.base

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def of(self, kind: str) -> list[File]:
        return [file for file in self.files if file.kind == kind]


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a directory's name claims; whether it is a checkpoint is another matter."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name_of(int(match[1])) == name else None


def seal(directory: Path, manifest: Manifest) -> str:
    """Writes and syncs manifest and COMMIT, then the directory; returns the manifest's digest."""
    text = json.dumps(asdict(manifest), indent=1, allow_nan=False).encode() + b"\n"
    digest = hashlib.sha256(text).hexdigest()
    for name, data in ((MANIFEST, text), (COMMIT, digest.encode() + b"\n")):
        with (directory / name).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync_directory(directory)
    return digest


def sync_directory(directory: Path) -> None:
    """What was created, renamed or removed in it is on disk after this."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_manifest(directory: Path) -> tuple[Manifest, str]:
    """The manifest of a committed checkpoint and its digest; files are looked at for their presence and size."""
    try:
        sealed = read_plain(directory / COMMIT, _SEAL_BYTES)
        text = read_plain(directory / MANIFEST, MOST_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"{directory} is not a committed checkpoint: {error.strerror} ({error.filename})"
        ) from None
    digest = hashlib.sha256(text).hexdigest()
    if sealed != digest.encode() + b"\n":
        raise CheckpointError(f"{directory / MANIFEST} is not what {COMMIT} seals; {OTHERWISE}")
    manifest = parse(text, directory / MANIFEST)
    for file in manifest.files:
        try:
            size = plain_size(directory / file.name)
        except FileNotFoundError:
            raise CheckpointError(f"{directory / file.name} is missing; {OTHERWISE}") from None
        except OSError as error:
            raise CheckpointError(f"{directory / file.name} cannot be read: {error.strerror}; {OTHERWISE}") from None
        if size != file.bytes:
            raise CheckpointError(f"{directory / file.name} has {size:,} bytes instead of {file.bytes:,}; {OTHERWISE}")
    return manifest, digest


def parse(text: bytes, path: Path) -> Manifest:
    """A manifest in every detail, or CheckpointError: what it says is believed from here on."""
    try:
        manifest = _manifest(_json(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, _OtherVersion):
            raise CheckpointError(f"{path}: {reason}") from None
        raise CheckpointError(f"{path} is not a manifest of ours ({reason}); {OTHERWISE}") from None
    return manifest


class _OtherVersion(ValueError):
    """Nothing is wrong with it but that it is not for us."""


def _json(text: bytes) -> Any:
    """What JSON's grammar says and no more: no NaN, no infinity, no name twice in an object, no half of a character."""
    raw = json.loads(text, object_pairs_hook=_names_once, parse_constant=_no_number, parse_float=_finite)
    if b"\\u" in text:
        json.dumps(raw, ensure_ascii=False).encode()  # UnicodeEncodeError where an escape is no character
    return raw


def _names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has one name twice")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:40]} is no finite number")
    return float(text)


def _manifest(raw: Any) -> Manifest:
    _only(raw, Manifest)
    _whole(raw, "version", "step", "workers")
    if raw["version"] != VERSION:
        raise _OtherVersion(
            f"it has version {raw['version']} and this nestpipe reads {VERSION}: use the one that wrote it"
        )
    if raw["workers"] < 1:
        raise ValueError("workers must be at least 1")
    for name in ("recipe", "created"):
        _text(raw, name)
    for name in ("data", "life", "trainer", "metrics"):
        if not isinstance(raw[name], dict):
            raise ValueError(f"{name} must be an object")
    for value in raw["metrics"].values():
        if not (value is None or type(value) is float or (type(value) is int and abs(value) < 1 << 62)):
            raise ValueError("metrics must be numbers")
    groups = [_group(item) for item in _list(raw, "groups")]
    files = [_file(item, raw["workers"], len(groups)) for item in _list(raw, "files")]
    base = [_base(item) for item in _list(raw, "base")]
    steps = [*(step_of(item.name) for item in base), raw["step"]]
    if steps != sorted(set(steps)):
        raise ValueError("base must be of earlier steps, in their order")
    _check_files(files, raw["workers"])
    _check_groups(groups, files, full=not base)
    return Manifest(**{**raw, "groups": groups, "files": files, "base": base})


def _check_files(files: list[File], workers: int) -> None:
    if len({file.name for file in files}) < len(files):
        raise ValueError("two files have one name")
    if [file.worker for file in files if file.kind == "dense"] != [0]:
        raise ValueError("there must be one file of kind dense, of worker 0")
    if sorted(file.worker for file in files if file.kind == "worker") != list(range(min(workers, len(files) + 1))):
        raise ValueError("there must be one file of kind worker of every worker")


def _check_groups(groups: list[Group], files: list[File], full: bool) -> None:
    names = [(group.waiting, name) for group in groups for name in group.tables]
    if len(set(names)) < len(names):
        raise ValueError("two tables have one name")
    tables = [group.tables for group in groups if not group.waiting]
    if not all(
        group.tables in tables and (group.dim, group.state_width) == (2, 0) for group in groups if group.waiting
    ):
        raise ValueError("sightings must be two numbers of keys of the tables")
    if full and any(file.kind == "removed" for file in files):
        raise ValueError("a checkpoint that stands on nothing has no keys that went")
    for number, group in enumerate(groups):
        rows = sum(file.rows for file in files if file.group == number and file.kind == "rows")
        if rows > group.rows or (full and rows != group.rows):
            raise ValueError(f"its files have {rows} rows of group {number}, which has {group.rows}")


def _file(raw: Any, workers: int, groups: int) -> File:
    _only(raw, File)
    _whole(raw, "bytes", "worker", "rows")
    if not (isinstance(raw["name"], str) and _FILE.fullmatch(raw["name"]) and raw["name"] not in (MANIFEST, COMMIT)):
        raise ValueError(f"{raw['name']!r} is no name of a file of a checkpoint")
    _check_sha(raw)
    if raw["kind"] not in KINDS:
        raise ValueError(f"{raw['kind']!r} is no kind of file")
    if raw["worker"] >= workers:
        raise ValueError(f"file {raw['name']} is of worker {raw['worker']}, and there are {workers}")
    group = raw["group"]
    if type(group) is not int or not (0 <= group < groups if raw["kind"] in ("rows", "removed") else group == -1):
        raise ValueError(f"file {raw['name']} is of group {group!r}, and there are {groups}")
    if raw["rows"] * (_KEY_BYTES if group >= 0 else raw["bytes"] + 1) > raw["bytes"]:
        raise ValueError(f"file {raw['name']} of {raw['bytes']} bytes cannot have {raw['rows']} rows")
    return File(**raw)


def _group(raw: Any) -> Group:
    _only(raw, Group)
    _whole(raw, "dim", "state_width", "rows")
    for name in ("dtype", "optimizer"):
        _text(raw, name)
    if raw["dtype"] not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {raw['dtype']!r}")
    if not 1 <= raw["dim"] <= MOST_WIDE or raw["state_width"] > MOST_WIDE:
        raise ValueError(f"rows of {raw['dim']} numbers and {raw['state_width']} of state")
    tables = _list(raw, "tables")
    if not all(isinstance(table, str) and table for table in tables) or not 1 <= len(tables) <= MAX_TABLES:
        raise ValueError("tables must be names")
    return Group(**raw)


def _base(raw: Any) -> Base:
    _only(raw, Base)
    if not isinstance(raw["name"], str) or step_of(raw["name"]) is None:
        raise ValueError(f"{raw['name']!r} is no name of a checkpoint")
    _check_sha(raw)
    return Base(**raw)


def _only(raw: Any, cls: type) -> None:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{cls.__name__.lower()} must be an object")
    known = {f.name for f in fields(cls)}
    if set(raw) != known:
        raise ValueError(f"{cls.__name__.lower()} must have the fields {', '.join(sorted(known))}")


def _whole(raw: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if type(raw[name]) is not int or not 0 <= raw[name] < 1 << 62:
            raise ValueError(f"{name} must be a whole number from 0 up, not {raw[name]!r}")


def _text(raw: Mapping[str, Any], name: str) -> None:
    if not isinstance(raw[name], str):
        raise ValueError(f"{name} must be text")


def _list(raw: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(raw[name], list):
        raise ValueError(f"{name} must be a list")
    return raw[name]


def _check_sha(raw: Mapping[str, Any]) -> None:
    if not (isinstance(raw["sha256"], str) and _SHA.fullmatch(raw["sha256"])):
        raise ValueError("sha256 must be 64 hexadecimal digits")
