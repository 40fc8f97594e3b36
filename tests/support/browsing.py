"""A real browser to look at pages with."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

_open: list[Any] = []
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One for all tests; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no browser: `make debian` or `apt-get install chromium`")
    if _open:  # this fixture is there once for every folder that has it, and playwright only once
        yield _open[0]
        return
    with playwright.sync_playwright() as driver:
        _open.append(driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"]))
        yield _open[0]
        _open.pop().close()


def in_a_loop_of_its_own(running: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns.  In a thread of its own: playwright leaves a running loop in the main one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, running).result()


class Look:
    """A page as a browser has it: what it said and asked for, and a few ways to read it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: (self.said.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.asked.append(request.url))

    def lanes(self) -> dict[str, float]:
        """What the timeline shows, once it is drawn."""
        self.page.wait_for_selector("canvas.lanes[data-from]")
        # Two frames: what was asked for before is drawn then.
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found = self.page.evaluate("() => ({...document.querySelector('canvas.lanes').dataset})")
        return {key: float(value) for key, value in found.items()}


@pytest.fixture
def look(browser: Any) -> Iterator[Any]:
    """Opens a page and gives a `Look`; options as for a playwright context."""
    with contextlib.ExitStack() as closing:

        def open_page(path: Path | str, width: int = 1200, **options: Any) -> Look:
            context = browser.new_context(viewport={"width": width, "height": 800}, **options)
            closing.callback(context.close)
            looked = Look(context.new_page())
            looked.page.goto(path if isinstance(path, str) else path.as_uri())
            return looked

        yield open_page
