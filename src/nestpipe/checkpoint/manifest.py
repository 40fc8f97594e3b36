"""The contents of a checkpoint: `manifest.json`, sealed by `COMMIT`.

A directory is a checkpoint if `COMMIT` holds the SHA-256 of `manifest.json` and every file in the manifest exists
with the given size.  Its name alone proves nothing.  On local disk it got that name by one rename, after all of it was
on disk; on object storage `COMMIT` was written last.
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

from nestpipe.checkpoint.errors import RECOVERY_HINT, CheckpointError
from nestpipe.checkpoint.plain_file import Place, Written, plain_sizes, read_plain
from nestpipe.tables.config import DTYPES
from nestpipe.tables.group import MAX_TABLES

MANIFEST, COMMIT = "manifest.json", "COMMIT"
VERSION = 1
"""Of the format.  A reader refuses any other."""
_STEP = re.compile(r"step-([0-9]{8,18})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_SHA = re.compile(r"[0-9a-f]{64}")
KINDS = ("rows", "removed", "dense", "worker")
MOST_BYTES = 1 << 28
"""Largest manifest that is read."""
SEAL_BYTES = 65
"""Size of COMMIT: 64 digits and a newline."""
_KEY_BYTES = 10
"""Least size of a row in a file: its key and its table."""
MOST_WIDE = 1 << 24
"""Most numbers in a row."""


@dataclass(frozen=True)
class File:
    """One file: rows of a worker's table group, keys removed since the base, dense state, or a worker's own state."""

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


FREQUENCIES = "sightings"
"""Stands in for the optimizer's name in a group of frequencies.  The format has this spelling."""


@dataclass(frozen=True)
class Group:
    """A table group.  All fields but `rows` must match the model that restores it."""

    tables: list[str]
    dim: int
    dtype: str
    state_width: int
    optimizer: str
    rows: int = 0
    """Rows after this checkpoint and its base are applied, over all workers."""

    @property
    def waiting(self) -> bool:
        """True for a group of (frequency, last batch) of keys without a row: integers in the bits of float32."""
        return self.optimizer == FREQUENCIES


@dataclass(frozen=True)
class Base:
    """A checkpoint that an incremental one builds on: its name, and the digest of its manifest."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    """Number of batches trained."""
    workers: int
    files: list[File]
    groups: list[Group]
    base: list[Base] = field(default_factory=list)
    """Checkpoints to apply first, in this order.  Empty: this is a full checkpoint."""
    data: dict[str, Any] = field(default_factory=dict)
    """Position in the training data."""
    life: dict[str, Any] = field(default_factory=dict)
    """Eviction state: evicted keys per table, and the clock; {} without eviction.  The format has this name."""
    trainer: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float | None] = field(default_factory=dict)
    """Held-out metrics, if there was an evaluation at this step."""
    recipe: str = ""
    created: str = ""
    version: int = VERSION
    shards: int | None = None
    """Workers of the first shard group, whose rows these are; None: there was one group, of all workers."""

    @property
    def owners(self) -> int:
        """Among how many workers, the first ones, the rows are shared."""
        return self.workers if self.shards is None else self.shards

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
    """The step in a directory's name; None if it is not the name of a checkpoint.  Does not look inside."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name_of(int(match[1])) == name else None


def seal(directory: Path, manifest: Manifest) -> str:
    """Writes and syncs manifest and COMMIT, then the directory.  Returns the manifest's digest."""
    text, digest = sealed(manifest)
    for name, data in ((MANIFEST, text), (COMMIT, digest.encode() + b"\n")):
        with (directory / name).open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    sync_directory(directory)
    return digest


def sealed(manifest: Manifest) -> tuple[bytes, str]:
    """The text of manifest.json, and its digest, which COMMIT holds."""
    fields = asdict(manifest)
    if manifest.shards is None:  # as it was before there were groups
        del fields["shards"]
    text = json.dumps(fields, indent=1, allow_nan=False).encode() + b"\n"
    return text, hashlib.sha256(text).hexdigest()


def sync_directory(directory: Path) -> None:
    """Makes creations, renames and removals in the directory durable."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_manifest(directory: Place) -> tuple[Manifest, str]:
    """The manifest of a committed checkpoint, and its digest.  Checks that all files exist with the right size."""
    try:
        sealed = read_plain(directory / COMMIT, SEAL_BYTES)
        text = read_plain(directory / MANIFEST, MOST_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"{directory} is not a committed checkpoint: {error.strerror} ({error.filename})"
        ) from None
    digest = hashlib.sha256(text).hexdigest()
    if sealed != digest.encode() + b"\n":
        raise CheckpointError(f"{directory / MANIFEST} does not match {COMMIT}; {RECOVERY_HINT}")
    manifest = parse(text, directory / MANIFEST)
    for file, size in zip(manifest.files, _sizes(directory, manifest.files)):
        if size != file.bytes:
            raise CheckpointError(
                f"{directory / file.name} has {size:,} bytes instead of {file.bytes:,}; {RECOVERY_HINT}"
            )
    return manifest, digest


def _sizes(directory: Place, files: list[File]) -> list[int]:
    try:
        return plain_sizes(directory, [file.name for file in files])
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing; {RECOVERY_HINT}") from None
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}; {RECOVERY_HINT}") from None


def parse(text: bytes, path: Place) -> Manifest:
    """A manifest that is valid in every detail, or CheckpointError.  Later code trusts it."""
    try:
        manifest = _manifest(strict_json(text))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, _OtherVersion):
            raise CheckpointError(f"{path}: {reason}") from None
        raise CheckpointError(f"{path} is not a valid manifest ({reason}); {RECOVERY_HINT}") from None
    return manifest


class _OtherVersion(ValueError):
    """The manifest has another format version.  It may be fine otherwise."""


def strict_json(text: bytes) -> Any:
    """Strict JSON: no NaN, no infinity, no duplicate names, no lone surrogates."""
    raw = json.loads(text, object_pairs_hook=_names_once, parse_constant=_no_number, parse_float=_finite)
    if b"\\u" in text:
        json.dumps(raw, ensure_ascii=False).encode()  # UnicodeEncodeError for a lone surrogate
    return raw


def _names_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a duplicate name")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return float(text)


def _manifest(raw: Any) -> Manifest:
    _check_version(raw)  # first: another version may have other fields
    _only({"shards": None, **raw}, Manifest)
    _whole(raw, "step", "workers", *(["shards"] if "shards" in raw else []))
    if raw["workers"] < 1:
        raise ValueError("workers must be at least 1")
    shards = raw.get("shards", raw["workers"])
    if shards < 1 or raw["workers"] % shards:
        raise ValueError(f"shards must divide the number of workers, {raw['workers']}, not {shards}")
    for name in ("recipe", "created"):
        _text(raw, name)
    for name in ("data", "life", "trainer", "metrics"):
        if not isinstance(raw[name], dict):
            raise ValueError(f"{name} must be an object")
    for value in raw["metrics"].values():
        if not (value is None or type(value) is float or (type(value) is int and abs(value) < 1 << 62)):
            raise ValueError("metrics must be numbers")
    groups = [_group(item) for item in _list(raw, "groups")]
    files = [_file(item, raw["workers"], shards, len(groups)) for item in _list(raw, "files")]
    base = [_base(item) for item in _list(raw, "base")]
    steps = [*(step_of(item.name) for item in base), raw["step"]]
    if steps != sorted(set(steps)):
        raise ValueError("base must name earlier steps in ascending order")
    _check_files(files, raw["workers"])
    _check_groups(groups, files, full=not base)
    return Manifest(**{**raw, "groups": groups, "files": files, "base": base})


def _check_version(raw: Any) -> None:
    if not isinstance(raw, Mapping) or "version" not in raw:
        raise ValueError("it has no format version")
    _whole(raw, "version")
    if raw["version"] != VERSION:
        raise _OtherVersion(
            f"the checkpoint has format version {raw['version']}, and this nestpipe reads version {VERSION}: "
            "use the release that wrote it"
        )


def _check_files(files: list[File], workers: int) -> None:
    if len({file.name for file in files}) < len(files):
        raise ValueError("two files have the same name")
    if [file.worker for file in files if file.kind == "dense"] != [0]:
        raise ValueError("there must be one file of kind dense, from worker 0")
    if sorted(file.worker for file in files if file.kind == "worker") != list(range(min(workers, len(files) + 1))):
        raise ValueError("there must be one file of kind worker from every worker")


def _check_groups(groups: list[Group], files: list[File], full: bool) -> None:
    names = [(group.waiting, name) for group in groups for name in group.tables]
    if len(set(names)) < len(names):
        raise ValueError("two tables have the same name")
    tables = [group.tables for group in groups if not group.waiting]
    if not all(
        group.tables in tables and (group.dim, group.state_width) == (2, 0) for group in groups if group.waiting
    ):
        raise ValueError("a group of sightings must have two numbers per key, and the tables of another group")
    if full and any(file.kind == "removed" for file in files):
        raise ValueError("a full checkpoint has no files of kind removed")
    for number, group in enumerate(groups):
        rows = sum(file.rows for file in files if file.group == number and file.kind == "rows")
        if rows > group.rows or (full and rows != group.rows):
            raise ValueError(f"its files have {rows} rows of group {number}, and the group has {group.rows}")


def _file(raw: Any, workers: int, shards: int, groups: int) -> File:
    _only(raw, File)
    _whole(raw, "bytes", "worker", "rows")
    if not (isinstance(raw["name"], str) and _FILE.fullmatch(raw["name"]) and raw["name"] not in (MANIFEST, COMMIT)):
        raise ValueError(f"{raw['name']!r} is not the name of a file of a checkpoint")
    _check_sha(raw)
    if raw["kind"] not in KINDS:
        raise ValueError(f"{raw['kind']!r} is not a kind of file")
    of = shards if raw["kind"] in ("rows", "removed") else workers
    if raw["worker"] >= of:
        raise ValueError(f"file {raw['name']} is from worker {raw['worker']} of {of}")
    group = raw["group"]
    if type(group) is not int or not (0 <= group < groups if raw["kind"] in ("rows", "removed") else group == -1):
        raise ValueError(f"file {raw['name']} is for group {group!r} of {groups}")
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
        raise ValueError(f"a row cannot have {raw['dim']} values and {raw['state_width']} numbers of state")
    tables = _list(raw, "tables")
    if not all(isinstance(table, str) and table for table in tables) or not 1 <= len(tables) <= MAX_TABLES:
        raise ValueError("tables must be names")
    return Group(**raw)


def _base(raw: Any) -> Base:
    _only(raw, Base)
    if not isinstance(raw["name"], str) or step_of(raw["name"]) is None:
        raise ValueError(f"{raw['name']!r} is not the name of a checkpoint")
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
            raise ValueError(f"{name} must be an integer of at least 0, not {raw[name]!r}")


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
