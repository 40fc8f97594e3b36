"""A trained ranking model over HTTP: the scores of the training run's evaluation, bit for bit; the command from start to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from nestpipe.comm.world import World
from nestpipe.config.recipe import parse_recipe
from nestpipe.data.kinds import KINDS as DATA
from nestpipe.data.stream import Stream
from nestpipe.infer.contract import History
from nestpipe.models.kinds import KINDS as MODELS
from nestpipe.serve import Client
from nestpipe.serve.instance.run_source import NotServable, RunSource
from nestpipe.train.build import make_pipeline, open_source
from nestpipe.train.checkpoints import find_resumed, restore_run
from nestpipe.train.evaluate_ranking import requests_of, score_batches
from runs import EVERY, recipe_of, train_run
from serving import MODEL, serving

pytestmark = pytest.mark.slow

SMALL = ["data.users=120", "data.items=200", "data.median_length=150.0", "data.eval_users=40", "data.candidates=8",
         "model.dim=16", "train.workers=1", "train.batch_size=16", "train.epochs=1", "eval.batch_size=16", EVERY]  # fmt: skip

Requests = list[tuple[History, int, np.ndarray, np.ndarray]]


def trained(world: World, recipe_name: str, run: str) -> Requests:
    """Trains, and scores the evaluation's requests as the training run does, from its last checkpoint."""
    train_run(world, recipe_name, SMALL, run)
    recipe = recipe_of(recipe_name, SMALL)
    resumed = find_resumed(recipe, Path(run), None, lambda text: parse_recipe(text, DATA, MODELS))
    assert resumed is not None
    pipeline = make_pipeline(recipe, open_source(recipe, "train", world), world, empty=True)
    restore_run(pipeline, resumed, lambda done: None)
    found: Requests = []
    stream = Stream(open_source(recipe, "eval", world), recipe.eval.batch_size, rank=world.rank, workers=world.size)
    for batch, logits in score_batches(pipeline, stream):
        at = 0
        for history, now, candidates in requests_of(batch, ()):
            found.append((history, now, candidates, logits[at : at + len(candidates)].numpy()))
            at += len(candidates)
    pipeline.close()
    return found


@pytest.mark.parametrize("recipe", ["hstu-ranking", "fuxi-ranking"])
def test_served_scores_are_those_of_the_evaluation(tmp_path: Path, recipe: str) -> None:
    """Promise: every request of the evaluation, through HTTP, has the bits of `evaluate`; on every path."""
    requests = trained(World.single(), recipe, str(tmp_path / "run"))
    source: Any = RunSource(str(tmp_path / "run"))
    paths = set()
    with serving(source, arena=2 * 10**6, dram=10**6) as one, Client(one.url, MODEL) as client:
        for round_ in range(3):
            for user, (history, now, candidates, scores) in enumerate(requests):
                if (user + round_) % 2:
                    client.preinfer(user, history, due_ms=5)
                ranked = client.rank(user, history, candidates, now)
                paths.add(ranked.path)
                assert ranked.scores.tobytes() == scores.tobytes(), (user, ranked.path)
        one.settled(lambda now: now["holds"] == now["pins"])
    assert len(requests) == 40 and {"hit", "miss"} <= paths


def test_the_command(tmp_path: Path) -> None:
    """Promise: `nestpipe serve RUN` tells where, ranks, loads on demand, and SIGTERM drains with exit 0 and no traceback."""
    run, told = tmp_path / "run", tmp_path / "told.json"
    requests = trained(World.single(), "hstu-ranking", str(run))
    flags = [
        "--deadline-ms",
        "120000",
        "--port",
        "0",
        "--control-port",
        "0",
        "--arena",
        "8MB",
        "--dram",
        "8MB",
        "--record",
        str(tmp_path / "r.jsonl"),
    ]
    command = [sys.executable, "-m", "nestpipe", "serve", str(run), "--json", str(told), "--follow", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert "serves on http://127.0.0.1:" in first, first + process.communicate()[1]
        while not told.exists() or not told.read_text().endswith("}\n"):
            assert process.poll() is None
        facts = json.loads(told.read_text())
        with Client(facts["url"], facts["model"]) as client:
            assert client.ready()
            history, now, candidates, scores = requests[0]
            ranked = client.rank("a", history, candidates, now)
            assert ranked.scores.tobytes() == scores.tobytes() and ranked.version == facts["version"]
        load = f"/v2/repository/models/{facts['model']}/load"
        assert httpx.post(facts["control"] + load, timeout=60).json() == {"version": facts["version"]}
        assert httpx.post(facts["url"] + load).status_code == 404  # only on the control port
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "drained: 1 ranked" in out and "Traceback" not in err
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1


def test_a_run_that_ranks_nothing_is_one_line(tmp_path: Path) -> None:
    """Promise: a run of another task is refused with what to do instead."""
    settings = ["data.users=40", "data.items=50", "train.workers=1", "train.epochs=1", "eval.max_samples=8", EVERY]
    train_run(World.single(), "hstu", settings, str(tmp_path / "run"))
    with pytest.raises(NotServable, match="nestpipe predict"):
        RunSource(str(tmp_path / "run")).open()
