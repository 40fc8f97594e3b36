"""A link that is cut in mid-run, between two hosts in namespaces: both workers end by the deadline, and the run goes on later."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from commands import DEADLINE, MODULE, small, until
from nestpipe.checkpoint.folder import Folder
from nestpipe.lab.network import Network
from runs import resume, train_run
from workers import run

TIMEOUT = 4
LENGTH = ["data.samples=40000", "train.log_every=1", "train.steps=100", "pipeline.schedule=nested"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("alone_in_the_lab"),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
        reason="namespaces need root and iproute2",
    ),
]


def test_a_cut_link_ends_both_workers(tmp_path: Path) -> None:
    """Each says in one line what it waited for, and how long; the last checkpoint is whole, and the digest in the end that of
    an untouched run."""
    settings = [part for part in small(*LENGTH) if "=" in part]
    saving = [*settings, "checkpoint.every_steps=10"]
    path = tmp_path / "run"
    with Network(2, "500mbit") as network:
        workers = []
        for rank, host in enumerate(network.hosts):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": network.hosts[0].address,
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": host.interface,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(tmp_path),
            }
            arguments = ["train", "dlrm", *(f"--set={setting}" for setting in saving), "--quiet"]
            arguments += ["--run-dir", str(path), "--timeout", str(TIMEOUT)]
            with (tmp_path / f"{rank}.err").open("wb") as err:
                workers.append(subprocess.Popen(host.command([*MODULE, *arguments]), env=environment, stderr=err))
        try:
            folder = Folder(path / "checkpoints")
            over = [worker.poll for worker in workers]
            assert until(DEADLINE, lambda: bool(folder.steps()) or any(poll() is not None for poll in over))
            assert all(poll() is None for poll in over), (tmp_path / "0.err").read_text()
            subprocess.run(["ip", "link", "set", f"{network.name}-p1", "down"], check=True, timeout=10)
            assert [worker.wait(DEADLINE) for worker in workers] == [1, 1]
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.send_signal(signal.SIGKILL)
                    worker.wait(10)
    for rank in range(2):
        said = [line for line in (tmp_path / f"{rank}.err").read_text().splitlines() if line.startswith("nestpipe: ")]
        assert len(said) == 1 and f"rank {rank}" in said[0], said
        assert f"waited {TIMEOUT} s for" in said[0] or "waited in vain" in said[0] or "lost" in said[0], said
    last = folder.find()
    assert last is not None and last.manifest.step < 100
    found = run(2, resume, "dlrm", saving, str(path))[0]["digest"]
    assert found == run(2, train_run, "dlrm", settings, str(tmp_path / "untouched"))[0]["digest"]
