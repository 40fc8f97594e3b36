"""The live page in a real browser."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fake_relay import a_history
from nestpipe.serve import Client
from nestpipe.serve.client import ServingError
from serving import MODEL, serving

pytestmark = pytest.mark.slow

BAD = "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize("view", [{}, {"color_scheme": "dark"}, {"width": 375, "is_mobile": True, "has_touch": True}])
def test_the_page_shows_what_happens(view: dict[str, Any], look: Any) -> None:
    """Promise: latency, paths, memory, slow requests and the version, without a complaint, and only as text."""
    with serving(slow_ms=0.0001) as one, Client(one.url, MODEL) as client:
        for i in range(12):
            client.preinfer(f"u{i % 4}", a_history(30, i % 4))
            client.rank(f"u{i % 4}", a_history(30, i % 4), np.arange(40), 99_999)
        client.rank(BAD, a_history(30, 5), np.arange(40), 99_999)
        with pytest.raises(ServingError):
            client.rank("late", a_history(30), np.arange(4), 99_999, deadline_ms=-1)
        seen = look(one.url + "/", **view)
        seen.page.wait_for_selector("body[data-drawn]")
        text = seen.page.inner_text("main")
        for says in ("version", "prefix reused", "latency", "requests by path", "memory", "Slow requests", BAD):
            assert says in text
        assert seen.page.locator(".chart svg path").count() > 4
        wide, has = seen.page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= has and seen.said == []
        assert all(url.startswith((one.url, "data:")) for url in seen.asked)
        client.rank("u0", a_history(30), np.arange(40), 99_999)
        seen.page.wait_for_function("() => document.querySelector('main').innerText.includes('14')")
        assert seen.said == []
