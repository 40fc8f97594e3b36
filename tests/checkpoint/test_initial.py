"""Tables with initial rows from a file; and dense state, which must fit the model that restores it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from commands import small
from nestpipe.checkpoint.dense import clone_dense, restore_dense
from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import Folder
from nestpipe.checkpoint.load import restore
from nestpipe.checkpoint.vector_files import VectorsError, read_vectors
from nestpipe.cli.main import main
from nestpipe.comm.world import World
from nestpipe.config.recipe import Recipe, load_recipe
from nestpipe.data.kinds import KINDS as DATA
from nestpipe.models.kinds import KINDS as MODELS
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.train.build import make_pipeline, open_source
from nestpipe.train.initial import read_initial
from object_storage import Server
from workers import run

SETTINGS = ["checkpoint.every_steps=8", "tables.optimizer=adam", "train.steps=16", "model.dim=4", "model.bottom=[8, 4]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a full checkpoint of step 8 and an incremental one of step 16; item.* are an exported table."""
    path = tmp_path_factory.mktemp("trained") / "run"
    assert main([*small(*SETTINGS), "--run", str(path)]) == 0
    for name in ("item.parquet", "item.npz"):
        assert main(["checkpoint", "export", str(path), "--table", table_of(path), "--to", str(path / name)]) == 0
    return path


def table_of(run: Path) -> str:
    manifest = json.loads((run / "checkpoints" / "step-00000016" / "manifest.json").read_bytes())
    return str(manifest["groups"][0]["tables"][1])


def recipe_of(run: Path, *overrides: str) -> Recipe:
    return load_recipe(run / "recipe.toml", overrides, DATA, MODELS)


def fresh(world: World, recipe: Recipe, **options: Any) -> TrainPipeline:
    return make_pipeline(recipe, open_source(recipe, "train", world), world, **options)


def initial_rows(world: World, path: str, file: str, table: str, keys: np.ndarray) -> tuple[np.ndarray, int, float]:
    """Rows of keys before the first step, the number of rows on this worker, and the largest optimizer state."""
    recipe = recipe_of(Path(path), f"tables.initial={{ {table} = '{file}' }}")
    pipeline = fresh(world, recipe)
    group, number = pipeline.sparse.place_of(table)
    _, slots = pipeline.sparse.stores[group].rows_of(number)
    _, state = pipeline.sparse.stores[group].read(slots)
    found = pipeline.rows(table, keys).numpy()
    pipeline.close()
    return found, len(slots), float(np.abs(state).max(initial=0))


@pytest.mark.parametrize(("workers", "name"), [(1, "item.parquet"), (1, "item.npz"), (2, "item.parquet")])
def test_an_exported_table_starts_another_training(trained: Path, workers: int, name: str) -> None:
    """Export, import, `rows`: the bits of the saved run, on any number of workers, with zero optimizer state."""
    pipeline = fresh(World.single(), recipe_of(trained), empty=True)
    folder = Folder(trained / "checkpoints")
    last = folder.find()
    assert last is not None
    restore(pipeline, folder.chain(last))
    table = table_of(trained)
    group, number = pipeline.sparse.place_of(table)
    keys, _ = pipeline.sparse.stores[group].rows_of(number)
    wanted = pipeline.rows(table, keys).numpy()
    pipeline.close()
    parts = run(workers, initial_rows, str(trained), str(trained / name), table, keys)
    assert len(keys) > 50 and sum(count for _, count, _ in parts) == len(keys)
    for rows, _, state in parts:
        assert rows.tobytes() == wanted.tobytes() and state == 0


def test_a_new_run_reads_initial_rows_and_a_resumed_one_does_not(trained: Path, tmp_path: Path) -> None:
    """The run keeps the recipe's key, but resuming from a checkpoint no longer needs the file."""
    table, file = table_of(trained), tmp_path / "item.parquet"
    file.write_bytes((trained / "item.parquet").read_bytes())
    start = [
        *small(*SETTINGS, f"tables.initial={{ {table} = '{file}' }}"),
        "--run",
        str(tmp_path / "run"),
        "--steps",
        "8",
    ]
    assert main(start) == 0
    assert recipe_of(tmp_path / "run").tables.initial == {table: str(file)}
    file.unlink()
    assert main(["train", str(tmp_path / "run"), "--resume", "--steps", "10", "--quiet"]) == 0


def test_initial_rows_from_object_storage(trained: Path, storage: Server) -> None:
    """A recipe that names a URL starts with the same rows as one that names the local file."""
    storage.bucket("initial")
    storage.client().upload_file(str(trained / "item.parquet"), "initial", "item.parquet")
    table = table_of(trained)
    keys = pq.read_table(trained / "item.parquet")["key"].to_numpy()
    here, there = (
        initial_rows(World.single(), str(trained), file, table, keys)
        for file in (str(trained / "item.parquet"), "s3://initial/item.parquet")
    )
    assert (here[0] == there[0]).all() and here[1:] == there[1:] and len(keys)


def write(path: Path, keys: Any, vectors: Any, names: tuple[str, str] = ("key", "vector")) -> None:
    pq.write_table(pa.table({names[0]: keys, names[1]: vectors}), path, row_group_size=2)


def floats(*rows: list[float | None] | None, kind: Any = None) -> pa.Array:
    return pa.array(rows, kind or pa.list_(pa.float32()))


GOOD = [0.5, 1.0, 2.0, 3.0]
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "columns": (lambda p: write(p, [1], floats(GOOD), ("id", "vector")), "columns key and vector, but has id, vector"),
    "key type": (lambda p: write(p, [1.5], floats(GOOD)), "must be integers"),
    "vector type": (lambda p: write(p, [1], [["a"] * 4]), "lists of 4 floating point numbers"),
    "no list": (lambda p: write(p, [1], [0.5]), "lists of 4 floating point numbers"),
    "short": (lambda p: write(p, [1, 2, 3], floats(GOOD, GOOD, GOOD[:3])), "row 2 has a vector of 3 numbers"),
    "dim": (lambda p: write(p, [1], floats(GOOD[:3], kind=pa.list_(pa.float32(), 3))), "vectors of 3 numbers"),
    "nan": (lambda p: write(p, [1, 5], floats(GOOD, [0.5, float("nan"), 0, 0])), "key 5 has NaN or infinity"),
    "infinite": (lambda p: write(p, [1, 5], floats(GOOD, [1e300] * 4, kind=pa.list_(pa.float64()))), "key 5 has NaN"),
    "twice": (lambda p: write(p, [7, 7], floats(GOOD, GOOD)), "has key 7 more than once"),
    "twice, far apart": (lambda p: write(p, [7, 8, 9, 7], floats(GOOD, GOOD, GOOD, GOOD)), "has key 7 more than once"),
    "no key": (lambda p: write(p, [1, None], floats(GOOD, GOOD)), "nulls in column key"),
    "no vector": (lambda p: write(p, [1, 2], floats(GOOD, None)), "nulls in column vector"),
    "no number": (lambda p: write(p, [1, 2], floats(GOOD, [*GOOD[:3], None])), "nulls in column vector"),
    "not Parquet": (lambda p: p.write_bytes(b"PAR1 or so"), "cannot be read"),
    "missing": (lambda p: None, "no file"),
}


@pytest.fixture(scope="module")
def pipeline(trained: Path) -> TrainPipeline:
    return fresh(World.single(), recipe_of(trained), empty=True)


@pytest.mark.parametrize("case", BAD)
def test_files_that_do_not_fit_are_one_line(
    trained: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, pipeline: TrainPipeline
) -> None:
    """Wrong columns, types or widths, nulls, NaN, duplicate keys: one line that names the file and what to change."""
    monkeypatch.setattr("nestpipe.checkpoint.vector_files.GROUP_BYTES", 48)  # two rows at a time
    make, words = BAD[case]
    path = tmp_path / "bad.parquet"
    make(path)
    store = pipeline.sparse.stores[0]
    tables, keys, _ = store.index.items()
    store.index.delete(keys, tables)
    with pytest.raises(VectorsError) as caught:
        read_initial(pipeline, {table_of(trained): str(path)})
    assert str(path) in str(caught.value) and words in str(caught.value) and "\n" not in str(caught.value)


def test_files_of_numpy_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    """Missing arrays, wrong shapes, objects (which could be code), truncated files: one line each."""
    keys, vectors = np.arange(3), np.zeros((3, 4), np.float32)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"keys": keys}, "arrays keys and vectors"),
        ({"keys": keys[:2], "vectors": vectors}, "2 keys and 3 vectors"),
        ({"keys": keys, "vectors": vectors[:, :2]}, "vectors of 2 numbers"),
        ({"keys": keys * 0.5, "vectors": vectors}, "must be integers"),
        ({"keys": keys.astype(object), "vectors": vectors}, "rows of numbers"),
        ({"keys": keys, "vectors": vectors.astype(object)}, "rows of numbers"),
        ({"keys": keys, "vectors": vectors.astype(np.int32)}, "floating point"),
        ({"keys": keys, "vectors": np.asfortranarray(vectors)}, "rows of numbers"),
        ({"keys": keys[None], "vectors": vectors}, "rows of numbers"),
    ]
    for arrays, words in cases:
        np.savez(tmp_path / "x.npz", **arrays)
        with pytest.raises(VectorsError, match=words):
            list(read_vectors(tmp_path / "x.npz", 4, np.dtype(np.float32)))
    np.save(tmp_path / "y.npy", vectors)
    np.save(tmp_path / "y.keys.npy", keys)
    (tmp_path / "y.npy").write_bytes((tmp_path / "y.npy").read_bytes()[:-4])
    with pytest.raises(VectorsError, match="ends before its last row"):
        list(read_vectors(tmp_path / "y.npy", 4, np.dtype(np.float32)))


def test_unknown_tables_and_kinds_of_file_are_refused(trained: Path, pipeline: TrainPipeline) -> None:
    """A table that the model does not have, and a suffix that is not supported."""
    with pytest.raises(VectorsError, match=r"tables\.initial\.itme: the model has no table 'itme'"):
        read_initial(pipeline, {"itme": "x.parquet"})
    with pytest.raises(ValueError, match=r"tables\.initial\.item must be a file"):
        recipe_of(trained, "tables.initial={ item = 'x.csv' }")


def test_dense_state_of_another_model_is_refused(trained: Path) -> None:
    """500 dense states with a tensor missing, added, or of another shape or dtype: refused before anything changes."""
    pick = random.Random(1)
    pipeline = fresh(World.single(), recipe_of(trained), empty=True)
    folder = Folder(trained / "checkpoints")
    last = folder.find()
    assert last is not None
    restore(pipeline, folder.chain(last))
    right = clone_dense(pipeline)
    restore_dense(pipeline, right, "here")
    assert any(name.startswith("optimizer.") for name in right)
    for _ in range(500):
        tensors = dict(right)
        name = pick.choice(list(tensors))
        tensor = tensors.pop(name)
        how = pick.randrange(4)
        if how == 1:
            tensors[name] = tensor.reshape(1, *tensor.shape)
        elif how == 2:
            tensors[name] = tensor.to(torch.float16)
        elif how == 3:
            tensors[name] = tensor
            tensors[pick.choice(["x", "optimizer.x", "optimizer.x.y", "number.x", "rate.9", "rate.x", f"{name}.x"])] = (
                tensor
            )
        with pytest.raises(CheckpointError):
            restore_dense(pipeline, tensors, "here")
    assert all(torch.equal(tensor, right[name]) for name, tensor in clone_dense(pipeline).items())
    pipeline.close()
