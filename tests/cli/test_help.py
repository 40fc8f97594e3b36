"""Help that helps, and at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from commands import SCRIPT, nestpipe
from nestpipe.cli.main import COMMANDS, parser

KEYS = ["tables.optimizer", "tables.lr", "tables.init_scale", "tables.warmup_steps", "tables.decay_steps"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--help"],
            ["train", "verify", "bench", "schedule", "report", "recipe", "--version", "--verbose", "exit codes"],
        ),
        (["train", "--help"], ["--workers", "--schedule", "--set", "--run", "--json", "--timeout", "dlrm", "torchrun"]),
        (["verify", "--help"], ["--workers", "--schedule", "--steps", "bit for bit", "dlrm"]),
        (["bench", "--help"], ["--peers", "--rounds", "--json", "--page", "dlrm"]),
        (["report", "--help"], ["--out", "--json", "RUN|BENCH", "nestpipe report run.json"]),
        (["checkpoint", "--help"], ["ls", "inspect", "verify", "export", "tables.initial", "before the first step"]),
        (["checkpoint", "export", "--help"], ["--table", "--to", "--state", "--force", "FILE.parquet"]),
        (["profile", "--help"], ["--workers", "--seconds", "--json", "what bounds", "torchrun", "dlrm"]),
        (["schedule", "--help"], ["--batches", "--micro", "--check", "--svg"]),
        (["simulate", "--help"], ["--profile", "--sweep", "--calibrate", "1,536"]),
        (["lab", "--help"], ["up", "down", "ls", "--hosts", "--link"]),
        (["evicted", "--help"], ["--list", "--table", "--json"]),
        (["recipe", "--help"], ["section or kind", "parquet"]),
    ],
)
def test_help_does_not_wait_for_torch(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    """Help names what there is, and neither torch nor numba is loaded for it."""
    program = (
        "import sys; from nestpipe.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numba', 'numpy', 'pyarrow'} & set(sys.modules), sorted(sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert all(word in ended.stdout for word in words), ended.stdout


def test_every_command_says_what_it_is_for() -> None:
    """Every command's help has a description and examples that name the command."""
    actions = parser()._subparsers._group_actions  # type: ignore[union-attr]
    commands = actions[0].choices
    assert commands is not None and len(commands) == len(COMMANDS)
    for name, command in commands.items():  # type: ignore[attr-defined]
        help_text = command.format_help()
        assert command.description and f"  nestpipe {name}" in help_text, name


def test_the_console_script_answers(tmp_path: Path) -> None:
    """`nestpipe` itself is installed, knows its version, and without a command says how to use it."""
    known = subprocess.run([SCRIPT, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert known.returncode == 0 and known.stdout.startswith("nestpipe 0.")
    unknown = subprocess.run([SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert unknown.returncode == 2 and "COMMAND" in unknown.stderr and "Traceback" not in unknown.stderr


def test_every_key_of_a_recipe_is_listed(tmp_path: Path) -> None:
    """`recipe` lists all sections, `recipe tables` one; in a pipe a key is on one line with its default and its help."""
    every = nestpipe(tmp_path, "recipe")
    assert every.code == 0 and every.err == ""
    assert all(key in every.out for key in [*KEYS, "data.eval_fraction", "model.dim", "train.batch_size", "eval.top_k"])
    tables = nestpipe(tmp_path, "recipe", "tables")
    assert tables.code == 0 and all(key in tables.out for key in KEYS) and "train." not in tables.out
    lines = [line.split() for line in tables.out.splitlines()]
    assert ["tables.lr", "a", "number", "0.05", "Learning", "rate", "of", "the", "rows."] in lines
