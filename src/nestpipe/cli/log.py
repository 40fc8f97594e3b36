"""What the `nestpipe` logger shows on the command line; as a library, NestPipe configures no logging."""

from __future__ import annotations

import logging
import os
import sys

FORMAT = "nestpipe: %(message)s"


class _StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is by then: a progress bar replaces it while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def configure(verbose: bool) -> None:
    """Shows warnings of worker 0, because others mostly repeat them; `verbose` shows everything, of every worker."""
    logger = logging.getLogger("nestpipe")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _StderrHandler)]:
        logger.removeHandler(handler)
    rank = os.environ.get("RANK", "0")
    handler = _StderrHandler()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    handler.setFormatter(logging.Formatter(f"nestpipe: rank {rank}: %(message)s" if verbose and several else FORMAT))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO if verbose else logging.WARNING if rank == "0" else logging.ERROR)
