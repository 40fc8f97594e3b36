"""`nestpipe profile`: measures a recipe in about the time it is given, advises in words, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from commands import DEADLINE, Command, nestpipe, refused, small, until

SETS = small("data.samples=20000")[2:-3]
"""As of a small training, without its --workers and --quiet."""


def profile(*flags: str, workers: int = 1, seconds: float = 2.0) -> list[str]:
    return ["profile", "dlrm", *SETS, "--workers", str(workers), "--seconds", str(seconds), *flags]


@pytest.mark.slow
def test_two_workers_are_measured_and_told(tmp_path: Path) -> None:
    """Every variant with its figures, sentences and changes; JSON beside words; the data, which is short, begins again.  Under
    torchrun, where worker 0 tells and writes; those below have workers that the command itself has started."""
    arguments = profile("--json", str(tmp_path / "two.json"), "--quiet", seconds=5)
    ended = Command(tmp_path, arguments, run="two.json", torchrun=2).wait(litter=True)
    assert ended.code == 0, ended.err
    result = json.loads((tmp_path / "two.json").read_text())
    names = ["serial N=1", "nested N=4", "nested N=8", "dbp N=1", "compute alone", "wire alone"]
    assert [variant["name"] for variant in result["variants"]] == names
    assert (
        result["own"] == "serial N=1" and result["workers"] == 2 and result["machines"] == 1 and result["rounds"] >= 1
    )
    for variant in result["variants"]:
        assert len(variant["round_ms"]) == result["rounds"] and variant["step_ms"] > 0
        assert sum(variant["exposed_ms"].values()) == pytest.approx(variant["step_ms"])
    by_name = {variant["name"]: variant for variant in result["variants"]}
    assert by_name["serial N=1"]["bytes_sent"] > by_name["compute alone"]["bytes_sent"]
    assert all(result["limits_ms"][what] > 0 for what in ("compute", "wire", "storage")) and result["dram_rows"] is None
    assert result["outcome"] and result["changes"]
    assert any("started again" in note for note in result["notes"])
    assert all(words in ended.out for words in [*names, *result["outcome"], result["changes"][0]["text"]])
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name.startswith("runs")]


@pytest.mark.slow
def test_one_worker_with_a_disk_tier(tmp_path: Path) -> None:
    """No All2All and no wire; rows of a tier that is too small come from its disk, whose files are gone afterwards."""
    (tmp_path / "tier").mkdir()
    tier = ["--set", "tables.disk_path=tier", "--set", "tables.dram_rows=100"]
    ended = nestpipe(tmp_path, *profile(*tier, "--json", "-", "--schedule", "dbp"))
    result = ended.summary()
    names = [variant["name"] for variant in result["variants"]]
    assert names == ["dbp N=1", "serial N=1", "compute alone"]
    assert result["dram_rows"] == 100, "the tables did not fit"
    assert result["limits_ms"]["wire"] == 0 and not any("All2All" in sentence for sentence in result["outcome"])
    assert "what to change" in ended.err and not list((tmp_path / "tier").iterdir())


@pytest.mark.slow
def test_auto_is_measured_with_fixed_micro_batches(tmp_path: Path) -> None:
    """What "auto" would choose while training is not waited for, and that is said."""
    result = nestpipe(tmp_path, *profile("--set", "pipeline.micro_batches=auto", "--json", "-", "--quiet")).summary()
    assert result["own"] in ("serial N=4", "serial N=8") and '"auto"' in result["notes"][0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seconds", "0"], ["--seconds", "from 1 to"]),
        (["--seconds", "nan"], ["--seconds", "nan"]),
        (["--steps", "5"], ["--steps", "--seconds"]),
        (["--json", "no/such/place.json"], ["--json", "no/such"]),
        (["--set", "pipeline.micro_batch=4"], ["pipeline.micro_batches"]),
        (["--schedule", "fast"], ["pipeline.schedule", "nested"]),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, flags: list[str], words: list[str]) -> None:
    """The line names the flag or the key."""
    ended = nestpipe(tmp_path, *profile(workers=2), *flags)
    assert ended.code == 2
    refused(ended, *words)


def test_a_loss_that_is_not_finite_ends_it(tmp_path: Path) -> None:
    """With the line that training would end with."""
    rates = ["tables.optimizer=sgd", "tables.lr=1e30", "dense.optimizer=sgd", "dense.lr=1e30"]
    ended = nestpipe(tmp_path, *profile("--quiet", *(part for rate in rates for part in ("--set", rate))))
    refused(ended, " is not finite", "clip_norm")
    assert ended.code == 1


def begun(folder: Path) -> tuple[Command, dict[int, int]]:
    """A profile on two workers whose turns have begun, and these workers; --json names the run for them."""
    command = Command(folder, profile("--json", str(folder / "never"), workers=2, seconds=20), run="never")
    told = command._files[1]
    if not until(DEADLINE, lambda: told.exists() and "round" in told.read_text()):
        command.end()
        pytest.fail(told.read_text())
    workers = command.workers()
    assert sorted(workers) == [0, 1]
    return command, workers


@pytest.mark.slow
def test_an_interrupted_profile_is_over_at_once(tmp_path: Path) -> None:
    """Ctrl-C: exit 130, one line behind the progress, no file and no process left."""
    command, _ = begun(tmp_path)
    os.killpg(command.pid, signal.SIGINT)
    ended = command.wait()
    assert ended.code == 130
    assert (
        ended.err.splitlines()[-1] == "nestpipe: interrupted; all workers were ended" and "Traceback" not in ended.err
    )
    assert ended.out == "" and not command.run.exists()


@pytest.mark.slow
def test_a_killed_worker_ends_it(tmp_path: Path) -> None:
    """One line behind the progress names who died."""
    command, workers = begun(tmp_path)
    os.kill(workers[1], signal.SIGKILL)
    ended = command.wait()
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith("nestpipe: worker 1 was killed by SIGKILL"), ended.err
    assert "Traceback" not in ended.err and ended.out == ""
