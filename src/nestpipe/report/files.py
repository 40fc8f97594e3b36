"""Reads the files of a page.  Anything in them may be wrong: an error is one line with the file and what to do."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

from nestpipe.errors import NestPipeError


class ReportError(NestPipeError, ValueError):
    """A file cannot be shown; the message is one line, names the file and says what to do."""

    exit_code = 2


def read_text(path: Path, advice: str) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise ReportError(f"{path} is not text in UTF-8: {advice}") from None
    except OSError as error:
        raise ReportError(f"{path} cannot be read ({error.strerror or error}): {advice}") from None


def read_json(path: Path, advice: str) -> Any:
    return parse_json(read_text(path, advice), str(path), advice)


def parse_json(text: str, where: str, advice: str) -> Any:
    """`where` is the file, or the line of a file, that errors name."""
    if not text.strip():
        raise ReportError(f"{where} is empty: {advice}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ReportError(f"{where} is nested too deeply: {advice}") from None
    except ValueError as error:
        raise ReportError(f"{where} is not JSON, or was cut off ({error}): {advice}") from None


def file_date(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def count(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is an object, otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def sequence(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
