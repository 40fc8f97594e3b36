"""The page at `/`: what the instance does now and did in the last minutes, in the look of the reports."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from nestpipe.report.page import page

SCRIPTS = ("dom.js", "charts.js", "theme.js")
"""The reports' scripts that it uses, before its own."""


@cache
def live_page(model: str) -> str:
    own = (files("nestpipe.serve.http") / "assets" / "live.js").read_text(encoding="utf-8")
    data = {"title": model, "subtitle": "instance"}
    return page(data, scripts=SCRIPTS, own=own, policy="; connect-src 'self'")
