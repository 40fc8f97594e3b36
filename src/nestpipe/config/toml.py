"""Values as TOML text, on one line each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any


def toml_value(value: Any) -> str:
    """A value in TOML, on one line; dataclasses and dicts become inline tables."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON lets pass.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    items = value.items() if isinstance(value, dict) else toml_items(value)
    return "{" + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in items) + "}"


def toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_items(section: Any) -> Iterable[tuple[str, Any]]:
    """The fields to write: all but those that are None anyway."""
    for f in fields(section):
        value = getattr(section, f.name)
        if f.init and not (value is None and f.default is None):
            yield f.name, value
