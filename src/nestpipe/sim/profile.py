"""A profile: what stages cost on some cluster, as a TOML file.  Fitted to published figures, or measured."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from nestpipe.config.build import build
from nestpipe.schedule.stages import STAGES

PROFILES = Path(__file__).parent / "profiles"


class ProfileError(ValueError):
    """The profile cannot be used; the message is one line and names the key to change."""


@dataclass(frozen=True)
class StageCost:
    """Of one stage and a batch of `Profile.samples`, in milliseconds.  Micro-batches share it by their samples."""

    host: float = 0.0
    """On the host's cores."""
    device: float = 0.0
    """On the accelerator, or waiting for a disk."""
    per_worker: float = 0.0
    """More, for every worker of the cluster: what is shared gets slower."""
    per_micro: float = 0.0
    """More on the host, for every micro-batch: calls."""
    device_per_micro: float = 0.0
    """More on the accelerator, for every micro-batch: kernels that begin and end."""


@dataclass(frozen=True)
class NetworkCost:
    """The link of one worker, and what a batch of `Profile.samples` puts on it."""

    mb_per_ms: float = 1.0
    rows_mb: float = 0.0
    """Rows of a batch, from all owners; their gradients are as large."""
    keys_mb: float = 0.0
    dense_mb: float = 0.0
    """Dense gradients."""
    share: float = 1.0
    """Of the line rate that reaches the rows: headers, and messages that do not fill it."""
    burst_mb: float = 0.0
    """What an idle link lets through at once: the bucket of a shaped link."""
    message_ms: float = 0.0
    """What an exchange takes however little it carries."""
    peer_ms: float = 0.0
    """More, for every worker that takes part."""
    congestion: float = 0.0
    """By this share a byte gets slower with every worker that takes part: links in the middle are shared."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """What stands at the top of a profile's file."""

    title: str
    samples: int
    """Of a worker's batch, for which the costs are."""
    workers: int = 2
    """Of the cluster that the profile describes."""
    micro_batches: int = 8
    groups: int = 4
    """Of 2D sparse parallelism: tables are divided within a group, and groups hold copies."""
    reference_workers: int = 128
    """With which scaling is compared."""
    buckets: int = 1
    buckets_final: list[float] = field(default_factory=list)
    """After which share of the last backward pass (or of `weight_grad`) each bucket of dense gradients is; empty: evenly."""
    defer_weight_grads: bool = False
    RENAMED: ClassVar[Mapping[str, str]] = {"late_weights": "defer_weight_grads"}
    machine_cores: float = 0.0
    """Of one machine that all workers share, as in a lab; 0: more than their lanes could use."""
    jitter: float = 0.0
    """Spread of compute from micro-batch to micro-batch and from worker to worker, as a share of it."""
    fitted: list[str] = field(default_factory=list)
    """Keys that were chosen to meet published figures.  All others are assumed or measured."""
    assumptions: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Profile(Head):
    network: NetworkCost
    stages: dict[str, StageCost]

    def __post_init__(self) -> None:
        for name in ("samples", "workers", "micro_batches", "groups", "reference_workers", "buckets"):
            if getattr(self, name) < 1:
                raise ProfileError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.buckets_final and len(self.buckets_final) != self.buckets:
            raise ProfileError(f"buckets_final must have a number for each of the {self.buckets} buckets, or none")
        if any(not 0 <= share <= 1 for share in self.buckets_final):
            raise ProfileError("buckets_final must be shares from 0 to 1")
        if not 0 < self.network.share <= 1:
            raise ProfileError(f"network.share must be above 0 and at most 1, not {self.network.share}")
        if self.network.mb_per_ms <= 0:
            raise ProfileError(f"network.mb_per_ms must be above 0, not {self.network.mb_per_ms}")
        checked = [("network.", vars(self.network)), ("", {"machine_cores": self.machine_cores, "jitter": self.jitter})]
        checked += [(f"stages.{stage}.", vars(cost)) for stage, cost in self.stages.items()]
        for place, values in checked:
            for key, value in values.items():
                if not 0 <= value < float("inf"):
                    raise ProfileError(f"{place}{key} must be at least 0, not {value}")


def profiles() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def load_profile(name: str) -> Profile:
    """A shipped profile by its name, or a file."""
    path = Path(name) if name.endswith(".toml") else PROFILES / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", ".join(profiles())
        raise ProfileError(f"no profile {name!r}: give one of {there}, or a file that ends in .toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProfileError(f"cannot read profile '{path}': {error}") from None
    return read_profile(values, str(path))


def read_profile(values: dict[str, Any], where: str) -> Profile:
    given = dict(values)
    stages = given.pop("stages", {})
    if not isinstance(stages, dict):
        raise ProfileError(f"{where}: stages must be tables, one for each stage")
    for stage in stages:
        if stage not in STAGES:
            raise ProfileError(f"{where}: stages.{stage}: there is no such stage; there are {', '.join(STAGES)}")
    try:
        costs = {stage: build(StageCost, cost, f"stages.{stage}") for stage, cost in stages.items()}
        network = build(NetworkCost, given.pop("network", {}), "network")
        head = build(Head, given, "profile")
        return Profile(network=network, stages=costs, **vars(head))
    except ValueError as error:
        raise ProfileError(f"{where}: {error}") from None
