"""What a schedule has to know about a model: read off the model itself, before it has tables."""

from __future__ import annotations

from torch import nn

from nestpipe.config.pipeline import PipelineConfig
from nestpipe.dense.replica import DenseReplica
from nestpipe.dense.weight_grads import DeferredWeightGrads
from nestpipe.nn.collections import collections_in
from nestpipe.schedule.options import Workload


def deferred_of(model: nn.Module, config: PipelineConfig) -> DeferredWeightGrads | None:
    """The deferred weight gradients of a model; None where it has no such layers or the config wants none."""
    deferred = DeferredWeightGrads(model) if config.defer_weight_grads else None
    return deferred if deferred is not None and deferred.layers else None


def workload_of(
    model: nn.Module,
    dense: DenseReplica,
    deferred: DeferredWeightGrads | None,
    *,
    clips: bool,
    on_disk: bool,
    replicates: bool = False,
    averages: bool = False,
) -> Workload:
    """`clips`: gradients are clipped by their norm; `on_disk`: tables have a disk tier; `replicates`, `averages`: several
    groups of workers hold all rows each, and stay equal or are averaged now and then."""
    tables = [table for collection in collections_in(model) for table in collection.tables]
    return Workload(
        buckets=max(1, len(dense.buckets)),
        clips=clips,
        has_deferred_layers=deferred is not None,
        host_computes=host_computes(model),
        on_disk=on_disk,
        evicts=any(table.eviction is not None and table.eviction.sweeps for table in tables),
        replicates=replicates,
        averages=averages,
    )


def host_computes(model: nn.Module) -> bool:
    """Whether the host's own cores compute the dense part.  A stand-in for an accelerator says `off_host`."""
    on_host = all(parameter.is_cpu for parameter in model.parameters())
    return on_host and not getattr(model, "off_host", False)
