"""A recipe that names a user's own classes: every command takes it, and none imports them without need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import own
from commands import Command, Ended, nestpipe, refused
from runs import small

WITH_CHECKPOINTS = ("--set", "checkpoint.every_steps=4")


def trained(folder: Path, *arguments: str, run: str = "run") -> dict[str, object]:
    command = Command(folder, ["train", *arguments, "--quiet"], run=run)
    ended = command.wait()
    assert ended.code == 0, ended.err
    summary: dict[str, object] = json.loads((folder / run / "summary.json").read_text())
    return summary


def imports(folder: Path) -> int:
    """How often the user's module was imported since the last call."""
    mark = folder / "imported"
    count = len(mark.read_text()) if mark.exists() else 0
    mark.unlink(missing_ok=True)
    return count


@pytest.mark.parametrize(("recipe", "kind"), [("dlrm", "MyDLRM"), ("hstu", "MyHSTU")])
def test_a_name_changes_no_bit(tmp_path: Path, recipe: str, kind: str) -> None:
    """Promise: a built-in model as a class of one's own has the digest of the built-in, dropout and rehearsal included."""
    own.write(tmp_path)
    settings = [part for setting in small(recipe) for part in ("--set", setting)]
    built_in = trained(tmp_path, recipe, *settings, run="built-in")
    mine = trained(tmp_path, recipe, *settings, "--set", f"model.kind=own_models:{kind}", run="own")
    assert (mine["digest"], mine["metrics"]) == (built_in["digest"], built_in["metrics"])


@pytest.mark.slow
def test_a_run_of_own_classes_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Promise: train on two workers, recipe.toml and resume know a user's class; reports and checkpoints do not import it."""
    own.write(tmp_path)
    whole = trained(tmp_path, "own.toml", "--workers", "2", run="whole")
    assert whole["metrics"]["samples"] == 100 and 0 < whole["metrics"]["auc"] < 1  # type: ignore[index]
    assert imports(tmp_path) == 3  # the command and its two workers
    trained(tmp_path, "own.toml", "--workers", "2", "--steps", "4", *WITH_CHECKPOINTS)
    assert 'kind = "own_models:Ranker"\ndim = 4' in (tmp_path / "run" / "recipe.toml").read_text()
    imports(tmp_path)
    for command in (["report", "run"], ["checkpoint", "ls", "run"], ["checkpoint", "inspect", "run"]):
        assert nestpipe(tmp_path, *command).code == 0
    assert nestpipe(tmp_path, "checkpoint", "export", "run", "--table", "f0", "--to", "f0.npz").code == 0
    assert imports(tmp_path) == 0
    ended = Command(tmp_path, ["train", "run", "--resume", "--set", "train.steps=none", "--quiet"], run="run").wait()
    assert ended.code == 0, ended.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["digest"] == whole["digest"]


def test_a_checkpoint_imports_no_class_that_the_recipe_does_not_name(tmp_path: Path) -> None:
    """Promise: another class with the same config is another model, and that of a checkpoint is not imported to find out."""
    own.write(tmp_path)
    trained(tmp_path, "own.toml", "--steps", "4", *WITH_CHECKPOINTS)
    recipe = tmp_path / "run" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("own_models:Ranker", "others:Ranker"))
    (tmp_path / "others.py").write_text((tmp_path / "own_models.py").read_text().replace('"imported"', '"others"'))
    imports(tmp_path)
    ended = nestpipe(tmp_path, "train", "run", "--resume", run="run")
    refused(ended, "model.kind changed from 'own_models:Ranker' to 'others:Ranker'", "change it back")
    assert imports(tmp_path) == 0 and (tmp_path / "others").exists()


def test_own_data_and_own_model_together(tmp_path: Path) -> None:
    """Promise: `data.kind` names a user's class as well; outputs of one logit a sample are evaluated by AUC."""
    own.write(tmp_path)
    (tmp_path / "evens.toml").write_text(
        '[data]\nkind = "own_data:Evens"\n[model]\nkind = "own_models:NoKeys"\n'
        '[tables]\noptimizer = "adam"\nlr = 0.1\n[train]\nbatch_size = 50\nepochs = 5\n'
    )
    assert trained(tmp_path, "evens.toml")["metrics"]["auc"] == pytest.approx(1.0)  # type: ignore[index]
    refused(nestpipe(tmp_path, "train", "evens.toml", "--set", "data.kind=own_data:OpensList"), "list without extent")


def test_what_an_own_model_is_evaluated_by(tmp_path: Path) -> None:
    """Promise: a ranking on sequences, the loss where outputs are no logits; what cannot be evaluated is found out at once."""
    own.write(tmp_path)
    loss = trained(tmp_path, "own.toml", "--set", "model.kind=own_models:WithDict", run="loss")["metrics"]
    auc = trained(tmp_path, "own.toml", run="auc")["metrics"]
    assert set(loss) == {"loss", "samples"} and loss["loss"] == pytest.approx(auc["log_loss"], rel=1e-6)  # type: ignore
    (tmp_path / "next.toml").write_text(
        '[data]\nkind = "sequences"\nusers = 200\nitems = 60\ngroups = 4\nmean_length = 6.0\nnegatives = 2\n'
        '[model]\nkind = "own_models:NextItem"\n[train]\nbatch_size = 50\n[eval]\ntop_k = [10]\n'
    )
    found = trained(tmp_path, "next.toml", run="next")["metrics"]
    assert {"hr@10", "ndcg@10"} < set(found)  # type: ignore[call-overload]
    wrong = ["train", "next.toml", "--set"]
    refused(nestpipe(tmp_path, *wrong, "model.kind=own_models:WrongTable"), "table is 'itme'", "its tables are item")
    refused(nestpipe(tmp_path, *wrong, "model.kind=own_models:WrongQuery"), "a query of 8 numbers", "(1, 3)")


@pytest.mark.slow
def test_workers_agree_on_the_metric(tmp_path: Path) -> None:
    """Promise: a worker that has no held-out sample, and so sees no outputs, chooses the same metric as the others."""
    own.write(tmp_path)
    few = ["--workers", "2", "--set", "data.eval_samples=1", "--set", "model.kind=own_models:WithDict"]
    assert set(trained(tmp_path, "own.toml", *few)["metrics"]) == {"loss", "samples"}  # type: ignore[call-overload]


def test_recipe_lists_the_keys_of_an_own_class(tmp_path: Path) -> None:
    """Promise: `nestpipe recipe module:Class` lists keys with help and defaults, for a model and for data."""
    own.write(tmp_path)

    def listed(kind: str) -> Ended:
        ended = nestpipe(tmp_path, "recipe", kind)
        assert ended.code == 0, ended.err
        return ended

    model = listed("own_models:Ranker").out
    assert "model.dim" in model and "Width of a row." in model and "model.scale" in model and "tables.lr" not in model
    assert "data.ids" in listed("own_data:Evens").out
    assert listed("own_models:NoKeys").out == "own_models:NoKeys has no keys\n"
    refused(nestpipe(tmp_path, "recipe", "own_models:NotAModule"), "neither a model", "nor data")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_wrong_class_ends_the_command(tmp_path: Path, workers: str) -> None:
    """Promise: exit code 2 and one line, before any worker starts; keys of an own class are checked like others."""
    own.write(tmp_path)
    train = ["train", "own.toml", "--workers", workers, "--set"]
    for setting, words in {
        "model.kind=own_models.Ranker": "write 'own_models:Ranker', with a colon",
        "model.kind=own_fails:Ranker": "ZeroDivisionError: division by zero",
        "model.dmi=3": "unknown key 'model.dmi': did you mean 'model.dim'?",
        "model.dim=0": "model.dim must be at least 1, not 0",
    }.items():
        ended = nestpipe(tmp_path, *train, setting)
        refused(ended, words)
        assert ended.code == 2
