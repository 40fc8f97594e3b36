"""A run, checkpoint or export opened as a model: the scores of the training run, bit for bit, without training code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import own
from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import Folder
from nestpipe.comm.world import World
from nestpipe.config.recipe import parse_recipe
from nestpipe.data.kinds import KINDS as DATA
from nestpipe.data.source import DataError
from nestpipe.data.stream import Stream
from nestpipe.infer.data_shape import shape_of
from nestpipe.infer.export import export_for_serving
from nestpipe.infer.open_run import OpenModel, open_data, open_model
from nestpipe.models.kinds import KINDS as MODELS
from nestpipe.train.build import make_pipeline, open_source
from nestpipe.train.checkpoints import find_resumed, restore_run
from runs import EVERY, disk, recipe_of, small, steps_in, train_run
from workers import run as run_on

SETTINGS = {
    "plain": [],
    "chain": ["checkpoint.keep=9", "checkpoint.full_every=3"],
    "evicting": ["tables.admit_after=2", "tables.ttl_steps=4", "tables.sweep_every=2"],
    "float64": ["tables.dtype=float64"],
    "normal": ["tables.init=normal", "tables.init_scale=0.3"],
}


def trained(world: World, model: str, settings: list[str], run: str) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """What a pipeline restored from the run's last checkpoint returns for the evaluation split, and rows of many keys."""
    train_run(world, model, settings, run)
    return evaluated(world, model, settings, run)


def evaluated(
    world: World, model: str, settings: list[str], run: str
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    recipe = recipe_of(model, settings)
    resumed = find_resumed(recipe, Path(run), None, lambda text: parse_recipe(text, DATA, MODELS))
    assert resumed is not None
    pipeline = make_pipeline(recipe, open_source(recipe, "train", world), world, empty=True)
    restore_run(pipeline, resumed, lambda done: None)
    stream = Stream(open_source(recipe, "eval", world), recipe.eval.batch_size, rank=world.rank, workers=world.size)
    outputs = [out.numpy() for _, out in pipeline.evaluate(stream)]
    tables = [table.name for store in pipeline.stores for table in store.group.tables]
    rows = {table: pipeline.rows(table, np.arange(-200, 300)).numpy() for table in tables}
    pipeline.close()
    return outputs, rows


def outputs_of(opened: OpenModel) -> list[np.ndarray]:
    source = open_data(opened.recipe, "eval")
    return [opened.outputs(batch).numpy() for batch in Stream(source, opened.recipe.eval.batch_size)]


def export(run: Path, to: Path, **options: Any) -> Path:
    folder = Folder(run / "checkpoints")
    last = folder.find()
    assert last is not None
    recipe = parse_recipe(last.manifest.recipe, DATA, MODELS)
    export_for_serving(folder.chain(last), to, *shape_of(open_data(recipe, "train")), **options)
    return to


def same(opened: OpenModel, outputs: list[np.ndarray], rows: dict[str, np.ndarray]) -> None:
    found = outputs_of(opened)
    assert [out.tobytes() for out in found] == [out.tobytes() for out in outputs] and outputs
    for table, wanted in rows.items():
        assert opened.rows.read(table, np.arange(-200, 300)).tobytes() == wanted.tobytes()
    opened.close()


@pytest.mark.parametrize("model", ["dlrm", "hstu"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_scores_are_those_of_the_training_run(tmp_path: Path, model: str, kind: str) -> None:
    """Promise: from the run, from an export memory-mapped and from one on disk with little memory, the model returns what an
    evaluation in training returned, bit for bit, and so do its tables, for keys with and without a row."""
    run = tmp_path / "run"
    settings = small(model, EVERY, "train.epochs=1", *SETTINGS[kind])
    if kind == "float64" and model == "hstu":
        settings += ["dense.dtype=float64"]  # it multiplies rows and weights as they are
    outputs, rows = trained(World.single(), model, settings, str(run))
    assert len(steps_in(run)) > 1
    same(open_model(run), outputs, rows)
    to = export(run, tmp_path / "export")
    same(open_model(to), outputs, rows)
    same(open_model(str(to), memory=6000), outputs, rows)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_all_shards_of_all_workers_are_read(tmp_path: Path, workers: int) -> None:
    """Promise: one process reads the tables of a run of several workers, with a disk tier, eviction and a chain; a run of one
    worker that is given them returns the same."""
    run = tmp_path / "run"
    extra = [*SETTINGS["evicting"], *SETTINGS["chain"], *disk(tmp_path)]
    settings = small("dlrm", EVERY, "train.epochs=1", *extra)
    _, rows = run_on(workers, trained, "dlrm", settings, str(run))[0]
    alone, again = evaluated(World.single(), "dlrm", settings, str(run))
    for table in rows:
        assert rows[table].tobytes() == again[table].tobytes()
    same(open_model(run), alone, rows)
    same(open_model(export(run, tmp_path / "export"), memory=8000), alone, rows)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run"
    train_run(World.single(), "dlrm", small("dlrm", EVERY, "train.epochs=1", "checkpoint.full_every=1"), str(path))
    return path


def test_no_training_code_is_imported(run: Path, tmp_path: Path) -> None:
    """Promise: opening and scoring, from a run and from an export, import no engine, pipeline or trainer, and join no group."""
    to = export(run, tmp_path / "export")
    program = f"""
import sys
from nestpipe.infer.open_run import open_model
from nestpipe.infer.predict import predict_to
for path in ({str(run)!r}, {str(to)!r}):
    open_model(path)
rooms = {{name.split(".")[1] for name in sys.modules if name.startswith("nestpipe.")}}
bad = rooms & {{"engine", "pipeline", "sparse", "dense", "train", "launch", "lab", "sim", "report", "cli"}}
assert not bad, bad
import torch.distributed
assert not torch.distributed.is_initialized()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_an_export_needs_no_data(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a checkpoint whose data cannot be opened is one line that names the way out, and an export opens without it."""
    to = export(run, tmp_path / "export")

    def gone(*_: object) -> None:
        raise DataError("data.paths: no such file: x")

    monkeypatch.setattr("nestpipe.data.clicks.ClicksData.open", gone)
    with pytest.raises(DataError, match=r"cannot be opened \(data.paths: no such file: x\); .*--for-serving"):
        open_model(run)
    opened = open_model(to)
    assert opened.step == steps_in(run)[-1] and not opened.model.training
    assert not any(parameter.requires_grad for parameter in opened.model.parameters())


def test_own_classes_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a run of a class of one's own opens, from its checkpoint and from an export."""
    monkeypatch.chdir(own.write(tmp_path))
    settings = small("dlrm", EVERY, "train.epochs=1")
    settings = [one for one in settings if not one.startswith("model.")] + ["model.kind='own_models:Ranker'"]
    with own.importable():
        (tmp_path / "own.toml").write_text('[data]\nkind = "clicks"\n[model]\nkind = "own_models:Ranker"\n')
        settings = [one for one in settings if "model.kind" not in one]
        outputs, rows = trained(World.single(), str(tmp_path / "own.toml"), settings, str(tmp_path / "run"))
        same(open_model(tmp_path / "run"), outputs, rows)
        same(open_model(export(tmp_path / "run", tmp_path / "e")), outputs, rows)


def test_a_checkpoint_that_vanishes_gives_way_to_the_next(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: of a run that goes on, the newest complete checkpoint is opened; one that is removed meanwhile is tried again with
    the next newest, and one that is open stays whole after it is removed."""
    going = tmp_path / "going"
    shutil.copytree(run, going)
    folder = going / "checkpoints"
    steps = steps_in(going)
    (folder / ".writing-step-00000099").mkdir()
    (folder / "step-00000098").mkdir()
    hidden = tmp_path / "later"
    (folder / f"step-{steps[-1]:08d}").rename(hidden)
    find, seen = Folder.find, []

    def removed_meanwhile(self: Folder, step: int | None = None) -> Any:
        found = find(self, step)
        seen.append(found.manifest.step if found else None)
        if len(seen) == 1:
            hidden.rename(folder / f"step-{steps[-1]:08d}")
            shutil.rmtree(folder / f"step-{steps[-2]:08d}")
        return found

    monkeypatch.setattr(Folder, "find", removed_meanwhile)
    opened = open_model(going)
    assert seen == [steps[-2], steps[-1]] and opened.step == steps[-1]
    wanted = outputs_of(open_model(run))
    shutil.rmtree(folder)
    assert [out.tobytes() for out in outputs_of(opened)] == [out.tobytes() for out in wanted]


def test_what_cannot_be_opened_is_one_line(run: Path, tmp_path: Path) -> None:
    """Promise: no checkpoint, a damaged newest one, another step, too little memory, object storage: each one line."""
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    dense = broken / "checkpoints" / f"step-{steps_in(run)[-1]:08d}" / "dense.safetensors"
    dense.write_bytes(dense.read_bytes()[:-1] + b"x")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (tmp_path / "nothing", {}, "no directory"),
        (tmp_path / "empty", {}, "no checkpoint in"),
        (broken, {}, "dense.safetensors is damaged"),
        (run, {"step": 77}, "no checkpoint of step 77"),
        (run, {"memory": 1000}, "--for-serving"),
        ("s3://bucket/run", {}, "inference reads local files"),
    ]
    for path, options, words in cases:
        with pytest.raises(CheckpointError, match=words) as caught:
            open_model(path, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="memory must be at least 1 byte"):
        open_model(run, memory=0)


def test_opening_leaves_random_state_alone(run: Path) -> None:
    """Promise: a program that opens a model draws the numbers that it would have drawn."""
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    open_model(run)
    assert torch.equal(torch.rand(3), wanted)
