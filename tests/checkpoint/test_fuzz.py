"""Ten thousand damaged and forged checkpoints: each is refused with CheckpointError, or restores the same content."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from made import CHANGED, FULL, groups, make, manifest_of, reseal
from nestpipe.checkpoint.check import check_chain
from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import Folder
from nestpipe.checkpoint.load import check_tables, restore_eviction
from nestpipe.checkpoint.manifest import name_of
from nestpipe.checkpoint.merge import merged_rows
from nestpipe.checkpoint.saved_rows import describe
from nestpipe.checkpoint.tensors import read_tensors, write_tensors
from nestpipe.checkpoint.worker_state import read_worker
from nestpipe.keys import owners_of
from nestpipe.sparse.eviction_state import restore_evictors
from nestpipe.tables.eviction.horizon import AgreedClock
from nestpipe.train.checkpoints import Resumed

SAVED_ROWS: Any = [SimpleNamespace(group=describe(group)) for group in groups()]
"""Enough of a train state to decide whether a checkpoint's tables fit."""
STATE: Any = SimpleNamespace(restore_eviction=lambda state: restore_evictors([], AgreedClock(), state, True))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if possible: the tests write tens of thousands of files."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="nestpipe-fuzz-", dir="/dev/shm") as folder:
        yield Path(folder)


def content(folder: Path, step: int) -> str:
    """A digest of everything that a resume takes from a checkpoint but the data position, read with every check."""
    found = Folder(folder)
    last = found.find(step)
    assert last is not None
    resumed = Resumed(found, last)
    resumed.positions()
    chain = resumed.chain
    check_tables(SAVED_ROWS, chain)
    check_chain(chain)
    restore_eviction(STATE, last)
    sha = hashlib.sha256(str((last.manifest.step, last.manifest.workers)).encode())
    for group in range(len(last.manifest.groups)):
        parts = list(merged_rows(chain, group))
        tables, keys = (np.concatenate([getattr(p, name) for p in parts]) for name in ("tables", "keys"))
        order = np.lexsort((keys, tables))
        for name in ("tables", "keys", "values", "state"):
            sha.update(np.concatenate([getattr(p, name) for p in parts])[order].tobytes())
    for file in last.manifest.of("dense"):
        for name, tensor in sorted(read_tensors(last.path / file.name, file.written).items()):
            sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + tensor.numpy().tobytes())
    for file in sorted(last.manifest.of("worker"), key=lambda file: file.worker):
        sha.update(read_worker(last.path / file.name, file.written)[0].numpy().tobytes())
    return sha.hexdigest()


class Bench:
    """A folder of checkpoints that is damaged, read and repaired, again and again."""

    def __init__(self, folder: Path, seed: int) -> None:
        make(folder)
        self.folder = folder
        self.random = random.Random(seed)
        self.files = {path: path.read_bytes() for path in sorted(folder.glob("*/*"))}
        self.right = {step: content(folder, step) for step in (FULL, CHANGED)}
        self.refused = self.same = 0

    def directory(self) -> Path:
        return self.folder / name_of(self.random.choice([FULL, CHANGED]))

    def judge(self, damaged: Path, what: object) -> None:
        """Asserts that the later checkpoint, and sometimes the earlier one, is refused or unchanged.  Then repairs the damaged
        file, its manifest and COMMIT."""
        for step in (CHANGED, FULL) if self.random.random() < 0.2 else (CHANGED,):
            try:
                assert content(self.folder, step) == self.right[step], f"loaded something else: {damaged} {what}"
            except CheckpointError as error:
                assert "\n" not in str(error), error
                self.refused += 1
                break
            except AssertionError:
                raise
            except BaseException as error:
                raise AssertionError(f"{type(error).__name__} {error} from {damaged} {what}") from error
        else:
            self.same += 1
        for stranger in (self.folder / name_of(step) / "link.safetensors" for step in (FULL, CHANGED)):
            stranger.unlink(missing_ok=True)
        for path in {damaged, damaged.with_name("manifest.json"), damaged.with_name("COMMIT")}:
            path.write_bytes(self.files[path])

    def check_repaired(self) -> None:
        """Asserts that no damage outlived its case: it would have hidden later ones."""
        assert {step: content(self.folder, step) for step in self.right} == self.right

    def mutated(self, data: bytes) -> bytes:
        """Flips, truncates, appends, inserts, removes or reverses some bytes."""
        pick = self.random
        at, to = sorted(pick.randrange(len(data) + 1) for _ in range(2))
        kind = pick.randrange(7)
        if kind == 0:
            return data[:at]
        if kind == 1:
            return data + pick.randbytes(pick.randrange(1, 40))
        if kind == 2:
            return data[:at] + data[to:]
        if kind == 3:
            return data[:at] + data[at:to][::-1] + data[to:]
        if kind == 4:
            return data[:at] + pick.randbytes(pick.randrange(1, 9)) + data[at:]
        changed = bytearray(data)
        for _ in range(pick.choice([1, 1, 1, 2, 8])):
            changed[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
        return bytes(changed)


@pytest.mark.slow
def test_damaged_manifests_and_seals_are_refused(place: Path) -> None:
    """3,500 changes to manifest.json or COMMIT, half of them with a matching COMMIT: refused, or the same content."""
    bench = Bench(place / "made", 1)
    for number in range(3500):
        directory = bench.directory()
        name = bench.random.choice(["manifest.json"] * 3 + ["COMMIT"])
        data = bench.mutated(bench.files[directory / name])
        if number % 2 and name == "manifest.json":
            reseal(directory, data)
        else:
            (directory / name).write_bytes(data)
        bench.judge(directory / name, number)
    assert bench.refused > 3000
    bench.check_repaired()


@pytest.mark.slow
def test_damaged_files_of_tensors_are_refused(place: Path) -> None:
    """2,500 tensor files with changed or swapped bytes, or a changed header with a matching digest: refused, or the same
    content."""
    bench = Bench(place / "made", 2)
    names = [path for path in bench.files if path.suffix == ".safetensors"]
    for number in range(2500):
        path = bench.random.choice(names)
        data = bench.files[path]
        if "group" in path.name and bench.random.random() < 0.5:
            # Only the header: nothing but the digest can vouch for the numbers.
            size = 8 + int.from_bytes(data[:8], "little")
            vouch(path, bench.mutated(data[:size]) + data[size:])
        elif bench.random.random() < 0.1:
            path.write_bytes(bench.files[bench.random.choice(names)])
        else:
            path.write_bytes(bench.mutated(data))
        bench.judge(path, number)
    assert bench.refused > 2250
    bench.check_repaired()


def vouch(path: Path, data: bytes, **fields: Any) -> None:
    """Writes a file, and its size and digest into the manifest."""
    path.write_bytes(data)
    manifest = manifest_of(path.parent)
    for entry in manifest["files"]:
        if entry["name"] == path.name:
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **fields}
    reseal(path.parent, json.dumps(manifest).encode())


NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 1 << 31, 1 << 62, 1 << 64, -(1 << 63), 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "x", "../x", "/etc/passwd", "..", ".", "a/b", "a\0b", "a\nb", "\ud800", "COMMIT",
    "manifest.json",     "dense.safetensors", "worker0.safetensors", "step-00000005", "step-00000010", "step-5",
    "step-" + "\u0660" * 7 + "\u0665", "step-" + "9" * 400,
    "../step-00000005", "float16", "float64", "object", "O", "int64", "V8", "rows", "removed", "dense", "worker", "0" * 64,
    "A" * 64,     "f" * 63, "é" * 64, [], {}, [[]], [None], {"a": 1}, [1, 2], "link.safetensors",
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All paths into a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def edit(pick: random.Random, manifest: dict[str, Any]) -> object:
    """Changes one value of a manifest.  Returns which."""
    at = pick.choice(list(places(manifest)))
    parent: Any = manifest
    for key in at[:-1]:
        parent = parent[key]
    value = parent[at[-1]]
    how = pick.randrange(10)
    if how == 0 and isinstance(parent, dict):
        del parent[at[-1]]
    elif how == 1 and isinstance(parent, list):
        parent.insert(pick.randrange(len(parent) + 1), value)
    elif how == 2 and isinstance(parent, list):
        parent.pop(at[-1])
    elif how == 3 and isinstance(parent, dict):
        parent[pick.choice(["x", "__class__", "version", ""])] = value
    elif how == 4 and isinstance(parent, list):
        pick.shuffle(parent)
    elif how == 5 and type(value) is int:
        parent[at[-1]] = value + pick.choice([-1, 1, 1000, 1 << 40, 1 << 70])
    elif how == 6:
        other: Any = manifest
        for key in pick.choice(list(places(manifest))):
            other = other[key]
        parent[at[-1]] = json.loads(json.dumps(other))
    else:
        parent[at[-1]] = pick.choice(NASTY)
    return how, at


@pytest.mark.slow
def test_forged_manifests_are_refused(place: Path) -> None:
    """3,000 manifests with one or two changed values and a matching COMMIT: refused, or the same content."""
    bench = Bench(place / "made", 3)
    (place / "made" / "x").write_bytes(bench.files[bench.folder / name_of(FULL) / "dense.safetensors"])
    for number in range(3000):
        directory = bench.directory()
        if bench.random.random() < 0.1:
            target = bench.random.choice([path for path in bench.files if path.suffix == ".safetensors"])
            (directory / "link.safetensors").symlink_to(target)
        manifest = manifest_of(directory)
        what = [edit(bench.random, manifest) for _ in range(bench.random.choice([1, 1, 2]))]
        text = json.dumps(manifest).encode()
        if number % 50 == 0:
            deep = bench.random.choice([b"[" * 100_000, b'{"a":' * 50_000, b"[" * 900 + b"]" * 900])
            text = text.replace(b'"metrics": ', b'"metrics": ' + deep + b', "metrics": ', 1)
        elif number % 50 == 1:
            text = text.replace(b'"step"', b'"step": 3, "step"', 1)
        reseal(directory, text)
        bench.judge(directory / "manifest.json", what)
    assert bench.refused > 1500
    bench.check_repaired()


def forged_tensors(
    pick: random.Random, path: Path, entry: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]] | bytes:
    """A well-formed tensor file that is wrong in one way, with the manifest fields to match."""
    arrays: dict[str, Any] = {k: v.numpy() for k, v in _loaded(path).items()}
    n = len(arrays["keys"])
    name = pick.choice(list(arrays))
    how = pick.randrange(9)
    if how == 0:
        arrays.pop(name)
    elif how == 1:
        arrays[pick.choice(["x", "Keys", ""])] = arrays[name]
    elif how == 2:
        kinds = [np.float16, np.int32, np.uint8, np.bool_, np.float64, np.int64, np.uint16]
        arrays[name] = arrays[name].astype(pick.choice([k for k in kinds if np.dtype(k) != arrays[name].dtype]))
    elif how == 3:
        shape = [*arrays[name].shape, 1] if pick.random() < 0.5 else [1, *arrays[name].shape]
        arrays[name] = arrays[name].reshape(shape)
    elif how == 4:
        arrays["tables"] = arrays["tables"] + np.uint16(pick.choice([2, 100, 65000]))
    elif how == 5:
        strangers = np.arange(5000, 9000)
        owners = owners_of(np.full(4000, arrays["tables"][0]), strangers, 2)
        arrays["keys"] = arrays["keys"].copy()
        arrays["keys"][0] = pick.choice(strangers[owners != entry["worker"]].tolist())
    elif how == 6:  # one row replaced by a copy of another
        places = np.arange(n)
        gone, again = pick.sample(range(n), 2) if n > 1 else (0, 0)
        places[gone] = again
        arrays = {k: v[places] for k, v in arrays.items()}
        if entry["kind"] == "removed":
            arrays.pop("tables")
    elif how == 7:
        arrays[name] = torch.from_numpy(arrays[name].astype(np.float32)).bfloat16()
    else:
        cut = pick.randrange(n)
        arrays = {k: v[:cut] for k, v in arrays.items()}
        return arrays, {"rows": cut}
    return arrays, {}


def _loaded(path: Path) -> dict[str, torch.Tensor]:
    import safetensors.torch

    return safetensors.torch.load(path.read_bytes())


def lying(pick: random.Random, data: bytes) -> bytes:
    """The same numbers under a wrong header."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    entry = header[pick.choice(list(header))]
    how = pick.randrange(8)
    huge = pick.choice([-1, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1, 1 << 64])
    if how == 0:
        entry["data_offsets"] = [entry["data_offsets"][0], huge]
    elif how == 1:
        entry["data_offsets"] = entry["data_offsets"][::-1]
    elif how == 2:
        entry["shape"] = [huge, *entry["shape"][1:]]
    elif how == 3:
        entry["shape"] = [1 << 33, 1 << 33, 0]
    elif how == 4:
        entry["dtype"] = pick.choice(["F8_E4M3", "C64", "F4", "X", "", None, 5, "I128"])
    elif how == 5:
        header |= {f"x{i}": entry for i in range(pick.choice([1, 50]))}
    elif how == 6:
        header["__metadata__"] = pick.choice([{"a": 1}, [], "x", {"a": "b" * 1000}])
    else:
        length = pick.choice([0, 1, size - 1, size + 1, 1 << 62, (1 << 64) - 1])
        return struct.pack("<Q", length) + data[8:]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


@pytest.mark.slow
def test_forged_files_of_rows_are_refused(place: Path) -> None:
    """1,200 wrong files of rows with correct digests: refused, never restored in part."""
    bench = Bench(place / "made", 4)
    rows = [path for path in bench.files if "group" in path.name]
    same = 0
    for number in range(1200):
        path = bench.random.choice(rows)
        entry = next(e for e in manifest_of(path.parent)["files"] if e["name"] == path.name)
        if number % 3 == 0:
            data = lying(bench.random, bench.files[path])
            same += b"__metadata__" in data  # does not affect the numbers
            vouch(path, data)
        else:
            forged = forged_tensors(bench.random, path, entry)
            assert not isinstance(forged, bytes)
            path.unlink()
            write_tensors(path, forged[0])
            vouch(path, path.read_bytes(), **forged[1])
        bench.judge(path, number)
    assert bench.same <= same
    bench.check_repaired()


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('"seconds": 1.5', '"seconds": 1e999'),
        ('"seconds": 1.5', '"seconds": NaN'),
        ('"seconds": 1.5', '"seconds": 1.5, "seconds": 1.5'),
        ('"recipe": "', '"recipe": "\\ud800'),
        ('"version": 1', '"version": 1.0'),
        ('"name": "dense.safetensors"', '"name": "../step-00000005/dense.safetensors"'),
    ],
)
def test_a_manifest_has_one_meaning(place: Path, good: str, bad: str) -> None:
    """NaN, duplicate names, lone surrogates, other versions and paths are refused, even with a matching COMMIT."""
    bench = Bench(place / "made", 6)
    directory = bench.folder / name_of(CHANGED)
    text = bench.files[directory / "manifest.json"].decode()
    assert text.count(good) == 1
    reseal(directory, text.replace(good, bad).encode())
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        content(bench.folder, CHANGED)


@pytest.mark.parametrize("fields", [{}, {"compression": "zstd"}], ids=["same fields", "new field"])
def test_a_newer_format_version_is_one_clear_line(place: Path, fields: dict[str, Any]) -> None:
    """Promise: a checkpoint of a later release is refused by its version, whatever else that release has added."""
    make(place / "made")
    directory = place / "made" / name_of(CHANGED)
    manifest = manifest_of(directory)
    assert manifest["version"] == 1
    reseal(directory, json.dumps({**manifest, **fields, "version": 2}).encode())
    wanted = r"^\S+manifest\.json: the checkpoint has format version 2, and this nestpipe reads version 1: use the release .*$"
    with pytest.raises(CheckpointError, match=wanted):
        content(place / "made", CHANGED)
    assert content(place / "made", FULL)


@pytest.mark.parametrize("name", ["manifest.json", "COMMIT", "dense.safetensors", "worker1-group0-rows.safetensors"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "missing", "device"])
def test_only_regular_files_are_read(place: Path, name: str, kind: str) -> None:
    """A link, even to the same bytes, a pipe, a directory, a device or nothing in place of a file is refused."""
    bench = Bench(place / "made", 5)
    path = bench.folder / name_of(CHANGED) / name
    path.rename(place / "moved")
    put: dict[str, Callable[[], object]] = {
        "link": lambda: path.symlink_to(place / "moved"),
        "pipe": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "missing": lambda: None,
        "device": lambda: path.symlink_to("/dev/zero"),
    }
    put[kind]()
    with pytest.raises(CheckpointError):
        content(bench.folder, CHANGED)
