"""A damaged, missing or unreadable file of an export or a checkpoint: one line that names it, never a wrong row."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_row_reader import SEED, configs, exported, mapped

from made import make, manifest_of, reseal
from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.infer.block_rows import CachedBlocks
from nestpipe.infer.errors import RowReadError
from nestpipe.infer.row_reader import Rows, rows_of_export
from nestpipe.infer.serving_files import read_serving

ALL = np.arange(-1000, 1000)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    make(tmp_path / "c")
    exported(tmp_path / "c", tmp_path / "e").close()
    return tmp_path / "e"


def open_export(directory: Path, memory: int | None = None) -> Rows:
    return rows_of_export(directory, read_serving(directory)[0], configs(), SEED, memory)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def swap_blocks(path: Path) -> None:
    """Of two tables: each block is whole, but belongs elsewhere."""
    shutil.copy(path.with_name("table00001.rows"), path)


def change(directory: Path, how: Callable[[dict[str, Any]], None]) -> None:
    """Another manifest, with the seal that is right for it."""
    import hashlib

    raw = json.loads((directory / "serving.json").read_text())
    how(raw)
    text = json.dumps(raw).encode()
    (directory / "serving.json").write_bytes(text)
    (directory / "COMMIT").write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n")


@pytest.mark.parametrize("memory", [None, 50_000])
@pytest.mark.parametrize("at", [0, 9, 400, 4090])
def test_a_flipped_bit_is_found_when_its_block_is_read(export: Path, memory: int | None, at: int) -> None:
    """Promise: any changed bit of a block, in checksum, keys, values or padding, is an error that names the file."""
    flip(export / "table00000.rows", at)
    reader = open_export(export, memory)
    for _ in range(2):
        with pytest.raises(
            RowReadError, match=r"table00000\.rows is damaged: block 0 does not match its checksum; restore"
        ):
            reader.read("item", ALL)
    reader.read("user", ALL)


@pytest.mark.parametrize("memory", [None, 50_000])
def test_blocks_of_another_table_are_found(export: Path, memory: int | None) -> None:
    """Promise: a file that was exchanged for another is damaged, although every block of it is whole."""
    swap_blocks(export / "table00000.rows")
    with pytest.raises((RowReadError, CheckpointError), match=r"table00000\.rows"):
        open_export(export, memory).read("item", ALL)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["table00000.rows", "table00002.fences.safetensors", "serving.json", "COMMIT"])
@pytest.mark.parametrize(
    "harm",
    [
        Path.unlink,
        link,
        pipe,
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(b""),
    ],
    ids=["missing", "link", "pipe", "short", "empty"],
)
def test_a_missing_or_torn_file_is_one_line(export: Path, name: str, harm: Callable[[Path], None]) -> None:
    """Promise: whatever became of a file, opening says which in one line, and waits for nothing."""
    harm(export / name)
    with pytest.raises(CheckpointError) as caught:
        open_export(export)
    words = str(caught.value)
    assert "\n" not in words and (name.split(".")[0] in words or "serving.json" in words)


@pytest.mark.parametrize(
    "how",
    [
        lambda raw: raw.update(version=2),
        lambda raw: raw.update(more=1),
        lambda raw: raw.pop("recipe"),
        lambda raw: raw["tables"][0].update(dim=0),
        lambda raw: raw["tables"][0].update(rows=-1),
        lambda raw: raw["tables"][0].update(rows=10**12),
        lambda raw: raw["tables"][0].update(file="../x"),
        lambda raw: raw["tables"][0].update(stored="object"),
        lambda raw: raw["tables"][1].update(name="item"),
        lambda raw: raw["tables"][0].update(name="other"),
        lambda raw: raw["tables"][0].update(dim=5),
        lambda raw: raw.update(tables="x"),
        lambda raw: raw.update(dense=None),
    ],
)
def test_a_manifest_that_is_not_valid_is_one_line(export: Path, how: Callable[[dict[str, Any]], None]) -> None:
    """Promise: a manifest is used only if all of it makes sense, seal or no seal."""
    change(export, how)
    with pytest.raises(CheckpointError) as caught:
        open_export(export)
    assert "\n" not in str(caught.value)


def test_a_read_error_is_one_line_and_passes(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a disk that fails is an error that says where; when it is back, so are the rows."""
    wanted = open_export(export).read("item", ALL)
    for memory in (None, 50_000):
        reader = open_export(export, memory)
        stored = reader._stored["item"]
        real = stored.file._io.transfer  # type: ignore[attr-defined]
        for result, why in ((-errno.EIO, "Input/output error"), (100, "it ends before that")):

            def failing(*args: Any, result: int = result) -> np.ndarray:
                return np.full(len(args[2]), result)

            monkeypatch.setattr(stored.file._io, "transfer", failing)  # type: ignore[attr-defined]
            with pytest.raises(RowReadError, match=rf"table00000\.rows: reading 4096 bytes at 0 failed: {why}"):
                reader.read("item", ALL)
        monkeypatch.setattr(stored.file._io, "transfer", real)  # type: ignore[attr-defined]
        assert isinstance(stored, CachedBlocks) == (memory is not None)
        assert reader.read("item", ALL).tobytes() == wanted.tobytes()


def test_memory_that_does_not_hold_the_index_is_one_line(export: Path) -> None:
    """Promise: too little memory is said, not taken."""
    with pytest.raises(CheckpointError, match="give more memory"):
        open_export(export, 10)


@pytest.mark.parametrize("at", [20, -3])
def test_a_damaged_checkpoint_is_found_when_it_is_opened(tmp_path: Path, at: int) -> None:
    """Promise: opening a checkpoint checks every byte that it reads, as a restore does."""
    make(tmp_path / "c")
    path = tmp_path / "c" / "step-00000005" / "worker1-group0-rows.safetensors"
    flip(path, at)
    with pytest.raises(CheckpointError, match=r"worker1-group0-rows\.safetensors is damaged: its SHA-256"):
        mapped(tmp_path / "c")


def test_a_checkpoint_with_wrong_counts_is_refused(tmp_path: Path) -> None:
    """Promise: a manifest whose row count is not that of its files is found, though its seal is right."""
    make(tmp_path / "c")
    directory = tmp_path / "c" / "step-00000010"
    raw = manifest_of(directory)
    raw["groups"][0]["rows"] += 1
    reseal(directory, json.dumps(raw).encode())
    with pytest.raises(CheckpointError, match="in its manifest"):
        mapped(tmp_path / "c")


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    """Promise: an export appears whole or not at all, and never over something that is there."""
    make(tmp_path / "c")
    flip(tmp_path / "c" / "step-00000005" / "worker0-group1-rows.safetensors", -1)
    with pytest.raises(CheckpointError):
        exported(tmp_path / "c", tmp_path / "e")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    (tmp_path / "e").mkdir()
    with pytest.raises(ValueError, match="already exists"):
        exported(tmp_path / "c", tmp_path / "e")
