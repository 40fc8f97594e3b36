"""The examples run as they say; each in a short form."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import Command

EXAMPLES = Path(__file__).parents[2] / "examples"
README = EXAMPLES.parent / "README.md"


@pytest.mark.slow
def test_own_model_learns_on_two_workers() -> None:
    """Promise: a model, a loop and torchrun are all that two workers need."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(EXAMPLES / "own_model.py")], capture_output=True, text=True, timeout=170, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines if line.startswith("step")]
    assert len(losses) == 4 and losses[-1] < 0.6 * losses[0], done.stdout
    assert "512 samples on 2 workers" in done.stdout


def test_the_readme_and_the_example_are_one_text() -> None:
    """Promise: the code in the README is that of examples/ranker.py, to the letter."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert (EXAMPLES / "ranker.py").read_text() in blocks


def test_the_readmes_model_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: what the README shows runs as it stands, and learns its two samples."""
    made = runpy.run_path(str(EXAMPLES / "ranker.py"))
    made["pipeline"].close()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[:100]]
    assert [int(number) for number, _ in lines] == list(range(100))
    assert float(lines[-1][1]) < float(lines[0][1])


@pytest.mark.slow
def test_two_towers_find_what_users_like() -> None:
    """Promise: an own loop trains retrieval, and rows and outputs are what an index of nearest items needs."""
    pytest.importorskip("faiss")
    made = runpy.run_path(str(EXAMPLES / "two_tower.py"))
    assert made["main"](steps=80) > 0.8  # by chance 0.1


def test_an_own_model_on_an_own_log(tmp_path: Path) -> None:
    """Promise: a Parquet log, a class of one's own and a recipe that names both are all that `nestpipe train` needs."""
    shutil.copytree(EXAMPLES / "own_recipe", tmp_path, dirs_exist_ok=True)
    runpy.run_path(str(tmp_path / "make_log.py"))["write_log"](str(tmp_path / "clicks.parquet"), rows=6_000)
    short = ["--set", "train.batch_size=64", "--quiet"]
    ended = Command(tmp_path, ["train", "recipe.toml", *short], run="run").wait()
    assert ended.code == 0, ended.err
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert metrics["samples"] == 600 and metrics["auc"] > 0.7, metrics


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: every cell runs, from the first to the last, and shows what it says; the file holds no outputs."""
    monkeypatch.chdir(tmp_path)
    cells = [c for c in json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"] if c["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = {}
    for cell in cells:
        assert not cell["outputs"]
        text = "".join(cell["source"]).replace("40_000", "4_000").replace("5_000", "500").replace("=512", "=128")
        shown[cell["id"]] = run_cell(text, names)
    for picture in ("draw-plan", "draw-run", "loss"):
        assert shown[picture]._repr_svg_().startswith("<svg")
    assert shown["metrics"].startswith("held-out AUC")
    assert "<html" in shown["report"].read_text()


def run_cell(text: str, names: dict[str, Any]) -> Any:
    """As Jupyter does it: the value of a cell is that of its last line, where that is an expression."""
    tree = ast.parse(text)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.mark.slow
def test_an_own_sequence_model_on_an_own_log_of_events(tmp_path: Path) -> None:
    """Promise: an unsorted log with text ids and a sequence model of one's own need a recipe and nothing else."""
    shutil.copytree(EXAMPLES / "own_sequences", tmp_path, dirs_exist_ok=True)
    runpy.run_path(str(tmp_path / "make_log.py"))["write_log"](str(tmp_path / "log"))
    ended = Command(tmp_path, ["train", "recipe.toml", "--set", "train.epochs=8", "--quiet"], run="run").wait()
    assert ended.code == 0, ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["hr@10"] > 2 * summary["by_popularity"]["hr@10"], summary
    told = json.loads((tmp_path / "run" / "data.json").read_text())
    assert [stage["name"].split(" ")[0] for stage in told["stages"]] == ["read", "any", "users"]
