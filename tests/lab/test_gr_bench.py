"""`nestpipe bench gr`: variants compute one model, figures mean what they say, and nothing of a bench outlives it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forks import Fork
from nestpipe.cli.main import main
from nestpipe.lab import gr_bench, gr_variants
from nestpipe.lab.gr_operator_worker import flops, passes
from nestpipe.lab.gr_training import Histories, Training, check_loss, check_weights, without_kernels
from nestpipe.lab.gr_variants import RunningVariant, Variant, environment, read_peers
from nestpipe.lab.gr_workloads import OPERATORS, STEPS, OperatorWorkload, StepWorkload, read_batches, save_batches
from nestpipe.lab.ladder import BenchError
from nestpipe.lab.peak_memory import extra_bytes
from nestpipe.lab.settings import PEERS

TINY = StepWorkload("tiny", "hstu", 3, 12, 6.0, 8, 2, 2, 50, 1, least_length=1, negatives=4, batches=2)
TINY_OPERATOR = OperatorWorkload("tiny", "fuxi", 2, (9, 1, 5), 8)


@contextmanager
def plain_torch() -> Iterator[None]:
    """`without_kernels`, undone afterwards."""
    before = {name: m.has_kernels for name, m in sys.modules.items() if hasattr(m, "has_kernels")}
    without_kernels()
    try:
        yield
    finally:
        for name, function in before.items():
            sys.modules[name].has_kernels = function  # type: ignore[attr-defined]


sizes = st.builds(
    lambda kind, users, longest, heads, blocks, negatives, seed: replace(
        TINY,
        kind=kind,
        users=users,
        max_length=longest,
        median_length=0.6 * longest,
        heads=heads,
        blocks=blocks,
        negatives=negatives,
        seed=seed,
    ),
    st.sampled_from(["hstu", "fuxi"]),
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(0, 1000),
)


@settings(max_examples=10, deadline=None)
@given(sizes)
def test_ours_and_plain_torch_have_one_loss_and_one_gradient(workload: StepWorkload) -> None:
    """Promise: what is timed as plain torch is the same model, by other operators."""
    batch, weights = Histories(workload.draw(0)), check_weights(workload, workload.max_length + 3)

    def both() -> tuple[float, torch.Tensor, set[str]]:
        training = Training(replace(workload, dropout=0.0), fused=False)
        loss = training.loss(batch, torch.from_numpy(weights["negatives"]))
        loss.backward()
        assert training.table.grad is not None
        return check_loss(workload, workload.max_length + 3, batch, weights), training.table.grad, nodes(loss)

    loss, grad, ours = both()
    with plain_torch():
        plain_loss, plain_grad, plain = both()
    assert loss == pytest.approx(plain_loss, rel=1e-5)
    torch.testing.assert_close(grad, plain_grad, rtol=1e-3, atol=1e-5)
    assert "JaggedAttentionBackward" in ours and not any(name in plain for name in ours if name[0:6] == "Jagged")


def nodes(loss: torch.Tensor) -> set[str]:
    """Names of all operations behind a loss."""
    found, left = set(), [loss.grad_fn]
    while left:
        node: Any = left.pop()
        found.add(type(node).__name__)
        left += [below for below, _ in node.next_functions if below is not None]
    return found


@given(sizes)
def test_a_history_and_its_targets_are_one_event_apart(workload: StepWorkload) -> None:
    drawn = workload.draw(1)
    batch, at = Histories(drawn), 0
    assert drawn["lengths"].min() >= 1 and drawn["lengths"].max() <= workload.max_length
    assert drawn["items"].min() >= 0 and drawn["items"].max() < workload.items
    lengths = batch.lengths.tolist()
    for history, target, n in zip(batch.history.split(lengths), batch.target.split(lengths), lengths):
        assert history.tolist() == drawn["items"][at : at + n].tolist()
        assert target.tolist() == drawn["items"][at + 1 : at + n + 1].tolist()
        at += n + 1


def test_batches_come_back_from_their_file(tmp_path: Path) -> None:
    save_batches(TINY, tmp_path / "b.npz")
    for number, batch in enumerate(read_batches(tmp_path / "b.npz", TINY.batches)):
        assert all((array == TINY.draw(number)[name]).all() for name, array in batch.items())


def test_a_step_trains_dense_weights_and_items() -> None:
    training = Training(TINY, fused=True)
    batch = Histories(TINY.draw(0))
    before = {name: p.detach().clone() for name, p in training.model.named_parameters()}
    rows = training.table.detach().clone()
    training.step(batch)
    assert all(not torch.equal(p, before[name]) for name, p in training.model.named_parameters())
    touched = (training.table != rows).any(1)
    assert touched[batch.history].all() and touched[batch.target].all() and not touched.all()


def test_workloads_are_what_the_page_says() -> None:
    assert OPERATORS[0].tokens == 6_129 and (OPERATORS[0].heads, OPERATORS[1].heads) == (8, 4)
    like = [STEPS[0].draw(number)["lengths"].mean() for number in range(STEPS[0].batches)]
    assert 110 < sum(like) / len(like) < 122
    assert STEPS[0].fill == pytest.approx(sum(like) / len(like) / 200) and 0.7 < STEPS[1].fill < 0.8
    # Three passes, four products of width d for each pair: 9 * 10 / 2 + 1 + 5 * 6 / 2 pairs.
    assert flops(TINY_OPERATOR) == 3 * 4 * 2 * 8 * (45 + 1 + 15)


def test_operators_run_in_both_variants() -> None:
    for kind in ("hstu", "fuxi"):
        for variant in ("ours", "padded"):
            passes(replace(TINY_OPERATOR, kind=kind), variant)()


def test_extra_memory_is_the_rise_alone() -> None:
    """Memory that was used before, even more of it, does not hide what is used now."""
    torch.ones(40_000_000)
    held = []
    assert 75e6 < extra_bytes(lambda: held.append(torch.ones(20_000_000))) < 95e6
    assert extra_bytes(lambda: None) < 5e6


def test_a_bench_that_does_not_fit_in_memory_does_not_start() -> None:
    gr_bench.check_memory([*OPERATORS, *STEPS], 10**12)
    gr_bench.check_memory([replace(OPERATORS[0], timed=False)], 0)
    with pytest.raises(BenchError, match=r"HSTU, long needs about 15 GB of memory .* 9 GB are available: .* --rung"):
        gr_bench.check_memory(STEPS, 9 * 10**9)


def test_losses_that_differ_end_the_bench() -> None:
    variants = [Variant("ours", "tuned"), Variant("plain", "tuned")]
    gr_bench.agree(TINY, variants, [8.0, 8.0005])
    with pytest.raises(
        BenchError, match=r"tiny: .* plain, malloc tuned has the loss 8.1 .*do not compute the same model"
    ):
        gr_bench.agree(TINY, variants, [8.0, 8.1])
    with pytest.raises(BenchError):
        gr_bench.agree(TINY, variants, [8.0, float("nan")])


def test_untimed_steps_go_on_until_page_faults_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))
    import timed_turns  # type: ignore[import-not-found]

    for faults, steps in (
        ([9, 0], 1),
        ([900_000, 700_000, 0, 0], 3),
        ([900_000, 890_000, 0], 2),
        ([10**9 // 2**k for k in range(9)], timed_turns.MOST_UNTIMED),
    ):
        taken = [0]

        def step(taken: list[int] = taken, faults: list[int] = faults) -> None:
            taken.append(taken[-1] + faults[len(taken) - 1])

        monkeypatch.setattr(timed_turns, "page_faults", lambda taken=taken: taken[-1])
        timed_turns.settle(step)
        assert len(taken) - 1 == steps


def test_malloc_is_each_variants_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert not [name for name in environment("as shipped") if name.startswith("MALLOC_")]
    assert environment("tuned")["MALLOC_TRIM_THRESHOLD_"] == str(2**34)


def test_peers_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says what to give instead."""
    for bad in ("torchrec", "hstu", "hstu=", "=x"):
        with pytest.raises(BenchError, match="takes hstu=CHECKOUT or fuxi=CHECKOUT"):
            read_peers([bad])
    with pytest.raises(BenchError, match=r"there is no generative_recommenders/modeling/.*a checkout of FuXi-alpha"):
        read_peers([f"fuxi={tmp_path}"])
    file = tmp_path / gr_variants.CHECKOUTS["hstu"][0]
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.setattr(gr_variants, "PEER_PYTHON", tmp_path / "python")
    with pytest.raises(BenchError, match="run `make bench-peers` first"):
        read_peers([f"hstu={tmp_path}"])
    (tmp_path / "python").touch()
    assert read_peers([f"hstu={tmp_path}"]) == {"hstu": str(tmp_path)}
    assert read_peers([]) == {}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--peers", "torchrec"], "takes hstu=CHECKOUT or fuxi=CHECKOUT"),
        (["--peers", "hstu=/nowhere"], "give the folder of a checkout of Meta's generative-recommenders"),
        (["--rung", "HSTU, short"], "no rung 'HSTU, short' in gr; it has 'operators', 'steps'"),
        (["--rounds", "0"], "--rounds must be at least 1, not 0"),
        (["--workers", "2"], "--workers is not for `nestpipe bench gr`"),
        (["--link", "none"], "--link is not for `nestpipe bench gr`"),
        (["--data", "u.data"], "--data is not for `nestpipe bench gr`"),
    ],
)
def test_wrong_settings_are_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gr", *arguments]) in (1, 2)
    err = capsys.readouterr().err.strip()
    assert told in err and len(err.splitlines()) == 1


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker programs without new interpreters."""

    def start(self: RunningVariant, command: list[str]) -> Fork:
        assert command[:2] == [sys.executable, "-m"]
        log = self.folder / "log"
        return Fork(command[2], command[3:], self.folder, log, log, environment(self.variant.malloc))

    monkeypatch.setattr(RunningVariant, "_start", start)


@pytest.mark.slow
def test_a_whole_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], forks: None
) -> None:
    """Tables, JSON and page from worker processes that take turns."""
    small = replace(TINY_OPERATOR, timed=False, name="small")
    monkeypatch.setattr("nestpipe.lab.gr_workloads.OPERATORS", (TINY_OPERATOR, small))
    monkeypatch.setattr("nestpipe.lab.gr_workloads.STEPS", (replace(TINY, kind="fuxi"),))
    out, page = tmp_path / "gr.json", tmp_path / "gr.html"
    assert main(["bench", "gr", "--rounds", "1", "--json", str(out), "--page", str(page)]) == 0
    result = json.loads(out.read_text())
    assert [(row["variant"], row["malloc"]) for row in result["steps"]] == [
        (variant, malloc) for variant in ("ours", "plain") for malloc in ("as shipped", "tuned")
    ]
    assert len({round(row["check_loss"], 3) for row in result["steps"]}) == 1
    for row in (*result["operators"][:2], *result["steps"]):
        ours = row["variant"] == "ours"
        assert row["ms"]["median"] > 0 and (row["times_ours"]["median"] == 1.0 or not ours)
        jagged = row["gflops"]["median"] / row["sgemm_gflops"]["median"]
        assert row["mfu_jagged"]["median"] == pytest.approx(jagged, rel=1e-6)
    assert "ms" not in result["operators"][2] and len(result["rows"]) == 7
    printed = capsys.readouterr().out
    assert "jagged MFU" in printed and "of padded" in printed and "generative recommendation" in page.read_text()


@pytest.mark.slow
def test_a_bench_that_is_interrupted_leaves_no_process() -> None:
    """Promise: Ctrl-C ends it within seconds, also while workers are stopped or in the middle of a step."""
    command = [sys.executable, "-m", "nestpipe", "bench", "gr", "--rung", "HSTU, as ML-1M", "--rounds", "100"]
    bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    workers: list[int] = []
    deadline = time.monotonic() + 90
    while len(workers) < 4:
        assert time.monotonic() < deadline and bench.poll() is None
        workers = children_of(bench.pid)
        time.sleep(0.1)
    bench.send_signal(signal.SIGINT)
    bench.communicate(timeout=15)
    assert bench.returncode != 0
    assert not [pid for pid in workers if Path(f"/proc/{pid}/cmdline").exists() and b"gr_step" in command_of(pid)]


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"gr_step_worker" in command_of(int(child))]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
