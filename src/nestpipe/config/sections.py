"""The sections of a recipe that every run has, and the list of all keys for `nestpipe train --help-recipe`.

The string under a field is its help.  A section checks itself when it is made; the message names the key to change.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nestpipe.config.rates import Decay, RateSchedule
from nestpipe.pipeline.micro_plan import check_micro_batches
from nestpipe.tables.eviction.policy import EvictionPolicy


def _at_least(key: str, value: float | None, low: float) -> None:
    if value is not None and not value >= low:  # not `value < low`, which lets nan through
        raise ValueError(f"{key} must be at least {low}, not {value}")


def _above_zero(key: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{key} must be above 0 and finite, not {value}")


def _check_optimizer(name: str, section: TablesSection | DenseSection) -> None:
    _above_zero(f"{name}.lr", section.lr)
    _above_zero(f"{name}.eps", section.eps)
    if not all(0 <= beta < 1 for beta in section.betas):
        raise ValueError(f"{name}.betas must be from 0 to below 1, not {list(section.betas)}")
    try:
        section.rates()
    except ValueError as error:
        raise ValueError(f"{name}.{error}") from error


@dataclass(frozen=True)
class TablesSection:
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
        _check_optimizer("tables", self)
        _at_least("tables.init_scale", self.init_scale, 0)
        _at_least("tables.dram_rows", self.dram_rows, 1)
        if (self.disk_path is None) != (self.dram_rows is None):
            given, other = ("disk_path", "dram_rows") if self.dram_rows is None else ("dram_rows", "disk_path")
            raise ValueError(f"tables.{given} needs tables.{other} beside it")
        for table, file in self.initial.items():
            if not file.endswith((".parquet", ".npz", ".npy")):
                raise ValueError(f"tables.initial.{table} must be a file .parquet, .npz or .npy, not {file!r}")
        try:
            self.life()
        except ValueError as error:
            raise ValueError(f"tables.{error}") from error

    def life(self) -> EvictionPolicy | None:
        """None where every key has a row from its first batch on, for ever."""
        horizons = None if self.ttl_horizons is None else tuple((*pair,) for pair in self.ttl_horizons)
        life = EvictionPolicy(
            self.admit_after,
            self.ttl_steps,
            self.ttl_minutes,
            self.max_rows,
            self.sweep_every,
            horizons,  # type: ignore[arg-type]
        )
        return life if life.sweeps or life.admit_after > 1 else None

    def rates(self) -> RateSchedule:
        return RateSchedule(self.warmup_steps, self.decay, self.decay_steps, self.decay_to)


@dataclass(frozen=True)
class DenseSection:
    """How the model's ordinary parameters learn."""

    optimizer: Literal["sgd", "adam", "adamw", "adagrad"] = "adam"
    """Dense optimizer, from torch.optim."""
    lr: float = 1e-3
    """Learning rate of the dense parameters."""
    betas: tuple[float, float] = (0.9, 0.999)
    """The two averages of adam and adamw; other optimizers do not look at it."""
    eps: float | None = None
    """Added to the denominator; none = the optimizer's own."""
    weight_decay: float = 0.0
    """Weight decay; decoupled for adamw."""
    momentum: float = 0.0
    """Momentum of sgd."""
    warmup_steps: int = 0
    """Steps until the learning rate is reached."""
    decay: Decay = "none"
    """How the learning rate falls after warm-up."""
    decay_steps: int = 0
    """Steps from warm-up to `decay_to`; for inverse_sqrt the time scale."""
    decay_to: float = 0.0
    """Share of the learning rate at which decay ends."""
    dtype: Literal["float32", "float64"] = "float32"
    """Number format of the dense parameters."""

    def __post_init__(self) -> None:
        _check_optimizer("dense", self)
        _at_least("dense.weight_decay", self.weight_decay, 0)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"dense.momentum must be from 0 to below 1, not {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"dense.momentum needs dense.optimizer = 'sgd', not '{self.optimizer}'")

    def rates(self) -> RateSchedule:
        return RateSchedule(self.warmup_steps, self.decay, self.decay_steps, self.decay_to)


@dataclass(frozen=True)
class PipelineSection:
    """In which order a step's work is done; the result is the same for all."""

    schedule: str = "serial"
    """Name of the schedule: serial, dbp, fwp or nested."""
    micro_batches: int | Literal["auto"] | list[list[int]] = 1
    """Micro-batches in a batch; rounding depends on it, clustering and defer_weight_grads, on nothing else here.  "auto" tries
    and takes the fastest; [[0, 4], [60, 8]] is 4 from batch 0 on and 8 from batch 60 on, as a run with "auto" has chosen."""
    clustering: bool | None = None
    """Put samples that share keys into the same micro-batch; none = if memory.window_limit may ask for dedup per micro-batch."""
    look_ahead: int = 2
    """How many micro-batches rows travel ahead of compute, in fwp and nested."""
    early_prepare: bool | None = None
    """Prepare later batches from the end of a batch's compute on, in dbp and nested; false: from the next batch's first rows on;
    none = where the host itself computes, as it has least to do then."""
    early_retrieve: bool | None = None
    """Retrieve rows while those of the batch before last are still being written back, in dbp and nested: three row buffers
    instead of two; none = where tables.disk_path is given."""
    early_reduce: bool = True
    """Sum dense gradients over the workers while the last backward pass still runs; false for re-entrant checkpointing."""
    early_update: bool = True
    """Update rows as soon as their gradients are complete, before all workers have agreed on the batch (not with clip_norm)."""
    defer_weight_grads: bool = True
    """Make weight gradients of the model's linear layers when all backward passes of a batch are over, while rows travel; keeps
    these layers' inputs and output gradients of a whole batch in memory until then: false where that is too much."""

    def __post_init__(self) -> None:
        check_micro_batches(self.micro_batches)
        _at_least("pipeline.look_ahead", self.look_ahead, 0)


@dataclass(frozen=True)
class MemorySection:
    """What a worker may hold beside its tables."""

    buffer_limit: float | None = None
    """Most MB of row buffers of a worker, for the two batches in flight, or three with early_retrieve; none = as they need."""
    window_limit: float | None = None
    """MB of rows and gradients of the two windows in flight from which on a batch is deduplicated per micro-batch: only
    look_ahead + 1 micro-batches are held then, more rows travel, and sums round differently; none = never."""

    def __post_init__(self) -> None:
        _above_zero("memory.buffer_limit", self.buffer_limit)
        _above_zero("memory.window_limit", self.window_limit)


@dataclass(frozen=True)
class TrainSection:
    """How long and on what to train.  Ends at `steps` or `epochs`, whichever comes first; one epoch if neither is given."""

    batch_size: int = 1024
    """Samples in a batch of one worker."""
    steps: int | None = None
    """Most steps to train; none = as many as the epochs have."""
    epochs: int | None = None
    """Most times through the data; none = as many as `steps` need, or 1."""
    seed: int = 1
    """Seed of everything that is drawn."""
    log_every: int = 50
    """Steps between lines of metrics.jsonl."""
    clip_norm: float | None = None
    """Largest norm of all gradients together, dense and tables; none = as they are."""
    timeout: float = 300.0
    """Seconds that a worker waits for the others before it gives up."""
    threads: int = 1
    """Torch threads of one worker."""
    workers: int = 1
    """Worker processes on this machine; torchrun sets its own."""

    def __post_init__(self) -> None:
        for key in ("batch_size", "steps", "epochs", "log_every", "threads", "workers"):
            _at_least(f"train.{key}", getattr(self, key), 1)
        _at_least("train.seed", self.seed, 0)
        _above_zero("train.clip_norm", self.clip_norm)
        _above_zero("train.timeout", self.timeout)


@dataclass(frozen=True)
class EvalSection:
    """When and how to evaluate on held-out samples."""

    every: int | None = None
    """Steps between evaluations; none = only at the end."""
    batch_size: int = 2048
    """Samples in an evaluation batch of one worker."""
    max_samples: int | None = None
    """Most samples to evaluate on, over all workers; none = all there are."""
    top_k: tuple[int, ...] = (10, 50, 200)
    """Lengths at which hit rate and NDCG are cut."""

    def __post_init__(self) -> None:
        for key in ("every", "batch_size", "max_samples"):
            _at_least(f"eval.{key}", getattr(self, key), 1)
        if not self.top_k or min(self.top_k) < 1 or len(set(self.top_k)) < len(self.top_k):
            raise ValueError(f"eval.top_k must be different whole numbers from 1 up, not {list(self.top_k)}")


@dataclass(frozen=True)
class CheckpointSection:
    """When to write checkpoints, and how many to keep: none unless `every_steps`, `every_minutes` or `best` is set."""

    every_steps: int | None = None
    """Steps between checkpoints; none = not by steps."""
    every_minutes: float | None = None
    """Minutes between checkpoints; none = not by time."""
    keep: int = 3
    """Checkpoints that are kept, beside what they stand on and the best."""
    full_every: int = 10
    """Every so many checkpoints one has all rows; the others have those that changed since the one before, and stand on it."""
    best: str | None = None
    """Held-out metric, such as auc: a checkpoint is written when an evaluation finds the best so far, and that one is kept."""
    path: str | None = None
    """Directory that all workers share; none = checkpoints/ in the run directory."""
    stop_seconds: float = 60.0
    """After SIGTERM: what a run has to finish its batch and to write a checkpoint, before it is ended."""

    def __post_init__(self) -> None:
        for key in ("every_steps", "keep", "full_every"):
            _at_least(f"checkpoint.{key}", getattr(self, key), 1)
        _above_zero("checkpoint.every_minutes", self.every_minutes)
        _above_zero("checkpoint.stop_seconds", self.stop_seconds)
        for key in ("best", "path"):
            if getattr(self, key) == "":
                raise ValueError(f"checkpoint.{key} is empty: give it a name or leave it out")

    @property
    def on(self) -> bool:
        return bool(self.every_steps or self.every_minutes or self.best)


SECTIONS: dict[str, type] = {
    "tables": TablesSection,
    "dense": DenseSection,
    "pipeline": PipelineSection,
    "memory": MemorySection,
    "train": TrainSection,
    "eval": EvalSection,
    "checkpoint": CheckpointSection,
}


@dataclass(frozen=True)
class RecipeKey:
    """One key of a recipe, in words."""

    key: str
    type: str
    default: str
    help: str
    kind: str | None = None
    """The kind of data or model that has this key; None for a key of every recipe."""


def describe(data_kinds: Mapping[str, type] = {}, model_kinds: Mapping[str, type] = {}) -> list[RecipeKey]:
    """All recipe keys with type, default and help, in the order in which a recipe is written."""
    keys = [RecipeKey("name", wording(str), "the file's name", "Name of the run.")]
    for section, kinds in (("data", data_kinds), ("model", model_kinds)):
        choice = f"one of {', '.join(map(show, kinds))}" if kinds else wording(str)
        keys.append(RecipeKey(f"{section}.kind", choice, "required", f"Which kind of {section}."))
        for kind, cls in kinds.items():
            keys += _keys_of(cls, section, kind)
    for section, cls in SECTIONS.items():
        keys += _keys_of(cls, section, None)
    return keys


def _keys_of(cls: type, where: str, kind: str | None) -> list[RecipeKey]:
    hints, helps, keys = get_type_hints(cls), field_help(cls), []
    for one in fields(cls):
        if not one.init:
            continue
        hint = hints[one.name]
        if one.default_factory is not MISSING:
            default = show(one.default_factory())
        else:
            default = "required" if one.default is MISSING else show(one.default)
        inner = [h for h in (hint, *get_args(hint)) if is_dataclass(h) and isinstance(h, type)]
        if inner:
            keys += _keys_of(inner[0], f"{where}.{one.name}", kind)
        else:
            keys.append(RecipeKey(f"{where}.{one.name}", wording(hint), default, helps.get(one.name, ""), kind))
    return keys


def field_help(cls: type) -> dict[str, str]:
    """The string literal under each field of a class, bases included; nothing for a class without source."""
    helps: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for item, below in pairwise(body):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(below, ast.Expr):
                text = below.value.value if isinstance(below.value, ast.Constant) else None
                if isinstance(text, str):
                    helps[item.target.id] = " ".join(text.split())
    return helps


def show(value: Any) -> str:
    """A value as a reader of TOML knows it, on one line and not too long."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def wording(hint: Any) -> str:
    """What a field of this type must be: "a whole number", "a list of numbers", "one of 'a', 'b'"."""
    singular = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", NoneType: "none"}
    plural = {int: "whole numbers", float: "numbers", str: "strings"}
    origin, args = get_origin(hint), get_args(hint)
    if hint in singular:
        return singular[hint]
    if is_dataclass(hint):
        return "a table"
    if origin in (Union, UnionType):
        return " or ".join(wording(arg) for arg in args)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(show(arg) for arg in args)
    if origin in (list, Sequence, tuple):
        count = f"{len(args)} " if origin is tuple and args[-1] is not ... else ""
        return f"a list of {count}{plural[args[0]]}" if args[0] in plural else f"a list ({wording(args[0])} each)"
    if origin in (dict, Mapping):
        return f"a table ({wording(args[1])} each)"
    raise TypeError(f"a recipe field cannot have the type {hint}")
