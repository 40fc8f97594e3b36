"""How a command ends: one line for an error that a user can act on, a traceback for a bug, and the exit code."""

from __future__ import annotations

import os
import sys
import traceback

from nestpipe.errors import NestPipeError, message_of, place_of


def leave(code: int) -> int:
    """Returns the exit code; a worker or a launcher ends right here instead.

    Their threads, in gloo and in torch's launcher, may still run C++ code or wait for each other while Python shuts down.  Once
    in a few hundred runs, that shutdown never finished.
    """
    launched_workers = "NESTPIPE_REPORTS" in os.environ
    if "RANK" in os.environ or launched_workers or _waits_for_a_server():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _waits_for_a_server() -> bool:
    """Whether a request to a lost server still blocks a thread, for which pyarrow would wait at the end of the process."""
    patience = sys.modules.get("nestpipe.files.patience")
    return patience is not None and patience.left_behind()


def interrupted() -> int:
    _restore_cursor()
    print("nestpipe: interrupted; all workers were ended", file=sys.stderr)
    return 130


def fail(error: Exception) -> int:
    """Prints one line and returns the exit code; raises an error that is a bug of ours again, for its traceback."""
    _restore_cursor()
    if "RANK" in os.environ:
        return _fail_as_worker(error)
    message, code = describe(error)
    if message is None:
        raise error
    print(f"nestpipe: {message}", file=sys.stderr)
    return code


def _fail_as_worker(error: Exception) -> int:
    """Leaves the message for the launcher, which prints the one that explains the others; prints it if there is none."""
    from nestpipe.launch.failures import as_peer_lost, report_failure

    error = as_peer_lost(error)
    message, code = describe(error)
    heard = report_failure(error, message or f"{type(error).__name__}: {message_of(error)}{place_of(error)}")
    if message is None:
        traceback.print_exception(error)
    elif not heard:
        print(f"nestpipe: {message}", file=sys.stderr)
    sys.stderr.flush()
    # Not an orderly exit: threads of this worker may wait for a lost worker until their own deadline.
    os._exit(code)


def describe(error: Exception) -> tuple[str | None, int]:
    """The line to print and the exit code; no line for an error that needs a traceback."""
    if isinstance(error, NestPipeError):
        return error.one_line(), error.exit_code
    if isinstance(error, ValueError | MemoryError | FileNotFoundError | PermissionError):
        return message_of(error) + place_of(error), 2
    if isinstance(error, OSError):
        file = f"{error.filename}: " if error.filename else ""
        return file + (error.strerror or message_of(error)) + place_of(error), 1
    return None, 1


def _restore_cursor() -> None:
    """A worker that was ended may have left the terminal's cursor hidden."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()
