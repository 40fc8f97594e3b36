"""Every way to draw and share negatives is exact: under every schedule, on any workers, after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestpipe.comm.world import World
from nestpipe.train.build import make_pipeline, open_source
from nestpipe.train.streams import train_stream
from nestpipe.train.verify import verify
from runs import EVERY, recipe_of, resume, small, train_run
from simulated import in_order
from workers import run

POOL, LOGQ = "data.negatives_from=pool", "model.logq=true"
WAYS = {
    "logits": ["model.sharing=logits"],
    "negatives": ["model.sharing=negatives", "model.sharing_factor=3"],
    "pool": [POOL, "data.negatives=9"],
    "in-batch": [POOL, "data.sampling=in-batch", LOGQ],
    "log-uniform": ["data.sampling=log-uniform", LOGQ],
    "popularity, shared": ["data.sampling=popularity", LOGQ, "model.sharing=logits"],
}


def settings_of(way: str, *more: str) -> list[str]:
    return small("hstu", *WAYS[way], "train.epochs=none", "train.batch_size=6", *more)


def each_schedule(world: World, way: str) -> dict[str, Any]:
    found = {}
    for schedule in ("dbp", "fwp", "nested"):
        recipe = recipe_of("hstu", settings_of(way, f"pipeline.schedule={schedule}", "pipeline.micro_batches=3"))
        result = verify(recipe, 5, world, lambda done, what: None)
        found[schedule] = result["first_difference"] if not result["equal"] else result["compared"]["losses"]
    return found


@pytest.mark.parametrize(
    "workers", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("way", WAYS)
def test_every_schedule_is_serial_bit_for_bit(way: str, workers: int) -> None:
    found = [each_schedule(World.single(), way)] if workers == 1 else run(workers, each_schedule, way)
    assert found == [{"dbp": 5, "fwp": 5, "nested": 5}] * workers


@pytest.mark.parametrize("way", ["logits", "in-batch", "popularity, shared"])
def test_on_the_simulated_device(way: str) -> None:
    """Promise: the same bits in every order of the device, with no race, and no host sync on the compute lane."""
    in_order("late")
    recipe = recipe_of("hstu", settings_of(way, "pipeline.schedule=nested", "train.device=sim"))
    found = verify(recipe, 4, World.single(), lambda done, what: None, orders=2)
    assert found["equal"] and found["simulated"]["races"] == [], found
    syncs = found["simulated"]["host_syncs_per_step"].get("MainThread", {})
    assert sum(syncs.values()) * 4 <= 1, syncs  # a table of constants goes up once


def first_losses(world: World, settings: list[str], steps: int = 3) -> list[float]:
    recipe = recipe_of("hstu", settings)
    source = open_source(recipe, "train", world)
    pipeline, stream = make_pipeline(recipe, source, world), train_stream(recipe, source, world)
    losses = []
    while len(losses) < steps and (step := pipeline.progress(stream)):
        losses.append(step.loss)
    pipeline.settle()
    stream.close()
    pipeline.close()
    return losses


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_and_workers_train_the_same(way: str) -> None:
    """Promise: another number of either rounds differently, and no more."""
    settings = settings_of(way, "model.dropout=0.0", "train.streams=2")
    one = first_losses(World.single(), [*settings, "pipeline.micro_batches=1"])
    several = [first_losses(World.single(), [*settings, f"pipeline.micro_batches={n}"]) for n in (2, 4)]
    several += run(2, first_losses, [*settings, "pipeline.micro_batches=2"])
    for losses in several:
        np.testing.assert_allclose(losses, one, rtol=1e-5)


@pytest.mark.parametrize("way", ["pool", "in-batch"])
def test_a_resumed_run_has_the_pools_of_the_whole_one(way: str, tmp_path: Path) -> None:
    """Promise: the digest of an uninterrupted run."""
    settings = small("hstu", *WAYS[way], EVERY, "train.steps=7")
    world = World.single()
    untouched = train_run(world, "hstu", settings, str(tmp_path / "untouched"))
    train_run(world, "hstu", [*settings, "train.steps=5"], str(tmp_path / "run"))
    assert resume(world, "hstu", settings, str(tmp_path / "run"), 3)["digest"] == untouched["digest"]


def test_default_settings_train_as_before() -> None:
    """Promise: with the new keys at their defaults, written out, the losses are those without them."""
    plain = small("hstu", "train.epochs=none")
    keys = ["data.negatives_from=each", "data.sampling=uniform", "model.sharing=none", "model.logq=false"]
    assert first_losses(World.single(), plain) == first_losses(World.single(), [*plain, *keys])
    # all items have one chance: nothing to correct, but for rounding
    corrected = first_losses(World.single(), [*plain, LOGQ])
    np.testing.assert_allclose(corrected, first_losses(World.single(), plain), rtol=1e-6)


def test_bf16_with_a_pool() -> None:
    """Promise: under autocast the loss stays close to that of float32, on the host and on the device."""
    for device in ("cpu", "sim"):
        in_order("late")
        settings = settings_of("pool", f"train.device={device}", "model.dropout=0.0")
        full, half = (first_losses(World.single(), [*settings, f"train.precision={p}"]) for p in ("float32", "bf16"))
        assert full != half
        np.testing.assert_allclose(half, full, rtol=0.05)
    assert torch.is_autocast_enabled("cpu") is False
