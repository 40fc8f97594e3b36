"""From figures to sentences: every regime gets the outcome and the changes that its figures support, and no others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from nestpipe.lab.advice import GROUPS, Advice, Disk, Figures, Variant, advise, compare

QUIET = (0.99, 1.0, 1.0, 1.01)
"""How rounds differ on a quiet machine."""


def run(schedule: str, micro: int, rounds: Sequence[float] = QUIET, **exposed: float) -> Variant:
    """A variant whose exposed times add up to its step; `wire`, `reduce` for All2All and all-reduce."""
    groups = dict.fromkeys(GROUPS, 0.0)
    groups |= {{"wire": "All2All", "reduce": "all-reduce"}.get(k, k): v for k, v in exposed.items()}
    step = sum(groups.values())
    return Variant(f"{schedule} N={micro}", schedule, micro, [step * r for r in rounds], None, 1e3, groups, groups)


def alone(only: str, step: float, micro: int = 1, rounds: Sequence[float] = QUIET) -> Variant:
    busy = {"compute": step} if only == "compute" else {}
    return Variant(f"{only} alone", "serial", micro, [step * r for r in rounds], only, 0.0, {}, busy)


def advice_for(variants: list[Variant], **others: Any) -> Advice:
    return advise(Figures(variants, variants[0].name, **others))


ON_A_LINK: dict[str, Any] = {"workers": 2, "machines": 2, "storage_ms": 4.0}
DISK = Disk(dram_rows=100_000, rows=900_000, read=6000, written=9000)
SERIAL = run("serial", 1, compute=150, wire=90, reduce=20, data=6, lookup=4)

REGIMES: dict[str, tuple[list[Variant], dict[str, Any], list[str], list[str], list[str]]] = {
    # name: variants (the recipe first), what else is known, words of the outcome, starts of the changes, words of these
    "a slow link, which nested hides": (
        [
            SERIAL,
            run("nested", 4, compute=160, wire=40, reduce=5),
            run("nested", 8, compute=165, wire=20, reduce=5),
            alone("compute", 150),
            alone("wire", 108),
        ],
        ON_A_LINK,
        [
            "compute is the most of the step: alone it takes 150 of 270 ms",
            "All2All: 90 ms a step are exposed under serial N=1; nested N=8 hides 70 of them, 20 stay exposed at the boundary",
            "dense all-reduce: 20 ms",
            "lookup: rows come from DRAM, or go back, in at most 4.0 ms a step: dbp has little to hide",
        ],
        [
            'pipeline.schedule = "nested", pipeline.micro_batches = 8: 190 ms instead of 270',
            "a device",
            "a link of twice",
        ],
        ["1.42x", "measured", "but for rounding", "at most 75 of the 190 ms of nested N=8", "at most 25 of the 190"],
    ),
    "nested already, near its limit": (
        [
            run("nested", 8, compute=155, wire=4, reduce=1),
            run("serial", 8, compute=150, wire=90, reduce=20),
            run("serial", 1, compute=150, wire=90, reduce=20),
            alone("compute", 154, 8),
            alone("wire", 100, 8),
        ],
        ON_A_LINK,
        ["compute bounds the step: alone it takes 154 of 160 ms; no schedule can go below that", "hides 86"],
        ["nothing in [pipeline]: the step is within 4% of its limit", "a device"],
        ["at most 60 of the 160 ms"],
    ),
    "a link that bounds the step": (
        [
            run("nested", 8, compute=100, wire=190, reduce=10),
            run("serial", 8, compute=100, wire=280, reduce=10),
            alone("compute", 98, 8),
            alone("wire", 292, 8),
        ],
        ON_A_LINK,
        [
            "the wire (All2All and all-reduce) bounds the step: alone it takes 292 of 300 ms",
            "hides 90 of them, 190 stay",
        ],
        ["nothing in [pipeline]: the step is within 3%", "a link of twice the rate"],
        ["at most 146 of the 300 ms"],
    ),
    "one worker, compute alone matters": (
        [run("serial", 1, compute=50, lookup=1), run("dbp", 1, compute=51), alone("compute", 50)],
        {"storage_ms": 1.0, "cores": 8},
        ["compute bounds the step", "All2All: none, with one worker", "dbp has little to hide"],
        ["nothing in [pipeline]: the step is within 2%", "a device", "train.threads = 8"],
        ["at most 25 of the 51 ms", "not measured"],
    ),
    "one worker, tables on disk": (
        [run("serial", 1, compute=100, lookup=90, data=5), run("dbp", 1, compute=104, lookup=1), alone("compute", 100)],
        {"storage_ms": 90.0, "disk": DISK},
        ["compute is the most of the step", "6,000 rows a step read from disk and 9,000 written", "dbp N=1 hides 89"],
        ['pipeline.schedule = "dbp": 105 ms instead of 195', "a device"],
        ["1.86x", "bit for bit", "at most 15 of the 105 ms"],
    ),
    "a disk that bounds the step": (
        [run("dbp", 1, compute=50, lookup=70), run("serial", 1, compute=50, lookup=118), alone("compute", 50)],
        {"storage_ms": 118.0, "disk": DISK},
        ["lookup bounds the step: alone it takes 118 of 120 ms"],
        ["nothing in [pipeline]", "more rows in DRAM than tables.dram_rows = 100000"],
        ["would save at most 70 of the 120 ms of dbp N=1"],
    ),
    "a disk tier whose rows all fit in DRAM": (
        [run("serial", 1, compute=50, lookup=3), run("dbp", 1, compute=54), alone("compute", 50)],
        {"storage_ms": 3.0, "disk": Disk(1_000_000, 900_000, 0, 0)},
        ["0 rows a step read from disk"],
        ["nothing in [pipeline]", "a device"],
        [],
    ),
    "micro-batches that cost more than they hide": (
        [
            run("nested", 8, compute=150, wire=4),
            run("serial", 8, compute=145, wire=12),
            run("serial", 1, compute=100, wire=10),
            alone("compute", 145, 8),
            alone("wire", 9, 8),
        ],
        {"workers": 2, "storage_ms": 1.0},
        [
            "compute is the most of the step: alone it takes 145 of 154 ms; no schedule can go below that with N=8",
            "micro-batches: compute takes 145 ms in 8 pieces and 100 in one",
        ],
        ['pipeline.schedule = "serial", pipeline.micro_batches = 1: 110 ms instead of 154'],
        ["1.40x", "at most 50 of the 110 ms of serial N=1"],
    ),
    "more noise than gain": (
        [
            run("serial", 1, (0.7, 1.0, 1.4, 1.0), compute=100, wire=20),
            run("nested", 4, (1.2, 1.0, 0.8, 0.9), compute=105, wire=5),
            alone("compute", 90),
            alone("wire", 20),
        ],
        ON_A_LINK,
        ["compute is the most of the step"],
        ["a device", "a link", "perhaps nested N=4"],
        ["cannot be told apart", "--seconds"],
    ),
    "one round": (
        [
            run("serial", 1, (1.0,), compute=100, wire=50),
            run("nested", 4, (1.0,), compute=105, wire=5),
            alone("compute", 100, rounds=(1.0,)),
            alone("wire", 50, rounds=(1.0,)),
        ],
        ON_A_LINK,
        ["compute is the most of the step"],
        ["a device", "a link", "perhaps nested N=4: 110 ms against 150, that is one round"],
        ["--seconds"],
    ),
    "nothing alone bounds it, and nothing hides": (
        [
            run("serial", 1, compute=40, wire=30, data=20, update=10, lookup=10),
            run("nested", 4, compute=60, wire=30, between=30),
            alone("compute", 40),
            alone("wire", 30),
        ],
        {"workers": 2, "storage_ms": 10.0},
        ["nothing alone bounds the step of 110 ms", "exposed under serial N=1, and 30 under nested N=4", "data: load"],
        ["nothing in [pipeline]: nothing else", "a device", "rows travel by this machine's own cores"],
        ["2.75 of its limit"],
    ),
    "data that cannot keep up": (
        [
            run("nested", 4, compute=40, data=60),
            run("serial", 4, compute=40, data=90, wire=5),
            alone("compute", 40, 4),
            alone("wire", 5, 4),
        ],
        ON_A_LINK,
        ["data: load, move and route are exposed for 60 ms a step under nested N=4: they cannot keep up"],
        [
            "nothing in [pipeline]",
            "data that is read and routed faster would save at most 60 of the 100 ms",
            "a device",
        ],
        [],
    ),
}


@pytest.mark.parametrize("regime", REGIMES)
def test_each_regime_is_told_what_its_figures_say(regime: str) -> None:
    """Words of the outcome, and which changes in which order."""
    variants, others, said, starts, words = REGIMES[regime]
    advice = advice_for(variants, **others)
    outcome, changes = "\n".join(advice.outcome), "\n".join(change.text for change in advice.changes)
    assert all(word in outcome for word in said), outcome
    assert len(advice.changes) >= len(starts), changes
    assert all(change.text.startswith(start) for change, start in zip(advice.changes, starts)), changes
    assert all(word in changes for word in words), changes


@pytest.mark.parametrize("regime", REGIMES)
def test_what_holds_for_every_regime(regime: str) -> None:
    """What was measured comes first, the rest by what it saves, never more than the step; no number that is not one."""
    variants, others, *_ = REGIMES[regime]
    advice = advice_for(variants, **others)
    saved = [change.saves_ms for change in advice.changes if change.kind not in ("measured", "none")]
    assert saved == sorted(saved, reverse=True)
    assert all(0 <= change.saves_ms < variants[0].step_ms for change in advice.changes)
    assert all(change.kind not in ("measured", "none") for change in advice.changes[1:])
    assert sum(change.kind in ("measured", "unsure", "none") for change in advice.changes) == 1
    for sentence in [*advice.outcome, *(change.text for change in advice.changes)]:
        assert not re.search(r"\bnan\b|\binf\b|-\d", sentence) and "\n" not in sentence, sentence


def test_what_is_recommended_can_be_set() -> None:
    """The settings of a measured change are keys and values of a recipe."""
    variants, others, *_ = REGIMES["a slow link, which nested hides"]
    change = advice_for(variants, **others).changes[0]
    assert change.settings == {"pipeline.schedule": "nested", "pipeline.micro_batches": 8}
    assert change.kind == "measured" and change.step_ms == pytest.approx(190) and change.saves_ms == pytest.approx(80)


def test_of_equals_the_one_that_changes_least_is_recommended() -> None:
    """Where N=1 and N=8 are as fast, N stays."""
    variants = [SERIAL, run("nested", 8, compute=189), run("dbp", 1, compute=190), alone("compute", 150)]
    assert advice_for(variants, **ON_A_LINK).changes[0].settings == {"pipeline.schedule": "dbp"}


def test_rounds_are_compared_with_one_another() -> None:
    """A machine that gets twice as slow does not hide that one variant is a tenth faster in every round."""
    gain = compare(run("serial", 1, (1, 1.5, 2, 2), compute=110), run("dbp", 1, (1, 1.5, 2, 2), compute=100))
    assert gain.ratio == pytest.approx(1.1) and gain.sure


@pytest.mark.parametrize(
    ("faster", "rounds", "sure"),
    [
        (1, 1, False),
        (2, 2, False),
        (3, 3, True),
        (4, 5, False),
        (5, 6, True),
        (6, 8, False),
        (7, 8, True),
        (0, 9, False),
    ],
)
def test_rounds_have_to_agree(faster: int, rounds: int, sure: bool) -> None:
    """A gain is sure where rounds of two equals would hardly come out like this."""
    other = run("dbp", 1, [1.0] * faster + [1.3] * (rounds - faster), compute=100)
    gain = compare(run("serial", 1, [1.0] * rounds, compute=120), other)
    assert (gain.faster, gain.sure) == (faster, sure)


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"compute_by_worker": [100.0, 101.0, 160.0]}, "worker 2 computes 160 ms a step and others 101"),
        ({"compute_by_worker": [100.0, 110.0]}, None),
        ({"new_rows": 0.6}, "60% of a step's rows were new.  Later in a run these come from DRAM,"),
        ({"new_rows": 0.6, "disk": DISK}, "come from DRAM or disk"),
        ({"new_rows": 0.1}, None),
    ],
)
def test_what_is_out_of_the_ordinary_is_said(others: dict[str, Any], words: str | None) -> None:
    """A slow worker and tables that were nearly empty have a sentence, and only these."""
    variants = REGIMES["a slow link, which nested hides"][0]
    usual = advice_for(variants, **ON_A_LINK).outcome
    outcome = advice_for(variants, **{**ON_A_LINK, **others}).outcome
    assert words in "\n".join(outcome) if words else outcome == usual


def test_waiting_is_not_taken_for_the_wire() -> None:
    """All2All that is exposed for far longer than the wire needs is waiting for others, and a link would not help."""
    variants = [run("serial", 1, compute=50, wire=60), run("nested", 4, compute=60, wire=55), alone("compute", 50)]
    variants.append(alone("wire", 4))
    advice = advice_for(variants, **ON_A_LINK)
    assert any("some 56 are waiting for other workers" in sentence for sentence in advice.outcome), advice.outcome
    assert not any("link" in change.text for change in advice.changes)


def test_compute_that_has_no_cores_of_its_own_is_named() -> None:
    """Compute that takes longer in the run than alone has a sentence."""
    variants = [run("nested", 4, compute=80), run("serial", 4, compute=60, wire=40), alone("compute", 55, 4)]
    outcome = advice_for([*variants, alone("wire", 30, 4)], **ON_A_LINK).outcome
    assert any("compute takes 80 ms beside the rest of the step and 55 alone" in sentence for sentence in outcome)
