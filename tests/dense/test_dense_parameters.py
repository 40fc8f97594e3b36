"""What is trained is settled when the pipeline is made: a parameter that nobody would sum or clear is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nestpipe import (
    SGD,
    Batch,
    DeferredLinear,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    TrainPipeline,
    World,
)
from nestpipe.schedule import BUILDERS

BATCH = Batch(KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1])))


class Model(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection([EmbeddingBagConfig("t", 4, ["f"])])
        self.first, self.last = kind(4, 4), kind(4, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, None]:
        return self.last(self.first(self.sparse(batch.sparse_features).values())).square().mean(), None


def pipeline_of(model: nn.Module, schedule: str = "serial", **options: Any) -> TrainPipeline:
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    return TrainPipeline(model, optimizer, SGD(0.1), schedule=schedule, world=World.single(), **options)


@pytest.mark.parametrize("frozen", [True, False], ids=["unfrozen later", "frozen later"])
@pytest.mark.parametrize("kind", [nn.Linear, DeferredLinear])
@pytest.mark.parametrize("schedule", BUILDERS)
def test_what_is_trained_may_not_change(schedule: str, kind: Callable[..., nn.Module], frozen: bool) -> None:
    """Promise: never trained on gradients of its own worker, or of several batches, nor by an optimizer's memory alone; the
    batch that meets the change leaves everything as it was."""
    model = Model(kind)
    model.last.requires_grad_(not frozen)
    pipeline = pipeline_of(model, schedule, micro_batches=2)
    batches = iter([BATCH] * 20)
    for _ in range(3):
        assert pipeline.progress(batches)
    model.last.requires_grad_(frozen)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=rf"requires_grad of last\.weight was {not frozen} when .* learning rate of 0"
    ):
        pipeline.progress(batches)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
    pipeline.close()


def test_frozen_when_made_stays_as_it_is() -> None:
    model = Model()
    model.last.requires_grad_(False)
    pipeline = pipeline_of(model)
    before, batches = model.last.weight.clone(), iter([BATCH] * 3)
    while pipeline.progress(batches):
        pass
    assert torch.equal(model.last.weight, before)


def test_an_optimizer_steps_the_models_parameters_alone() -> None:
    """Promise: a parameter beside the model, whose gradients no other worker would see, is found before it is trained."""
    model, temperature = Model(), nn.Parameter(torch.ones(3, 2))
    said = r"dense_optimizer has a parameter of shape \[3, 2\] that the model did not have"
    with pytest.raises(ValueError, match=said):
        TrainPipeline(model, torch.optim.SGD([*model.parameters(), temperature], 0.1), world=World.single())
    pipeline = pipeline_of(Model(), "nested")
    batches = iter([BATCH] * 9)
    assert pipeline.progress(batches)
    assert pipeline.optimizer is not None
    pipeline.optimizer.add_param_group({"params": [temperature]})
    with pytest.raises(ValueError, match=said):
        pipeline.progress(batches)
    pipeline.close()


def test_training_waits_for_the_end_of_an_evaluation() -> None:
    """Promise: no step is taken in eval mode."""
    pipeline = pipeline_of(Model())
    training, held_out = iter([BATCH] * 3), pipeline.evaluate(iter([BATCH] * 2))
    next(held_out)
    with pytest.raises(RuntimeError, match="in the middle of evaluate: go through all of it first, or close it"):
        pipeline.progress(training)
    held_out.close()  # type: ignore[attr-defined]
    assert pipeline.progress(training) and pipeline.model.training


@pytest.mark.parametrize("wrong", [1.5, -1, "2", None])
def test_look_ahead_is_a_whole_number(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"pipeline\.look_ahead must be a whole number of at least 0, not"):
        pipeline_of(Model(), look_ahead=wrong)
