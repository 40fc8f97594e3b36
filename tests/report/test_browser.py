"""Pages in a real browser: they open without a word of complaint, ask nobody for anything, and do what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from made_up import a_bench, a_data, a_run, a_summary, a_trace
from nestpipe.report.page import page, write_page
from nestpipe.report.read import read
from nestpipe.report.timeline import shape_timeline
from nestpipe.schedule import LANES as ALL_LANES

pytestmark = pytest.mark.slow

VIEWS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"width": 375, "has_touch": True, "is_mobile": True, "device_scale_factor": 2},
}
BAD = "<img src=x onerror=alert(1)></script><script>alert(2)</script>'\"`${alert(3)}"

LANES = [lane for lane in ALL_LANES if lane != "replica"]
"""Of runs with one group."""


def written(folder: Path, what: Path) -> Path:
    out = folder / "page.html"
    write_page(out, page(read(what)))
    return out


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run = a_run(folder / "run")
    (run / "data.json").write_text(json.dumps(a_data()))
    return written(folder, run)


@pytest.fixture(scope="module")
def bench_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "b.json").write_text(json.dumps(a_bench()))
    return written(folder, folder / "b.json")


@pytest.mark.parametrize("view", VIEWS)
def test_pages_open_quietly_and_ask_nobody(view: str, look: Any, run_page: Path, bench_page: Path) -> None:
    """No word on the console, no request but for the file itself, and nothing to scroll sideways."""
    for path in (run_page, bench_page):
        seen = look(path, **VIEWS[view])
        if path is run_page:
            seen.lanes()
        assert seen.said == [] and seen.asked == [path.as_uri(), "data:,"][: len(seen.asked)]
        wide, has = seen.page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= has
        assert seen.page.evaluate("() => document.documentElement.dataset.theme") == (
            "dark" if view == "dark" else "light"
        )


def test_the_timeline_has_every_worker_and_lane(look: Any, run_page: Path) -> None:
    seen = look(run_page)
    lanes = seen.lanes()
    assert lanes["workers"] == 2 and lanes["lanes"] == 2 * len(LANES)
    seen.page.select_option(".timeline select", "1")
    lanes = seen.lanes()
    assert lanes["workers"] == 1 and lanes["lanes"] == len(LANES)


def test_of_many_workers_one_is_shown_at_first(look: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.json"
    trace.write_text(json.dumps(a_trace(workers=12)))
    seen = look(written(tmp_path, trace))
    assert seen.lanes()["workers"] == 1
    seen.page.select_option(".timeline select", "all")
    assert seen.lanes()["workers"] == 12 and seen.said == []


def test_zooming_and_moving_and_back(look: Any, run_page: Path) -> None:
    """Wheel, buttons, keys and dragging change what is looked at; reset brings back what was there at first."""
    seen = look(run_page)
    first = seen.lanes()
    canvas = seen.page.locator("canvas.lanes")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + 60

    def changed(than: dict[str, float]) -> dict[str, float]:
        now = seen.lanes()
        assert (now["from"], now["to"]) != (than["from"], than["to"])
        return now

    seen.page.mouse.move(x, y)
    seen.page.mouse.wheel(0, -240)
    seen.page.wait_for_function(
        "from => document.querySelector('canvas.lanes').dataset.from != from", arg=str(first["from"])
    )
    wheeled = changed(first)
    assert first["from"] < wheeled["from"] < wheeled["to"] < first["to"]
    seen.page.mouse.down()
    seen.page.mouse.move(x + 120, y, steps=4)
    seen.page.mouse.up()
    dragged = changed(wheeled)
    assert dragged["from"] < wheeled["from"] and dragged["to"] - dragged["from"] == pytest.approx(
        wheeled["to"] - wheeled["from"]
    )
    seen.page.get_by_role("button", name="zoom in").click()
    pressed = changed(dragged)
    canvas.focus()
    for key in ("ArrowRight", "-", "+", "ArrowLeft"):
        seen.page.keyboard.press(key)
        pressed = changed(pressed)
    seen.page.get_by_role("button", name="show all").click()
    assert seen.lanes()["from"] == 0
    seen.page.get_by_role("button", name="reset").click()
    assert (seen.lanes()["from"], seen.lanes()["to"]) == (first["from"], first["to"])
    assert seen.said == []


def test_fingers_zoom_and_move(look: Any, run_page: Path) -> None:
    """Real touches: two that part zoom in, one that goes sideways moves, one that taps tells."""
    seen = look(run_page, **VIEWS["phone"])
    first = seen.lanes()
    canvas = seen.page.locator("canvas.lanes")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    device = seen.page.context.new_cdp_session(seen.page)

    def touch(kind: str, *places: float) -> None:
        points = [{"x": box["x"] + x, "y": box["y"] + 70, "id": i} for i, x in enumerate(places)]
        device.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", 150)
    touch("touchStart", 150, 200)
    for apart in range(0, 61, 10):
        touch("touchMove", 150 - apart, 200 + apart)
    touch("touchEnd")
    zoomed = seen.lanes()
    assert zoomed["to"] - zoomed["from"] < 0.6 * (first["to"] - first["from"])
    touch("touchStart", 250)
    for by in range(0, 101, 20):
        touch("touchMove", 250 - by)
    touch("touchEnd")
    moved = seen.lanes()
    assert moved["from"] > zoomed["from"] and moved["to"] - moved["from"] == pytest.approx(
        zoomed["to"] - zoomed["from"]
    )
    seen.page.touchscreen.tap(box["x"] + 200, box["y"] + 26 + 30 + (LANES.index("compute") + 0.5) * 27)
    assert "compute: " in seen.page.locator(".timeline .readout").inner_text()
    assert seen.page.locator(".tip").is_visible() and seen.said == []


def test_an_action_tells_what_it_is(look: Any, run_page: Path) -> None:
    """Under the pointer, and by keyboard: stage, batch, micro-batch, duration; on the compute lane its waits, too."""
    seen = look(run_page)
    seen.lanes()
    canvas = seen.page.locator("canvas.lanes")
    canvas.focus()
    for _ in LANES:
        seen.page.keyboard.press("ArrowDown")
    said = seen.page.locator(".timeline .readout")
    texts = set()
    for _ in range(24):
        seen.page.keyboard.press(".")
        texts.add(said.inner_text())
    assert any(
        "worker 0, compute: compute; batch " in text and "micro-batch" in text and " ms" in text for text in texts
    ), texts
    assert any("exposed: waits for " in text for text in texts), texts
    seen.page.get_by_role("button", name="reset").click()
    seen.lanes()
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    for share in range(20, 95, 5):
        seen.page.mouse.move(
            box["x"] + box["width"] * share / 100, box["y"] + 26 + 30 + (LANES.index("compute") + 0.5) * 27
        )
        tip = seen.page.locator(".tip")
        assert tip.is_visible() and ("batch" in tip.inner_text() or "between" in tip.inner_text())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_exposed_time_is_marked(theme: str, look: Any, tmp_path: Path) -> None:
    """In the colour of exposed time, on the lane of compute and on no other."""
    trace = tmp_path / "t.json"
    trace.write_text(json.dumps(a_trace("serial", workers=1)))
    seen = look(written(tmp_path, trace), color_scheme=theme)
    assert seen.lanes()["marked"] > 3
    by_lane = seen.page.evaluate(
        """lanes => {
        const canvas = document.querySelector('canvas.lanes'), ratio = canvas.width / canvas.clientWidth;
        const hex = getComputedStyle(document.documentElement).getPropertyValue('--exposed').trim();
        const want = [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
        return Array.from({length: lanes}, (_, lane) => {
            const y = Math.round((26 + 30 + 27 * lane + 22.5) * ratio), from = Math.round(90 * ratio);
            const pixels = canvas.getContext('2d').getImageData(from, y, canvas.width - from, 1).data;
            let found = 0;
            for (let i = 0; i < pixels.length; i += 4)
                if (want.every((part, k) => Math.abs(pixels[i + k] - part) < 12)) found++;
            return found;
        }); }""",
        len(LANES),
    )
    assert by_lane[-1] > 100 and sum(by_lane[:-1]) == 0, by_lane


def test_the_theme_can_be_chosen(look: Any, run_page: Path) -> None:
    seen = look(run_page, color_scheme="light")
    seen.lanes()
    paper = "() => getComputedStyle(document.body).backgroundColor"
    before = seen.page.evaluate(paper)
    seen.page.get_by_role("button", name="switch to dark colours").click()
    assert seen.page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    assert seen.page.evaluate(paper) != before and seen.said == []


def test_charts_have_axes_and_tell_values(look: Any, run_page: Path) -> None:
    seen = look(run_page)
    seen.page.wait_for_selector(".chart path.axis", state="attached")
    titles = ["loss", "throughput, samples/s", "AUC", "NE", "users by length of history"]
    assert seen.page.locator(".chart h3").all_inner_texts() == titles
    chart = seen.page.locator(".chart").first
    chart.locator("svg").focus()
    seen.page.keyboard.press("ArrowRight")
    assert "step 20: in training 1.0" in chart.locator(".readout").inner_text()


def test_data_has_filters_lengths_ties_and_notes(look: Any, run_page: Path, tmp_path: Path) -> None:
    """A row for each filter, a bar for each length, as high as its users; keys tell values.  Without data.json: no section."""
    seen = look(run_page)
    section = seen.page.locator("section[aria-label=Data]")
    rows = section.locator("#filters tbody tr")
    assert rows.count() == 3 and rows.nth(2).inner_text().split()[-5:] == ["6,034", "3,391", "711,302", "71.1", "%"]
    seen.page.wait_for_selector(".bars rect", state="attached")
    heights = [float(bar.get_attribute("height")) for bar in section.locator("rect").all()]
    assert len(heights) == 8 and heights[0] == 0 and heights[3] / heights[4] == pytest.approx(1740 / 1402, rel=0.01)
    section.locator("svg").focus()
    for _ in range(4):
        seen.page.keyboard.press("ArrowRight")
    assert section.locator(".readout").inner_text() == "21 to 50: 1,740 users, 28.8 %"
    assert "541,000 events of 6,034 users" in section.locator("#ties").inner_text()
    assert section.locator("li").all_inner_texts() == ["Ratings below 4 count as events."] and seen.said == []
    assert look(written(tmp_path, a_run(tmp_path / "run"))).page.locator("section[aria-label=Data]").count() == 0


def test_load_balance_is_a_table(look: Any, tmp_path: Path) -> None:
    """A row for all workers and one for each; what is not known is a dash."""
    planned = {"share": 0.0012, "workers": [0.0, 0.0024]}
    balance = {"mode": "cost", "planned": planned, "measured": None, "fixed": {"share": 0.47, "workers": [0.5, 0.44]}}
    seen = look(written(tmp_path, a_run(tmp_path / "run", a_summary(balance=balance))))
    rows = seen.page.locator("section[aria-label='Load balance'] tbody tr").all_inner_texts()
    told = [[word for word in row.split()[-3:] if word[0].isdigit()] for row in rows]
    assert told == [["0.12", "47.00"], ["0.00", "50.00"], ["0.24", "44.00"]]
    assert seen.said == []


def test_a_bench_shows_rungs_limit_ratios_and_stages(look: Any, bench_page: Path) -> None:
    seen = look(bench_page)
    assert seen.page.locator(".rungs .label").all_inner_texts() == ["serial", "nested N=8", "torchrec"]
    assert seen.page.locator(".rungs .limit").count() == 3 and "limit 180 ms" in seen.page.locator(".over").inner_text()
    bars = [bar.bounding_box()["width"] for bar in seen.page.locator(".rungs .bar").all()]
    assert bars[0] / bars[1] == pytest.approx(1.5, rel=0.01)
    assert seen.page.locator("#ratios tbody tr").count() == 3
    assert seen.page.locator(".pile").count() == 4, "busy and exposed, of each rung that tells its stages"


def test_names_do_not_run(look: Any, tmp_path: Path) -> None:
    """Markup in every name that a page shows is shown, and does nothing."""
    run = a_run(
        tmp_path / "a'\"<b onclick=alert(4)>", a_summary(recipe=BAD, schedule=BAD, digest=BAD, metrics={BAD: 0.5})
    )
    (run / "recipe.toml").write_text(BAD)
    summary = a_summary(recipe=BAD, stages={BAD: {"busy_ms": 1.0, "hidden_ms": 0.0, "exposed_ms": 1.0}})
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1, "why": BAD, "eval": {BAD + "@1": 0.5}}) + "\n")
    (run / "data.json").write_text(json.dumps(a_data(stages=[{"name": BAD, "users": 1, "events": 2}], notes=[BAD])))
    seen = look(written(tmp_path, run))
    seen.lanes()
    assert seen.said == [] and seen.page.locator("h1").inner_text() == BAD and BAD in seen.page.title()
    assert seen.page.locator("#filters tbody th").inner_text() == BAD
    bench = a_bench(title=BAD, link=BAD, command=BAD)
    for rung in bench["rungs"]:
        rung |= {
            "name": BAD,
            "ratios": {BAD: {"median": 1, "low": 1, "high": 1}, "__proto__": {"median": 1, "low": 1, "high": 1}},
        }
        rung["stages"] = {BAD: {"busy_ms": 5.0, "exposed_ms": 5.0}, "__proto__": {"busy_ms": 5.0, "exposed_ms": 5.0}}
    (tmp_path / "b.json").write_text(json.dumps(bench))
    shown = look(written(tmp_path, tmp_path / "b.json"))
    shown.page.wait_for_timeout(100)
    for page_ in (seen.page, shown.page):
        assert page_.locator("img").count() == 0 and page_.locator("script").count() == 2
    assert shown.said == [] and len(shown.asked) <= 2 and shown.page.locator("h1").inner_text() == BAD


def test_a_run_without_a_trace_says_so_in_place_of_the_timeline(look: Any, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "trace.json").unlink()
    seen = look(written(tmp_path, run))
    assert "kept no trace" in seen.page.locator("#no-timeline").inner_text()
    assert seen.page.locator("canvas").count() == 0 and seen.said == []


def test_a_hundred_thousand_actions(look: Any, tmp_path: Path) -> None:
    """A frame draws each action once, and none that is out of view."""
    spans = 100_000
    timeline = shape_timeline(a_trace("nested", batches=4, workers=2), "t", "")
    for worker in timeline["workers"]:
        for lane in worker["lanes"]:
            many = spans // (2 * len(LANES))
            stages, micros = lane["stage"], lane["micro"]
            lane["stage"], lane["micro"] = [stages[0]] * many, [micros[0]] * many
            lane["batch"] = [i // 8 for i in range(many)]
            lane["start"], lane["stop"] = [10 * i for i in range(many)], [10 * i + 8 for i in range(many)]
    timeline |= {"begin": 0, "end": 10 * many, "view": [0, 10 * many], "spans": spans}
    run = a_run(tmp_path / "run")
    out = tmp_path / "page.html"
    write_page(out, page(read(run) | {"timeline": timeline}))
    seen = look(out)
    first = seen.lanes()
    drawn = seen.page.evaluate(
        """async () => {
        const canvas = document.querySelector('canvas.lanes'), counts = [];
        const fill = CanvasRenderingContext2D.prototype.fillRect;
        let count = 0;
        CanvasRenderingContext2D.prototype.fillRect = function (...box) { count += 1; return fill.apply(this, box); };
        for (const key of ['ArrowRight', '+', '+', '+', 'ArrowLeft', '-', '-', '-', '-']) {
            count = 0;
            canvas.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
            await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
            counts.push(count);
        }
        return counts;
        }"""
    )
    assert seen.said == [] and first["to"] == 10 * many
    assert spans <= drawn[0] < 1.1 * spans and drawn[3] < spans / 2, drawn  # each once, and none that is out of view
