"""An export for serving: a directory with the tables' blocks, the dense model and the recipe.  `serving.json` lists it.

`COMMIT` holds the SHA-256 of `serving.json`.  The directory got its name by one rename, after all of it was on disk.  Nothing
in it is code, and nothing of it is executed.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.manifest import COMMIT, MOST_BYTES, MOST_WIDE, SEAL_BYTES, strict_json
from nestpipe.checkpoint.plain_file import Written, read_plain
from nestpipe.config.build import RecipeError, build
from nestpipe.infer.block_file import HINT
from nestpipe.infer.block_layout import BlockLayout, Stored
from nestpipe.tables.config import DTYPES

SERVING = "serving.json"
VERSION = 1
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@dataclass(frozen=True)
class ServingTable:
    """One table: a file of blocks, and a file of fences."""

    name: str
    dim: int
    dtype: str
    """In training."""
    stored: Stored
    rows: int
    file: str
    salt: int
    """Goes into every checksum: blocks of another export do not pass."""
    fences: Written

    def __post_init__(self) -> None:
        if not 1 <= self.dim <= MOST_WIDE or self.rows < 0 or self.dtype not in DTYPES or not 0 <= self.salt < 1 << 63:
            raise ValueError(f"table {self.name!r} cannot have {self.rows} rows of {self.dim} {self.dtype}")
        for name in (self.file, self.fences.name):
            _check_name(name)

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.dim, self.stored)

    @property
    def bytes(self) -> int:
        return self.layout.blocks_of(self.rows) * self.layout.block_bytes


@dataclass(frozen=True)
class DataShape:
    """What a model's constructor needs to know of its training data."""

    features: list[str]
    dense_features: int
    longest: int = 0
    """Items in the longest history; 0 where there are none."""


@dataclass(frozen=True)
class ServingManifest:
    step: int
    checkpoint: str
    """Digest of the manifest of the checkpoint that was exported."""
    tables: list[ServingTable]
    dense: Written
    recipe: str
    data: DataShape
    catalogue: list[Written] = field(default_factory=list)
    """One file of all items, ascending, for a model of sequences; otherwise none."""
    created: str = ""
    version: int = VERSION

    def __post_init__(self) -> None:
        names = [table.name for table in self.tables]
        files = [name for table in self.tables for name in (table.file, table.fences.name)]
        files += [self.dense.name, *(file.name for file in self.catalogue)]
        for name in (self.dense.name, *(file.name for file in self.catalogue)):
            _check_name(name)
        if len(set(names)) < len(names) or len(set(files)) < len(files) or len(self.catalogue) > 1 or self.step < 0:
            raise ValueError("two tables or two files have the same name")

    @property
    def bytes(self) -> int:
        return sum(table.bytes + table.fences.bytes for table in self.tables) + self.dense.bytes


def is_export(place: Path) -> bool:
    return (place / SERVING).is_file()


def write_serving(directory: Path, manifest: ServingManifest) -> None:
    text = json.dumps(asdict(manifest), indent=1, allow_nan=False).encode() + b"\n"
    (directory / SERVING).write_bytes(text)
    (directory / COMMIT).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n")


def read_serving(directory: Path) -> tuple[ServingManifest, str]:
    """The manifest, valid in every detail, and its digest.  CheckpointError in one line otherwise."""
    path = directory / SERVING
    try:
        sealed = read_plain(directory / COMMIT, SEAL_BYTES)
        text = read_plain(path, MOST_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"{directory} is not a complete export: {error.strerror} ({error.filename}); {HINT}"
        ) from None
    digest = hashlib.sha256(text).hexdigest()
    if sealed != digest.encode() + b"\n":
        raise CheckpointError(f"{path} does not match {COMMIT}; {HINT}")
    try:
        raw = strict_json(text)
        if isinstance(raw, dict) and raw.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has format version {raw.get('version')!r}, and this nestpipe reads version {VERSION}: use the "
                "release that wrote it"
            )
        return build(ServingManifest, raw, "export"), digest
    except (RecipeError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is not valid ({' '.join(str(error).split())}); {HINT}") from None


def _check_name(name: str) -> None:
    if not _FILE.fullmatch(name) or name in (SERVING, COMMIT):
        raise ValueError(f"{name!r} is not the name of a file of an export")
