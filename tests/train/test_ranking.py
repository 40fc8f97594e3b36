"""The ranking task: exact under every schedule, learned, and evaluated by the scores that a server gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nestpipe.comm.world import World
from nestpipe.config.recipe import Recipe
from nestpipe.infer.relay import Relay
from nestpipe.train.build import make_pipeline, open_source
from nestpipe.train.evaluate import evaluate
from nestpipe.train.evaluate_ranking import requests_of, score_batches
from nestpipe.train.metrics import GroupedAuc
from nestpipe.train.streams import train_stream
from nestpipe.train.verify import verify
from runs import recipe_of
from simulated import in_order
from workers import run

SMALL = ["data.users=60", "data.items=80", "data.groups=4", "data.median_length=20.0", "data.max_length=12", "model.dim=8",
         "model.max_length=12", "data.candidates=3", "data.eval_users=20", "train.batch_size=6", "train.epochs=none",
         "eval.batch_size=5"]  # fmt: skip
MODELS = {
    "hstu": [],
    "alpha": ["model.kind=fuxi"],
    "beta": ["model.kind=fuxi", "model.variant=beta"],
    "gamma": ["model.kind=fuxi", "model.variant=gamma"],
}


def small(model: str, *more: str) -> Recipe:
    return recipe_of("hstu-ranking", [*SMALL, *MODELS[model], *more])


def each_schedule(world: World, model: str) -> dict[str, Any]:
    found = {}
    for schedule in ("dbp", "fwp", "nested"):
        recipe = small(model, f"pipeline.schedule={schedule}", "pipeline.micro_batches=3")
        result = verify(recipe, 5, world, lambda done, what: None)
        found[schedule] = result["first_difference"] if not result["equal"] else result["compared"]["losses"]
    return found


@pytest.mark.parametrize(
    "workers", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_is_serial_bit_for_bit(model: str, workers: int) -> None:
    """Promise: dbp, fwp and nested train a ranking model to the bits of serial, on 1 to 3 workers."""
    found = [each_schedule(World.single(), model)] if workers == 1 else run(workers, each_schedule, model)
    assert found == [{"dbp": 5, "fwp": 5, "nested": 5}] * workers


@pytest.mark.parametrize("model", ["hstu", "alpha"])
def test_on_the_simulated_device(model: str) -> None:
    """Promise: the same bits in every order of the device, with no race."""
    in_order("late")
    recipe = small(model, "pipeline.schedule=nested", "pipeline.micro_batches=2", "train.device=sim")
    found = verify(recipe, 3, World.single(), lambda done, what: None, orders=2)
    assert found["equal"] and found["simulated"]["races"] == [], found


def losses_and_scores(world: World, micro_batches: int) -> tuple[list[float], dict[str, float], list[np.ndarray]]:
    recipe = small("hstu", f"pipeline.micro_batches={micro_batches}", "model.dropout=0.0", "train.streams=2")
    pipeline = make_pipeline(recipe, open_source(recipe, "train", world), world)
    stream = train_stream(recipe, open_source(recipe, "train", world), world)
    losses = [step.loss for _ in range(6) if (step := pipeline.progress(stream))]
    pipeline.settle()
    stream.close()
    held_out = open_source(recipe, "eval", world)
    metrics = evaluate(pipeline, held_out, recipe.eval)
    batches = iter([held_out.take(np.arange(20), 0)] if world.rank == 0 else [])
    scores = [logits.numpy() for _, logits in score_batches(pipeline, batches)]
    pipeline.close()
    return losses, metrics, scores


def test_the_loss_is_a_mean_over_candidates() -> None:
    """Promise: micro-batches and workers weigh by candidates, so early losses and metrics agree whatever the cut."""
    losses, metrics, _ = losses_and_scores(World.single(), 1)
    cut, of_cut, _ = losses_and_scores(World.single(), 4)
    np.testing.assert_allclose(losses, cut, rtol=1e-4)
    for found in run(2, losses_and_scores, 2):
        np.testing.assert_allclose(losses[:2], found[0][:2], rtol=1e-4)
        assert found[1].keys() == metrics.keys() == of_cut.keys()
        assert found[1]["samples"] == metrics["samples"]


def test_evaluation_gives_the_scores_of_a_server() -> None:
    """Promise: `evaluate` scores by relay inference; another relay on the same rows has the same bits, and the model's own
    training pass is close to it."""
    world, recipe = World.single(), small("alpha", "model.dropout=0.0")
    source = open_source(recipe, "train", world)
    pipeline, stream = make_pipeline(recipe, source, world), train_stream(recipe, source, world)
    for _ in range(5):
        pipeline.progress(stream)
    pipeline.settle()
    stream.close()

    class Rows:
        dim = 8

        def read(self, table: str, keys: np.ndarray) -> np.ndarray:
            return pipeline.rows(table, keys).numpy()

    batch = open_source(recipe, "eval", world).take(np.arange(20), 0)
    ((_, scores),) = score_batches(pipeline, iter([batch]))
    relay = Relay(pipeline.model, Rows(), "now")
    served = [relay.rank(relay.window(history), now, asked) for history, now, asked in requests_of(batch, ())]
    assert np.concatenate(served).tobytes() == scores.numpy().tobytes()
    one_by_one = [
        relay.rank(relay.window(history), now, asked[i : i + 1])
        for history, now, asked in requests_of(batch, ())
        for i in range(len(asked))
    ]
    assert np.concatenate(one_by_one).tobytes() == scores.numpy().tobytes()
    ((_, plain),) = pipeline.evaluate(iter([batch]))
    np.testing.assert_allclose(plain.numpy(), scores.numpy(), atol=1e-5)
    pipeline.close()


def test_grouped_auc() -> None:
    """Promise: GAUC is the mean of users' own AUCs by their samples; users with labels that are all alike do not count."""
    metric = GroupedAuc()
    scores = torch.tensor([0.1, 0.9, 0.5, 0.5, 0.2, 0.3, 0.7])
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
    metric.update(scores, labels, torch.tensor([2, 3, 0, 2]))
    assert metric.compute() == pytest.approx((2 * 1.0 + 3 * 0.75) / 5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["data.candidates=0"], "data.candidates"),
        (["model.task=next_item"], "model.task = 'ranking'"),
        (["model.kind=sasrec"], "model.kind 'hstu' or 'fuxi'"),
        (["model.max_length=20"], "data.max_length and model.max_length"),
        (["model.context=['tab']"], "data.context"),
    ],
)
def test_what_does_not_fit_names_the_key(settings: list[str], says: str) -> None:
    """Promise: data and model that do not go together are one line that names the key."""
    world = World.single()
    with pytest.raises(ValueError, match=says):
        recipe = small("hstu", *settings)
        make_pipeline(recipe, open_source(recipe, "train", world), world)
