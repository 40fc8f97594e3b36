"""Keys of [data] that every kind of sequence data has: how the load of workers is balanced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from nestpipe.data.checks import check_text, check_whole

Balance = Literal["none", "tokens", "cost"]


@dataclass(frozen=True, kw_only=True)
class BalanceKeys:
    """To be inherited by the dataclass of a kind of data whose sources are indexed (`IndexedSource`).

    A `__post_init__` of its own calls `check_balance`, with what stands against balance where something does.
    """

    balance: Balance = "none"
    """How uneven histories are balanced over workers and micro-batches.  none: every worker has train.batch_size of them.
    tokens: every worker fills its batches to token_budget.  cost: every global batch has the same histories as with none, dealt
    to workers by what they cost."""
    token_budget: int | None = None
    """For balance = "tokens": most tokens in a batch of one data stream.  None: train.batch_size times the mean length."""
    balance_every: int = 50
    """For balance = "cost": steps between two fits of the cost of a history to what steps took."""
    balance_costs: str | None = None
    """For balance = "cost": balance.json of an earlier run.  Its costs are used as they were, so that its digest can be made
    again, and none is fitted."""

    def __post_init__(self) -> None:
        self.check_balance()

    def check_balance(self, against: str | None = None) -> None:
        """ValueError if the keys do not fit together; `against`: why this data cannot be balanced, and what to change."""
        if self.balance not in get_args(Balance):
            raise ValueError(f"data.balance must be one of {', '.join(get_args(Balance))}, not {self.balance!r}")
        if self.balance != "none" and against is not None:
            raise ValueError(f"data.balance = {self.balance!r} {against}")
        if self.token_budget is not None:
            check_whole("token_budget", self.token_budget)
            if self.balance != "tokens":
                raise ValueError("data.token_budget goes with data.balance = 'tokens': set both, or leave it out")
        check_whole("balance_every", self.balance_every)
        if self.balance_costs is not None:
            check_text("balance_costs", self.balance_costs, "runs/first/balance.json")
            if self.balance != "cost":
                raise ValueError("data.balance_costs goes with data.balance = 'cost': set both, or leave it out")
