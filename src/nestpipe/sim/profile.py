"""A profile: what stages cost on a cluster, as a TOML file.  Fitted to published figures, or measured."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from nestpipe.config.build import build
from nestpipe.errors import NestPipeError
from nestpipe.schedule.stages import STAGES

PROFILES = Path(__file__).parent / "profiles"


class ProfileError(NestPipeError, ValueError):
    """The profile cannot be used; the message is one line and names the key to change."""

    exit_code = 2


@dataclass(frozen=True)
class StageCost:
    """Milliseconds of one stage for a batch of `Profile.samples`.  Micro-batches share it by their samples."""

    host: float = 0.0
    """On the host's cores."""
    device: float = 0.0
    """On the accelerator, or waiting for a disk."""
    per_worker: float = 0.0
    """Added for every worker of the cluster: shared resources get slower."""
    per_micro: float = 0.0
    """Added on the host for every micro-batch: calls."""
    device_per_micro: float = 0.0
    """Added on the accelerator for every micro-batch: kernel launches."""


@dataclass(frozen=True)
class NetworkCost:
    """The link of one worker, and what it carries for a batch of `Profile.samples`."""

    mb_per_ms: float = 1.0
    rows_mb: float = 0.0
    """Rows of a batch from all owners; their gradients have the same size."""
    keys_mb: float = 0.0
    sharing: float = 1.0
    """How distinct rows grow with workers: n of them touch n ** sharing times the rows of one.  1: no two share a row."""
    dense_mb: float = 0.0
    """Dense gradients."""
    share: float = 1.0
    """Share of the line rate that payload reaches: headers and short messages take the rest."""
    burst_mb: float = 0.0
    """What an idle link passes at once: the bucket of a shaped link."""
    message_ms: float = 0.0
    """Latency of an exchange, whatever its size."""
    peer_ms: float = 0.0
    """Added for every worker that takes part."""
    congestion: float = 0.0
    """Slows a byte by this share for every worker that takes part, as shared links in the middle do."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What stages cost on a cluster; the file has the same keys."""

    title: str
    samples: int
    """Samples of a worker's batch that the costs are for."""
    workers: int = 2
    """Workers of the cluster that the profile describes."""
    micro_batches: int = 8
    groups: int = 4
    """Replica groups of systems that have them: each divides the tables among its workers, and groups hold copies."""
    reference_workers: int = 128
    """Number of workers to compare scaling with."""
    buckets: int = 1
    buckets_final: list[float] = field(default_factory=list)
    """The share of the last backward pass (or of `weight_grad`) that completes each bucket; empty: evenly spread."""
    defer_weight_grads: bool = False
    RENAMED: ClassVar[Mapping[str, str]] = {"late_weights": "defer_weight_grads"}
    machine_cores: float = 0.0
    """Cores of one machine that all workers share, as in a lab; 0: more than their lanes can use."""
    jitter: float = 0.0
    """Spread of compute between micro-batches and workers, as a share of it."""
    fitted: list[str] = field(default_factory=list)
    """Keys that were fitted to published figures.  All others are assumed or measured."""
    assumptions: list[str] = field(default_factory=list)
    network: NetworkCost = NetworkCost()
    stages: dict[str, StageCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage in self.stages:
            if stage not in STAGES:
                raise ProfileError(f"stages.{stage}: there is no such stage; there are {', '.join(STAGES)}")
        for name in ("samples", "workers", "micro_batches", "groups", "reference_workers", "buckets"):
            if getattr(self, name) < 1:
                raise ProfileError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.buckets_final and len(self.buckets_final) != self.buckets:
            raise ProfileError(f"buckets_final must have a number for each of the {self.buckets} buckets, or be empty")
        if any(not 0 <= share <= 1 for share in self.buckets_final):
            raise ProfileError("buckets_final must be shares from 0 to 1")
        if not 0 < self.network.share <= 1:
            raise ProfileError(f"network.share must be above 0 and at most 1, not {self.network.share}")
        if not 0 <= self.network.sharing <= 1:
            raise ProfileError(f"network.sharing must be from 0 to 1, not {self.network.sharing}")
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
    """Reads a shipped profile by its name, or a file."""
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
    """Checks the values of a profile; `where` is the file that errors name."""
    try:
        return build(Profile, values, "profile")
    except ValueError as error:
        raise ProfileError(f"{where}: {error}") from None
