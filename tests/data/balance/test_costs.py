"""Costs of histories: read from anything, and known to every worker from the same batch on."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.data.balance.costs import AHEAD, Cost, CostFrom, CostPlan, costs_from, read_costs
from nestpipe.data.source import DataError

GOOD = {"batch": 0, "a": 0.0, "b": 1.0, "c": 0.001}
BAD: list[Any] = [
    None, 3, [], "x", {}, [3], [[]], [{}], [{**GOOD, "d": 1}], [{**GOOD, "batch": 1}], [{**GOOD, "batch": -1}],
    [{**GOOD, "batch": True}], [{**GOOD, "batch": 0.0}], [GOOD, GOOD], [GOOD, {**GOOD, "batch": "2"}],
    [{**GOOD, "b": -1}], [{**GOOD, "b": "1"}], [{**GOOD, "b": None}], [{**GOOD, "b": float("nan")}],
    [{**GOOD, "b": float("inf")}], [{**GOOD, "b": 10**400}], [{**GOOD, "b": 0, "c": 0}], [{**GOOD, "error": "x"}],
    [{**GOOD, "source": 3}],
]  # fmt: skip


@pytest.mark.parametrize("found", BAD)
def test_bad_costs_are_refused_in_one_line(found: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        costs_from(found)
    file = tmp_path / "balance.json"
    file.write_text(json.dumps({"costs": found}))
    with pytest.raises(DataError, match=r"data.balance_costs: .*give the balance.json of a run") as refused:
        read_costs(str(file))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "[", "3", "[]", "[" * 100_000, "\x00", '{"cost": []}'])
def test_files_that_are_no_costs_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "balance.json").write_text(text)
    with pytest.raises(DataError, match=r"data.balance_costs"):
        read_costs(str(tmp_path / "balance.json"))
    with pytest.raises(DataError, match=r"data.balance_costs"):
        read_costs(str(tmp_path / "none.json"))


@given(st.lists(st.floats(0, 1e9), min_size=3, max_size=3).filter(any), st.lists(st.integers(1, 99), max_size=5))
def test_costs_come_back_as_they_were(values: list[float], gaps: list[int]) -> None:
    """To the bit: a digest that is made again depends on it."""
    batches = np.cumsum([0, *gaps]).tolist()
    entries = [CostFrom(batch, *values, "fit", 0.05) for batch in batches]
    assert costs_from(json.loads(json.dumps([entry.as_dict() for entry in entries]))) == entries
    plan = CostPlan(entries)
    assert not plan.fits and plan.at(10**9) == Cost(*values)


def test_a_cost_is_of_histories_or_of_their_sums() -> None:
    lengths = np.array([0, 1, 7, 8192])
    cost = Cost(3.0, 2.0, 0.5)
    assert cost.of(lengths).tolist() == [3.0, 5.5, 41.5, 3 + 2 * 8192 + 0.5 * 8192**2]
    sums = np.array([4.0, lengths.sum(), (lengths**2).sum()])
    assert cost.of_sums(sums) == cost.of(lengths).sum()


def test_no_batch_is_planned_before_its_fit_is_known() -> None:
    """A stream that reads ahead waits for the fit that its batch needs, and for no other; closing ends the wait."""
    plan = CostPlan([CostFrom(0, 0.0, 1.0, 0.0)], every=10)
    assert plan.at(10 + AHEAD - 1) == Cost(0, 1, 0)
    found: list[Cost | None] = []
    reader = threading.Thread(target=lambda: found.append(plan.at(10 + AHEAD)))
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    plan.tell(10, Cost(0, 5, 0), 0.1)
    reader.join(5)
    assert found == [Cost(0, 5, 0)] and plan.at(10 + AHEAD - 1) == Cost(0, 1, 0)
    plan.tell(20, None)
    assert plan.at(20 + AHEAD) == Cost(0, 5, 0) and len(plan.entries) == 2
    assert plan.at(30 + AHEAD, lambda: True) is None


def test_a_resumed_plan_knows_the_fits_before() -> None:
    """From step 25 on, with a fit every 10 steps: nobody waits for those after steps 10 and 20."""
    entries = [CostFrom(0, 0.0, 1.0, 0.0), CostFrom(10 + AHEAD, 0.0, 2.0, 0.0, "fit"), CostFrom(36, 0.0, 3.0, 0.0)]
    plan = CostPlan(entries, every=10, began=25)
    assert plan.at(25) == Cost(0, 1, 0) and plan.at(26) == Cost(0, 2, 0) and plan.at(36) == Cost(0, 3, 0)
    assert plan.at(30 + AHEAD, lambda: True) is None
