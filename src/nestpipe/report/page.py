"""Builds the page: one file with style, script and data, which loads nothing else.

The data may hold anything that a file on disk can hold.  It is JSON in a script element that does not run, with every
`<` escaped, and the script shows it only as text.  Whatever gets in, the policy in the page's head lets only this
script run.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from nestpipe.version import VERSION

SCRIPTS = ("dom.js", "timeline.js", "charts.js", "data.js", "run.js", "bench.js", "theme.js", "page.js")
"""Joined into one script in this order: each may use those before it."""


def page(data: dict[str, Any], scripts: Sequence[str] = SCRIPTS, own: str = "", policy: str = "") -> str:
    """`own` is a script of another page, which may use `scripts`; `policy` is what it needs beyond this page's."""
    script = "(() => {\n'use strict';\n" + "".join(_asset(name) for name in scripts) + own + "})();\n"
    style = _asset("page.css")
    parts = {
        "POLICY": f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'{policy}",
        "STYLE": style,
        "SCRIPT": script,
        "DATA": embedded({**data, "version": VERSION}),
    }
    html = _asset("page.html")
    before, *rest = html.split("@@")
    # Every second piece is a name.  What replaces it is not parsed again, so data cannot contain a name.
    return before + "".join(parts[piece] if i % 2 == 0 else piece for i, piece in enumerate(rest))


def embedded(data: dict[str, Any]) -> str:
    """JSON in ASCII that cannot open or close a tag or a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def write_page(path: Path, html: str) -> None:
    """Writes the whole file, or nothing."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:64]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(html)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # the usual mode; mkstemp's is for the owner only
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _asset(name: str) -> str:
    return (files("nestpipe.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
