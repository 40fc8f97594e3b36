"""Requests as they came, one JSON line each, to be replayed later."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("nestpipe.serve")

HEADERS = (b"inference-header-content-length", b"x-user", b"x-deadline-ms", b"x-due-ms")


@dataclass(frozen=True)
class Recorded:
    """One request: when it came, in seconds since the recording began, and what it was."""

    at: float
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Recording:
    """Appends to a file.  A full disk ends the recording with a line in the log, not the instance."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="ascii")
        self._begun = time.monotonic()

    def add(self, method: str, path: str, headers: dict[bytes, bytes], body: bytes) -> None:
        if self._file.closed:
            return
        line = {
            "at": round(time.monotonic() - self._begun, 6),
            "method": method,
            "path": path,
            "headers": {name.decode(): headers[name].decode("latin-1") for name in HEADERS if name in headers},
            "body": base64.b64encode(body).decode(),
        }
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.warning("the recording ends here: %s", error)
            self.close()

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.warning("the end of the recording is lost: %s", error)


def read_recording(path: Path) -> Iterator[Recorded]:
    """The requests of a recording, in order; a line that was cut off ends it."""
    with path.open(encoding="ascii") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                return
            body = base64.b64decode(entry["body"])
            yield Recorded(entry["at"], entry["method"], entry["path"], entry["headers"], body)
