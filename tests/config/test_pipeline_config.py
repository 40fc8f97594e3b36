"""`PipelineConfig` is the one place of a knob's name, check and default: for recipes, the API, ladders and `schedule`."""

from __future__ import annotations

import ast
import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nestpipe
from nestpipe.config import build as building
from nestpipe.config.build import RecipeError, build
from nestpipe.config.pipeline import SCHEDULES, PipelineConfig
from nestpipe.config.recipe import SECTIONS
from nestpipe.lab.settings import read_settings
from nestpipe.schedule import BUILDERS
from nestpipe.schedule.options import DEFAULT, Options, Workload, resolve

SOURCE = Path(nestpipe.__file__).parent
KNOBS = {field.name: field.default for field in fields(PipelineConfig)}


class OneRow(nn.Module):
    """The least model that there is."""

    def __init__(self) -> None:
        super().__init__()
        config = nestpipe.EmbeddingBagConfig("t", embedding_dim=4, feature_names=["f"])
        self.rows = nestpipe.EmbeddingBagCollection([config])

    def forward(self, batch: nestpipe.Batch) -> tuple[torch.Tensor, None]:
        return self.rows(batch.sparse_features).values().mean(), None


def pipeline(*args: Any, **knobs: Any) -> nestpipe.TrainPipeline:
    made = nestpipe.TrainPipeline(OneRow(), None, nestpipe.SGD(), *args, world=nestpipe.World.single(), **knobs)
    made.close()
    return made


def test_every_way_in_has_the_same_defaults() -> None:
    """Promise: recipe, API, ladder and schedule read their defaults from `PipelineConfig`."""
    default = PipelineConfig()
    assert SECTIONS["pipeline"] is PipelineConfig
    assert build(PipelineConfig, {}, "pipeline") == default
    assert pipeline().config == default
    assert read_settings({"kind": "dlrm", "batch": 2048}).pipeline == default
    assert resolve(default, Workload()) == DEFAULT
    for field in fields(Options):
        if KNOBS.get(field.name) is not None and field.name != "average_every":  # 0 where nothing is averaged
            assert getattr(DEFAULT, field.name) == KNOBS[field.name]


@pytest.mark.slow
def test_no_other_module_has_a_default_of_its_own() -> None:
    """Promise: a knob's default stands once.  Finds defaults of arguments and fields, and entries of dictionaries."""
    names = set(KNOBS) - {"schedule", "micro_batches", "group_size", "replicas", "average_every", "moment_scale"}
    # these are also the names of things that have them
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).as_posix() in (
            "config/pipeline.py",
            "sim/profile.py",
        ):  # a profile describes a cluster
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            given: list[str] = []
            if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
                given = [node.target.id]
            elif isinstance(node, ast.arguments):
                positional = [*node.posonlyargs, *node.args]
                given = [a.arg for a in positional[len(positional) - len(node.defaults) :]]
                given += [a.arg for a, default in zip(node.kwonlyargs, node.kw_defaults) if default is not None]
            elif isinstance(node, ast.Dict):
                given = [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            found += [f"{path.relative_to(SOURCE)}:{name}" for name in given if name in names]
    assert not found


def test_every_schedule_that_can_be_named_can_be_built() -> None:
    assert tuple(BUILDERS) == SCHEDULES


@pytest.mark.parametrize(
    "knob, message",
    [
        ({"schedule": "nestde"}, "pipeline.schedule must be one of serial, dbp, fwp, nested, not 'nestde'"),
        ({"micro_batches": 0}, "pipeline.micro_batches must be from 1"),
        ({"look_ahead": -1}, "pipeline.look_ahead must be a whole number of at least 0, not -1"),
        ({"look_ahead": 1.5}, "pipeline.look_ahead"),
        ({"early_reduce": None}, "pipeline.early_reduce must be true or false, not None"),
        ({"early_prepare": "yes"}, "pipeline.early_prepare must be true, false or none, not 'yes'"),
    ],
)
def test_a_wrong_knob_is_named_wherever_it_comes_from(knob: dict[str, Any], message: str) -> None:
    """Promise: it is checked when it is made, and the message names the key."""
    for make in (PipelineConfig, pipeline, PipelineConfig().changed):
        with pytest.raises(ValueError, match=f"^{message[:40]}"):
            make(**knob)  # type: ignore[operator]


def test_config_and_keywords_make_the_same_pipeline() -> None:
    """Promise: keyword arguments of before still work, alone and on top of a config; unknown ones are named."""
    wanted = PipelineConfig(schedule="nested", micro_batches=3, defer_weight_grads=False)
    assert pipeline(wanted).config == wanted
    assert pipeline(schedule="nested", micro_batches=3, late_weights=False).config == wanted
    assert pipeline(replace(wanted, micro_batches=9), micro_batches=3).config == wanted
    with pytest.raises(TypeError, match="no argument 'micro_batch'; the pipeline's are schedule"):
        pipeline(micro_batch=3)
    with pytest.raises(TypeError, match="late_weights is the old name of defer_weight_grads: give only"):
        pipeline(late_weights=False, defer_weight_grads=True)
    with pytest.raises(TypeError, match=r"config must be a nestpipe\.PipelineConfig, not dict"):
        pipeline({"schedule": "nested"})


def test_an_old_spelling_is_accepted_with_a_hint(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: recipes written before still work, and say once what to write now."""
    monkeypatch.setattr(building, "_hinted", set())
    with caplog.at_level(logging.WARNING, "nestpipe"):
        for _ in range(2):
            assert build(PipelineConfig, {"late_weights": False}, "pipeline") == PipelineConfig(
                defer_weight_grads=False
            )
    assert caplog.messages == [
        "pipeline.late_weights is now called pipeline.defer_weight_grads; the old name still works"
    ]
    with pytest.raises(RecipeError, match=r"^pipeline\.late_weights is the old name of pipeline\.defer_weight_grads"):
        build(PipelineConfig, {"late_weights": False, "defer_weight_grads": True}, "pipeline")


def test_what_cannot_be_exact_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^pipeline\.early_retrieve must be false"):
        resolve(PipelineConfig(early_retrieve=True), Workload(evicts=True))
    assert resolve(PipelineConfig(), Workload(on_disk=True)).early_retrieve
    assert not resolve(PipelineConfig(), Workload(on_disk=True, evicts=True)).early_retrieve
