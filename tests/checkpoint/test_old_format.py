"""Promise: checkpoints of earlier commits stay usable.  `written_by_5591db0` is a run of that commit, as it left it.

Two workers trained it for 24 steps under `nested`: delayed admission, eviction by age and by row count, a full checkpoint of
step 16, and incremental ones of steps 20 and 24.  `DIGESTS` are what 5591db0 itself reported, the last one at the end of an
uninterrupted run of 36 steps.

No digest here depends on how a CPU multiplies matrices: the model is `timed`, which has no matrix product.  Ids and labels are
drawn without `exp` or powers.  5591db0 gave the same digests with ATEN_CPU_CAPABILITY=default and NUMBA_CPU_NAME=generic.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from commands import nestpipe
from nestpipe.checkpoint.folder import Folder
from nestpipe.checkpoint.load import restore
from nestpipe.comm.world import World
from nestpipe.config.recipe import parse_recipe
from nestpipe.data.kinds import KINDS as DATA
from nestpipe.models.kinds import KINDS as MODELS
from nestpipe.train.build import make_pipeline, open_source
from nestpipe.train.digest import digest
from runs import recipe_of, resume
from workers import run

OLD = Path(__file__).parent / "written_by_5591db0"
LAST, END = 24, 36
DIGESTS = {
    LAST: "10848a1c478e2fb8010d9bed84f11cbcc1164371c819d49bb5360641e322d3f7",
    END: "bc3e94836e027524c1b59ab3e6b7e6d669ee9628631fb4b83455ad8cf8ae088a",
}
EVICTED = {"f0": 62, "f1": 3}
"""Keys that 5591db0 had evicted by step 36."""
MODEL = [
    "data.features=2", "data.ids=[90, 40]", "data.zipf=0.0", "data.samples=300", "model.dim=4", "model.samples=8",
    "model.dense_parameters=20", "tables.admit_after=2", "tables.ttl_steps=9", "tables.max_rows=50", "tables.sweep_every=5",
    "dense.momentum=0.5", "train.batch_size=8",
]  # fmt: skip
"""As much of the old recipe, in today's spelling, as decides whether its checkpoints fit."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the old run that a test may change."""
    return Path(shutil.copytree(OLD, tmp_path / "run"))


def digest_of(world: World, checkpoints: str) -> str:
    """The digest after restoring the last checkpoint, before anything is trained."""
    recipe = recipe_of("timed", MODEL)
    pipeline = make_pipeline(recipe, open_source(recipe, "train", world), world, empty=True)
    folder = Folder(Path(checkpoints))
    last = folder.find()
    assert last is not None
    restore(pipeline, folder.chain(last))
    found = digest(pipeline)
    pipeline.close()
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_old_checkpoint_restores_its_digest(workers: int) -> None:
    """On the number of workers that wrote it, and on others."""
    assert run(workers, digest_of, str(OLD / "checkpoints")) == [DIGESTS[LAST]] * workers


def test_the_commands_accept_an_old_checkpoint(tmp_path: Path) -> None:
    """`ls` finds all three, `verify` reads the whole chain, `export` has the rows."""
    listed = nestpipe(tmp_path, "checkpoint", "ls", str(OLD), "--json", "-").summary()
    assert [(one["step"], one["full"]) for one in listed["checkpoints"]] == [(16, True), (20, False), (LAST, False)]
    assert listed["checkpoints"][-1]["base"] == ["step-00000016", "step-00000020"] and not listed["strays"]
    verified = nestpipe(tmp_path, "checkpoint", "verify", str(OLD), "--all", "--json", "-").summary()
    assert [(one["step"], one["checkpoints"]) for one in verified["checked"]] == [(LAST, 3)]
    assert verified["checked"][0]["rows"] == listed["checkpoints"][-1]["rows"]
    exported = nestpipe(tmp_path, "checkpoint", "export", str(OLD), "--table", "f0", "--to", "f0.parquet")
    assert exported.code == 0, exported.err


@pytest.mark.slow
def test_an_old_run_resumes_with_the_digest_it_would_have_had(tmp_path: Path, old: Path) -> None:
    """From its last checkpoint, with the command line: what 5591db0 itself reported at the same step, evicted keys included."""
    arguments = ["train", str(old), "--resume", "--steps", str(END), "--quiet", "--json", "-"]
    summary = nestpipe(tmp_path, *arguments, run=old.name).summary()
    assert summary["steps"] == END and summary["digest"] == DIGESTS[END] and summary["evicted"] == EVICTED
    listed = nestpipe(tmp_path, "evicted", str(old), "--json", "-").summary()
    assert listed["evicted"] == EVICTED
    assert nestpipe(tmp_path, "checkpoint", "verify", str(old), "--all").code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("step", "schedule"), [(16, "serial"), (20, "dbp")])
def test_an_old_run_resumes_from_any_of_its_checkpoints(old: Path, step: int, schedule: str) -> None:
    """From the full one and from the middle of the chain, under another schedule."""
    settings = [f"pipeline.schedule={schedule}", f"train.steps={END}"]
    found = run(2, resume, str(OLD / "recipe.toml"), settings, str(old), step)
    assert [summary["digest"] for summary in found] == [DIGESTS[END]] * 2


@pytest.mark.parametrize("value", [True, False])
def test_old_recipe_keys_are_accepted(value: bool) -> None:
    """pipeline.late_weights, in the run and in its manifests, is today's pipeline.defer_weight_grads."""
    last = Folder(OLD / "checkpoints").find()
    assert last is not None
    for text in ((OLD / "recipe.toml").read_text(), last.manifest.recipe):
        assert tomllib.loads(text)["pipeline"]["late_weights"] is True
        text = text.replace("late_weights = true", f"late_weights = {str(value).lower()}")
        recipe = parse_recipe(text, DATA, MODELS)
        assert recipe.pipeline.defer_weight_grads is value and "late_weights" not in recipe.to_toml()
