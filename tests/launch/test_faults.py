"""A worker that dies, stalls or diverges, a user who has had enough: the run ends soon, says why in one line, leaves nothing."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from commands import DEADLINE, Command, nestpipe, one_line, refused, small, until
from nestpipe.comm.errors import PeerLost
from nestpipe.comm.world import World
from nestpipe.launch.failures import as_peer_lost
from nestpipe.schedule.view.read_trace import read_trace
from nestpipe.train.metrics import ClickMetrics
from workers import run_once

ENDLESS = ["data.samples=100000000", "train.log_every=20"]
NEVER = "3600"
"""A --timeout that no test waits for: a run that ends all the same has not waited for it."""


ON_DEVICE = ["model.dim=4", "model.bottom=[4]", "model.top=[4]", "train.batch_size=8", "train.log_every=2"]
"""The simulated device is slow: so few samples that a step takes no time."""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_killed_worker_is_named(tmp_path: Path, device: str) -> None:
    """After SIGKILL of worker 1 the line names it and what worker 0 was doing, long before --timeout has passed."""
    sizes = [*ENDLESS, *(ON_DEVICE if device == "sim" else [])]
    command = Command(tmp_path, [*small(*sizes, workers=2), "--timeout", NEVER, "--device", device])
    workers = command.once_training(2)
    os.kill(workers[1], signal.SIGKILL)
    line = one_line(command.wait())
    assert line.startswith("worker 1 was killed by SIGKILL ("), line
    # a stage and its batch; now and then it is the gathering of metrics
    assert (" of batch " in line and "rank 0 lost " in line) or "rank 0 in train.metrics." in line, line
    assert not (command.run / "summary.json").exists()


@pytest.mark.slow
def test_a_stopped_worker_is_waited_for_as_long_as_the_timeout_says(tmp_path: Path) -> None:
    """After SIGSTOP of worker 1 the line says who waited for whom and how long, and the stopped one is gone too."""
    command = Command(tmp_path, [*small(*ENDLESS, workers=2), "--timeout", "4"])
    workers = command.once_training(2)
    os.kill(workers[1], signal.SIGSTOP)
    line = one_line(command.wait())
    said = " of batch " in line and "rank 0 waited 4 s for " in line
    assert (said or "rank 0 in train.metrics." in line) and "--timeout" in line, line
    assert line.endswith("worker 1 did not answer and was ended"), line


@pytest.mark.slow
def test_an_interrupted_run_is_over_at_once(tmp_path: Path) -> None:
    """Ctrl-C in mid-run: exit 130, one line, no half-written summary; worker 0's last steps are kept."""
    command = Command(tmp_path, [*small(*ENDLESS, workers=2), "--timeout", NEVER])
    command.once_training(2)
    os.killpg(command.pid, signal.SIGINT)
    ended = command.wait()
    assert ended.code == 130
    assert one_line(ended) == "interrupted; all workers were ended"
    assert sorted(path.name for path in command.run.iterdir()) == ["metrics.jsonl", "recipe.toml", "trace.json"]
    assert read_trace(command.run / "trace.json", 0)


@pytest.mark.slow
def test_a_signal_while_workers_start_ends_them_too(tmp_path: Path) -> None:
    """SIGINT and SIGTERM before workers have even loaded torch: one line from the parent, none from the workers."""
    for number, code, words in ((signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 1, "stopped by SIGTERM")):
        command = Command(tmp_path, small(*ENDLESS, workers=2), cold_workers=True)
        assert until(DEADLINE, lambda command=command: len(command.workers()) == 2)
        os.kill(command.pid, number)
        ended = command.wait()
        assert ended.code == code
        refused(ended, words)
        assert not command.run.exists()


def test_a_diverging_run_names_the_batch(tmp_path: Path) -> None:
    """A loss that is no longer a number ends the run with the number of the batch, and no summary is written."""
    settings = ["tables.optimizer=sgd", "tables.lr=1e30", "dense.optimizer=sgd", "dense.lr=1e30"]
    command = Command(tmp_path, small(*settings))
    ended = command.wait()
    refused(ended, "batch 1: the ", " is not finite", "clip_norm")
    assert ended.code == 1 and not (command.run / "summary.json").exists()
    assert {span.action.batch for span in read_trace(command.run / "trace.json", 0)} >= {0, 1}, "what ran until then"


def test_a_single_worker_is_interrupted_too(tmp_path: Path) -> None:
    """Without a launcher in between, Ctrl-C means the same: exit 130 and one line."""
    command = Command(tmp_path, small(*ENDLESS))
    command.once_training(0)
    os.kill(command.pid, signal.SIGINT)
    ended = command.wait()
    assert ended.code == 130 and one_line(ended).startswith("interrupted")
    assert read_trace(command.run / "trace.json", 0)


def _bring_scores_together(world: World) -> str:
    """Worker 1 dies before the scores are gathered; what worker 0 then makes of torch's error."""
    if world.rank == 1:
        os._exit(3)
    os.environ["RANK"] = "0"
    metrics = ClickMetrics()
    metrics.update(torch.zeros(4), torch.zeros(4))
    try:
        metrics.compute(world.groups["metrics"])
    except Exception as error:
        found = as_peer_lost(error)
        assert isinstance(found, PeerLost) and as_peer_lost(ValueError("mine")).args == ("mine",)
        return str(found)
    return "nothing happened"


def test_a_death_during_evaluation_is_a_lost_worker() -> None:
    """Outside of our own exchanges, too, what torch raises is known as the consequence of another worker's end."""
    said = run_once(2, _bring_scores_together, timeout=10.0)[0]
    assert re.fullmatch(r"rank 0 in train\.metrics\.\w+ lost another worker: [^\n]{10,100}", said), said


@pytest.mark.slow
def test_a_run_in_which_there_is_nothing_to_learn_ends_well(tmp_path: Path) -> None:
    """Metrics that do not exist (all labels alike, a Bayes AUC of one half) are null, and no reason to fail."""
    ended = nestpipe(tmp_path, *small("data.signal=0", "data.eval_samples=100"), "--json", "-")
    assert ended.summary()["metrics"]["bayes_auc"] == 0.5
    assert ended.code == 0 and "Bayes AUC 0.5000\n" in ended.err
    ended = nestpipe(tmp_path, *small("data.eval_samples=1"), "--json", "-")
    assert ended.summary()["metrics"]["auc"] is None
