"""The base of every error that a user can act on.  Imports nothing."""

from __future__ import annotations


class NestPipeError(Exception):
    """The message says what is wrong and what to change; the command line prints it as one line, without a traceback."""

    exit_code = 1
    """What the command line exits with: 2 for bad input, 1 for anything else that fails."""
    on_all_workers = False
    """Every worker raises it for the same batch, and the message names that batch."""

    def one_line(self) -> str:
        """The message on one line, followed by rank, stage and batch unless it already names its batch."""
        return message_of(self) + ("" if self.on_all_workers else place_of(self))


def message_of(error: BaseException) -> str:
    """The message on one line."""
    return " ".join(str(error).split())


def place_of(error: BaseException) -> str:
    """The rank, stage and batch that the engine noted on an error, in brackets; empty where it noted none."""
    notes: list[str] = getattr(error, "__notes__", [])
    return f" ({notes[0]})" if notes else ""
