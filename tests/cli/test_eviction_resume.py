"""A resumed run with admission and eviction: counts and lists continue as if it had never been interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import nestpipe, small

EVICTION = [
    "tables.admit_after=2",
    "tables.ttl_steps=12",
    "tables.max_rows=300",
    "tables.sweep_every=7",
    "data.samples=4000",
]
SAVES = ["checkpoint.every_steps=9", "checkpoint.full_every=10", "checkpoint.keep=9"]


@pytest.mark.slow
def test_eviction_resumes_from_an_incremental_checkpoint(tmp_path: Path) -> None:
    """Rows, frequencies of waiting keys, evicted keys and their list equal those of an uninterrupted run."""
    whole = nestpipe(tmp_path, *small(*EVICTION), "--steps", "36", "--schedule", "nested", "--json", "-", run="whole")
    nestpipe(
        tmp_path, *small(*EVICTION, *SAVES), "--steps", "30", "--schedule", "nested", "--json", "-", run="run"
    ).summary()
    run = str(tmp_path / "run")
    resume = ["--resume", "--from", "27", "--steps", "36", "--schedule", "dbp", "--check", "staleness"]
    again = nestpipe(tmp_path, "train", run, "--run-dir", run, *resume, "--quiet", "--json", "-")
    first, second = whole.summary(), again.summary()
    assert sum(first["evicted"].values()) > 100 and first["waiting"] > 0, "the run must evict and wait"
    assert first["digest"] == second["digest"]
    assert (first["evicted"], first["waiting"], first["rows"]) == (
        second["evicted"],
        second["waiting"],
        second["rows"],
    )
    listed = [
        sorted(nestpipe(tmp_path, "evicted", str(tmp_path / run), "--list").out.splitlines())
        for run in ("whole", "run")
    ]
    assert listed[0] == listed[1] and len(listed[0]) == sum(first["evicted"].values())
