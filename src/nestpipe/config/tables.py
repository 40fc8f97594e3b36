"""`[tables]`: how embedding rows start, learn, and live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nestpipe.config.checks import at_least
from nestpipe.config.eviction import EvictionPolicy
from nestpipe.config.rates import Decay, RateSchedule, check_rates


@dataclass(frozen=True)
class TablesConfig:
    """How embedding rows begin and learn."""

    optimizer: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = "rowwise_adagrad"
    """Sparse optimizer; one step for every row that a batch touches."""
    lr: float = 0.05
    """Learning rate of the rows."""
    eps: float | None = None
    """Added to the denominator; none = the optimizer's own."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's two averages; other optimizers do not look at it."""
    dtype: Literal["float32", "float64"] = "float32"
    """Number format of rows and their optimizer state."""
    init: Literal["uniform", "normal"] = "uniform"
    """Distribution of a new row, drawn from seed, table and key alone."""
    init_scale: float = 0.01
    """Half width of `uniform`, standard deviation of `normal`."""
    disk_path: str | None = None
    """Directory on a local disk for rows that do not fit in DRAM; none = all rows in DRAM."""
    dram_rows: int | None = None
    """With disk_path: rows that stay in DRAM, of each table group on each worker."""
    admit_after: int = 1
    """Batches that a key must occur in before it gets a row; the last of these trains it.  Before, it reads its first value."""
    ttl_steps: int | None = None
    """Evict keys that none of the last so many batches has touched; none = they stay."""
    ttl_minutes: float | None = None
    """Evict keys that no batch of the last so many minutes has touched, by the clock of worker 0; none = they stay."""
    ttl_horizons: list[list[int]] | None = None
    """What ttl_minutes came to in another run, as its summary has it, in place of a clock: makes that run's digest again."""
    max_rows: int | None = None
    """Most rows of a table on all workers together; those that were seen least are evicted; none = as many as there are keys."""
    sweep_every: int = 100
    """Batches between two sweeps, which is when keys are evicted."""
    initial: Mapping[str, str] = field(default_factory=dict)
    """Table to a file of keys and vectors, { item = "item.parquet" }, as `nestpipe checkpoint export` writes them: rows that are
    there before the first step, whether or not they are ever trained; all others begin as `init` says."""
    warmup_steps: int = 0
    """Steps until the learning rate is reached."""
    decay: Decay = "none"
    """How the learning rate falls after warm-up."""
    decay_steps: int = 0
    """Steps from warm-up to `decay_to`; for inverse_sqrt the time scale."""
    decay_to: float = 0.0
    """Share of the learning rate at which decay ends."""

    def __post_init__(self) -> None:
        check_rates("tables", self)
        at_least("tables.init_scale", self.init_scale, 0)
        at_least("tables.dram_rows", self.dram_rows, 1)
        if (self.disk_path is None) != (self.dram_rows is None):
            given, other = ("disk_path", "dram_rows") if self.dram_rows is None else ("dram_rows", "disk_path")
            raise ValueError(f"tables.{given} needs tables.{other} beside it")
        for table, file in self.initial.items():
            if not file.partition("?")[0].endswith((".parquet", ".npz", ".npy")):
                raise ValueError(f"tables.initial.{table} must be a file .parquet, .npz or .npy, not {file!r}")
        try:
            self.eviction()
        except ValueError as error:
            raise ValueError(f"tables.{error}") from error

    def eviction(self) -> EvictionPolicy | None:
        """None where every key has a row from its first batch on, for ever."""
        horizons = None if self.ttl_horizons is None else tuple((*pair,) for pair in self.ttl_horizons)
        policy = EvictionPolicy(
            self.admit_after,
            self.ttl_steps,
            self.ttl_minutes,
            self.max_rows,
            self.sweep_every,
            horizons,  # type: ignore[arg-type]
        )
        return policy if policy.sweeps or policy.admit_after > 1 else None

    def rates(self) -> RateSchedule:
        return RateSchedule(self.warmup_steps, self.decay, self.decay_steps, self.decay_to)
