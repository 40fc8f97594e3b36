"""From figures to sentences: every regime gets the outcome and the changes that its figures support, and no others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from nestpipe.lab.advice import Change, MeasuredVariant, ProfileFigures, advise, agree, gains

QUIET = (0.99, 1.0, 1.0, 1.01)
"""How rounds differ on a quiet machine."""


def run(
    schedule: str, micro: int, rounds: Sequence[float] = QUIET, only: str | None = None, **exposed: float
) -> MeasuredVariant:
    """A variant whose exposed times, by stage, add up to its step."""
    step = sum(exposed.values())
    return MeasuredVariant(schedule, micro, only, [step * r for r in rounds], exposed)


def alone(only: str, step: float, micro: int = 1, rounds: Sequence[float] = QUIET) -> MeasuredVariant:
    return run("serial", micro, rounds, only, **{"compute" if only == "compute" else "embed": step})


def advice_for(measured: list[MeasuredVariant], **others: Any) -> tuple[list[str], list[Change]]:
    """The first one is the recipe."""
    runs = [one for one in measured if one.only is None]
    return advise(ProfileFigures(runs[0], runs, [one for one in measured if one.only], **others))


ON_A_LINK: dict[str, Any] = {"machines": 2, "storage_ms": 4.0}
SERIAL = run("serial", 1, compute=150, embed=90, reduce=20, load=6, retrieve=4)

REGIMES: dict[str, tuple[list[MeasuredVariant], dict[str, Any], list[str], list[str], list[str]]] = {
    # name: variants (the recipe first), what else is known, words of the outcome, starts of the changes, words of these
    "a slow link, which nested hides": (
        [
            SERIAL,
            run("nested", 4, compute=160, embed=40, reduce=5),
            run("nested", 8, compute=165, embed=20, reduce=5),
            alone("compute", 150),
            alone("wire", 108),
        ],
        ON_A_LINK,
        [
            "nothing alone bounds the step of 270 ms.  Its parts alone take: compute 150, wire 108, storage 4.0; no schedule",
            "All2All: serial N=1 exposes 90 ms a step; nested N=8 hides 70 and leaves 20, mostly embed",
            "dense all-reduce: serial N=1 exposes 20 ms",
        ],
        [
            'pipeline.schedule = "nested", pipeline.micro_batches = 8: 190 ms instead of 270',
            "computing twice as fast",
            "a link of twice",
        ],
        ["1.42x", "measured", "but for rounding", "at most 75 of the 190 ms of nested N=8", "at most 12 of the 190"],
    ),
    "nested already, near its limit": (
        [
            run("nested", 8, compute=155, grad=4, reduce=1),
            run("serial", 8, compute=150, grad=90, reduce=20),
            run("serial", 1, compute=150, grad=90, reduce=20),
            alone("compute", 154, 8),
            alone("wire", 100, 8),
        ],
        ON_A_LINK,
        ["compute bounds the step of 160 ms", "with N=8 goes below 154", "hides 86 and leaves 4.0"],
        ["nothing in [pipeline]: no variant is faster than nested N=8, which takes 1.04 times its limit", "computing"],
        ["at most 60 of the 160 ms"],
    ),
    "a link that bounds the step": (
        [
            run("nested", 8, compute=100, embed=190, reduce=10),
            run("serial", 8, compute=100, embed=280, reduce=10),
            alone("compute", 98, 8),
            alone("wire", 292, 8),
        ],
        ON_A_LINK,
        ["wire bounds the step of 300 ms", "hides 90 and leaves 190"],
        ["nothing in [pipeline]", "a link of twice the rate"],
        ["at most 100 of the 300 ms"],
    ),
    "one worker, compute alone matters": (
        [run("serial", 1, compute=50, retrieve=1), run("dbp", 1, compute=51), alone("compute", 50)],
        {"storage_ms": 1.0, "threads": 8},
        ["compute bounds the step"],
        ["nothing in [pipeline]", "computing twice as fast (try train.threads = 8) would save at most 25 of the 51 ms"],
        [],
    ),
    "one worker, tables on disk": (
        [
            run("serial", 1, compute=100, retrieve=90, load=5),
            run("dbp", 1, compute=104, retrieve=1),
            alone("compute", 100),
        ],
        {"storage_ms": 90.0, "dram_rows": 100_000},
        ["nothing alone bounds the step", "lookup: serial N=1 exposes 95 ms a step; dbp N=1 hides 94 and leaves 1.0"],
        ['pipeline.schedule = "dbp": 105 ms instead of 195', "computing"],
        ["1.86x", "bit for bit", "at most 15 of the 105 ms"],
    ),
    "a disk that bounds the step": (
        [run("dbp", 1, compute=50, retrieve=70), run("serial", 1, compute=50, retrieve=118), alone("compute", 50)],
        {"storage_ms": 118.0, "dram_rows": 100_000},
        ["storage bounds the step of 120 ms"],
        ["nothing in [pipeline]", "more rows in DRAM than tables.dram_rows = 100000"],
        ["would save at most 70 of the 120 ms of dbp N=1"],
    ),
    "micro-batches that cost more than they hide": (
        [
            run("nested", 8, compute=150, embed=4),
            run("serial", 8, compute=145, embed=12),
            run("serial", 1, compute=100, embed=10),
            alone("compute", 145, 8),
            alone("wire", 9, 8),
        ],
        {"storage_ms": 1.0},
        ["no schedule with N=8 goes below 145"],
        ['pipeline.schedule = "serial", pipeline.micro_batches = 1: 110 ms instead of 154'],
        ["1.40x", "at most 50 of the 110 ms of serial N=1"],
    ),
    "more noise than gain": (
        [
            run("serial", 1, (0.7, 1.0, 1.4, 1.0), compute=100, embed=20),
            run("nested", 4, (1.2, 1.0, 0.8, 0.9), compute=105, embed=5),
            alone("compute", 90),
            alone("wire", 20),
        ],
        ON_A_LINK,
        ["nothing alone bounds the step"],
        [
            "perhaps nested N=4: 104 ms instead of 120, but faster in 3 of 4 rounds, too few to tell",
            "computing",
            "a link",
        ],
        ["--seconds"],
    ),
    "one round": (
        [
            run("serial", 1, (1.0,), compute=100, embed=50),
            run("nested", 4, (1.0,), compute=105, embed=5),
            alone("compute", 100, rounds=(1.0,)),
            alone("wire", 50, rounds=(1.0,)),
        ],
        ON_A_LINK,
        ["nothing alone bounds the step"],
        ["perhaps nested N=4: 110 ms instead of 150, but faster in 1 of 1 rounds", "computing", "a link"],
        ["--seconds"],
    ),
    "nothing alone bounds it, and nothing hides": (
        [
            run("serial", 1, compute=40, embed=30, load=20, update=10, retrieve=10),
            run("nested", 4, compute=60, embed=30, between=30),
            alone("compute", 40),
            alone("wire", 30),
        ],
        {"storage_ms": 10.0},
        ["nothing alone bounds the step of 110 ms", "nested N=4 hides 0.0 and leaves 30, mostly embed"],
        ["nothing in [pipeline]", "computing", "reading and routing", "twice the speed between workers"],
        ["2.75 times its limit"],
    ),
    "data that cannot keep up": (
        [
            run("nested", 4, compute=40, load=60),
            run("serial", 4, compute=40, load=90, embed=5),
            alone("compute", 40, 4),
            alone("wire", 5, 4),
        ],
        ON_A_LINK,
        ["lookup: serial N=4 exposes 90 ms a step; nested N=4 hides 30 and leaves 60, mostly load"],
        ["nothing in [pipeline]", "reading and routing data faster would save at most 60 of the 100 ms", "computing"],
        [],
    ),
}


@pytest.mark.parametrize("regime", REGIMES)
def test_each_regime_is_told_what_its_figures_say(regime: str) -> None:
    """Words of the outcome, and which changes in which order."""
    variants, others, said, starts, words = REGIMES[regime]
    outcome, changes = advice_for(variants, **others)
    told, texts = "\n".join(outcome), "\n".join(change.text for change in changes)
    assert all(word in told for word in said), told
    assert len(changes) >= len(starts), texts
    assert all(change.text.startswith(start) for change, start in zip(changes, starts)), texts
    assert all(word in texts for word in words), texts


@pytest.mark.parametrize("regime", REGIMES)
def test_what_holds_for_every_regime(regime: str) -> None:
    """The schedule comes first, upper bounds by what they save, never more than the step; at most four changes."""
    variants, others, *_ = REGIMES[regime]
    outcome, changes = advice_for(variants, **others)
    assert changes[0].kind in ("measured", "unsure", "none") and len(changes) <= 4
    assert all(change.kind == "at most" for change in changes[1:])
    saved = [change.saves_ms for change in changes[1:]]
    assert saved == sorted(saved, reverse=True)
    assert all(0 <= change.saves_ms < variants[0].step_ms for change in changes)
    for sentence in [*outcome, *(change.text for change in changes)]:
        assert not re.search(r"\bnan\b|\binf\b|-\d", sentence) and "\n" not in sentence, sentence


def test_what_is_recommended_can_be_set() -> None:
    """The settings of a measured change are keys and values of a recipe."""
    variants, others, *_ = REGIMES["a slow link, which nested hides"]
    change = advice_for(variants, **others)[1][0]
    assert change.settings == {"pipeline.schedule": "nested", "pipeline.micro_batches": 8}
    assert change.kind == "measured" and change.saves_ms == pytest.approx(80)


def test_of_equals_the_one_that_changes_least_is_recommended() -> None:
    """Where N=1 and N=8 are as fast, N stays."""
    variants = [SERIAL, run("nested", 8, compute=189), run("dbp", 1, compute=190), alone("compute", 150)]
    assert advice_for(variants, **ON_A_LINK)[1][0].settings == {"pipeline.schedule": "dbp"}


def test_rounds_are_compared_with_one_another() -> None:
    """A machine that gets twice as slow does not hide that one variant is a tenth faster in every round."""
    ratios = gains(run("serial", 1, (1, 1.5, 2, 2), compute=110), run("dbp", 1, (1, 1.5, 2, 2), compute=100))
    assert ratios == pytest.approx([1.1] * 4) and agree(ratios)


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
    assert agree([1.2] * faster + [0.9] * (rounds - faster)) == sure


def test_waiting_is_not_taken_for_the_wire() -> None:
    """All2All that is exposed for far longer than the wire needs is waiting for others, and a link would not help."""
    variants = [run("serial", 1, compute=50, embed=60), run("nested", 4, compute=60, embed=55), alone("compute", 50)]
    variants.append(alone("wire", 4))
    outcome, changes = advice_for(variants, **ON_A_LINK)
    assert "wire 4.0" in outcome[0] and not any("link" in change.text for change in changes)
