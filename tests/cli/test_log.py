"""What the `nestpipe` logger shows on the command line: warnings of worker 0, and with -v everything of every worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from nestpipe.cli import log
from nestpipe.cli.main import parser


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    logger = logging.getLogger("nestpipe")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.mark.parametrize(
    ("rank", "workers", "verbose", "shown"),
    [
        ("0", "1", False, "nestpipe: careful 1\n"),
        ("0", "2", False, "nestpipe: careful 1\n"),
        ("1", "2", False, ""),
        ("0", "1", True, "nestpipe: as usual\nnestpipe: careful 1\n"),
        ("1", "2", True, "nestpipe: rank 1: as usual\nnestpipe: rank 1: careful 1\n"),
    ],
)
def test_who_logs_what(
    rank: str,
    workers: str,
    verbose: bool,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", workers)
    log.configure(True)  # a second command in the same process replaces what the first configured
    log.configure(verbose)
    logger = logging.getLogger("nestpipe.checkpoint")
    logger.info("as usual")
    logger.warning("careful %d", 1)
    assert capsys.readouterr() == ("", shown)


@pytest.mark.parametrize("arguments", [["-v", "recipe"], ["recipe", "-v"], ["checkpoint", "ls", "RUN", "--verbose"]])
def test_verbose_may_stand_before_and_after_the_command(arguments: list[str]) -> None:
    assert parser().parse_args(arguments).verbose
    assert not hasattr(parser().parse_args([a for a in arguments if a not in ("-v", "--verbose")]), "verbose")
