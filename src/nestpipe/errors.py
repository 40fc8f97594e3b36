"""The base of every error that a user can act on.  Imports nothing."""

from __future__ import annotations


class NestPipeError(Exception):
    """The message says what is wrong and what to change; the command line prints it as one line, without a traceback."""

    exit_code = 1
    """What the command line exits with: 2 for bad input, 1 for anything else that fails."""
    on_all_workers = False
    """Every worker raises it for the same batch, and the message names that batch."""

    def one_line(self) -> str:
        """The message on one line, followed by the rank, stage and batch that the engine noted on the error."""
        return one_line(self, place=not self.on_all_workers)


def one_line(error: BaseException, place: bool = True) -> str:
    """An error's message on one line, followed by the first note on it, which says where it happened."""
    notes: list[str] = getattr(error, "__notes__", [])
    return " ".join(str(error).split()) + (f" ({notes[0]})" if place and notes else "")
