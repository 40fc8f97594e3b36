"""The end of a run: one dictionary for `summary.json`, and its metrics in one line."""

from __future__ import annotations

from typing import Any

from nestpipe.comm.consistency import gather_counts, sum_over_workers
from nestpipe.config.recipe import Recipe
from nestpipe.data.skipped import Skipped
from nestpipe.models.next_item import NextItemModel
from nestpipe.models.ranking import RankingModel
from nestpipe.pipeline import TrainPipeline
from nestpipe.schedule.timeline import compute_share
from nestpipe.train.digest import digest
from nestpipe.train.pace import Pace
from nestpipe.train.utilisation import utilisation


def summarise(
    recipe: Recipe, pipeline: TrainPipeline, pace: Pace, metrics: dict[str, float], skipped: Skipped, run: str
) -> dict[str, Any]:
    """The summary of a finished run, the same on every worker but for figures of its own.  All workers call it together."""
    world, stages = pipeline.world, pipeline.timeline.report()
    summary = {
        "recipe": recipe.name,
        "schedule": recipe.pipeline.schedule,
        "workers": world.size,
        "micro_batches": recipe.pipeline.micro_batches,
        "micro_batches_chosen": [list(choice) for choice in pipeline.micro_batch_choices],
        "steps": pace.steps,
        "samples": pace.samples,
        "seconds": pace.seconds(),
        "samples_per_s": pace.samples_per_s(),
        "loss": pace.mean_loss(),
        "metrics": metrics,
        "digest": digest(pipeline),
        "seed": recipe.train.seed,
        **({"inexact": pipeline.inexact} if pipeline.inexact else {}),
        **pipeline.figures(),
        "evicted": pipeline.total_evicted(),
        "ttl_horizons": [list(pair) for pair in pipeline.ttl_horizons() if pair[0] < pipeline.next_batch],
        "stages": stages,
        "step_ms": sum(stage["exposed_ms"] for stage in stages.values()),
        "run": run,
    }
    summary["compute_share"] = compute_share(stages)
    if "row_reads" in summary:
        reads = sum_over_workers(world, summary["row_reads"])
        summary["row_reads"] = {**reads, "stale_share": reads["one_batch_stale"] / max(1, reads["all"])}
    if isinstance(pipeline.model, NextItemModel | RankingModel):
        summary["flops"] = utilisation(
            pipeline.model, pace.steps_here, summary["step_ms"], world, recipe.train.peak_tflops
        )
    if parts := gather_counts(world, skipped.parts):
        summary["skipped"] = {"samples": sum(parts.values()), "parts": sorted(parts)}
    return summary


def staleness_in_words(row_reads: dict[str, Any]) -> str:
    """Of a schedule that is stale by design."""
    return f"{100 * row_reads['stale_share']:.1f} % of row reads were one batch stale"


def in_words(metrics: dict[str, float]) -> str:
    """Held-out metrics in one line."""
    if "auc" in metrics:
        text = f"held-out AUC {metrics['auc']:.4f}  NE {metrics['ne']:.4f}  log loss {metrics['log_loss']:.4f}"
        text += f"  calibration {metrics['calibration']:.3f}"
        if "bayes_auc" in metrics:
            text += f"  Bayes AUC {metrics['bayes_auc']:.4f}"
            if metrics["bayes_auc"] != 0.5:  # there is something to learn
                way = (metrics["auc"] - 0.5) / (metrics["bayes_auc"] - 0.5)
                text += f" ({way:.1%} of the way from 0.5)"
        return text
    if actions := [name.removeprefix("auc/") for name in metrics if name.startswith("auc/")]:
        return "  ".join(_action_in_words(metrics, action) for action in actions)
    if "loss" in metrics:
        return f"held-out loss {metrics['loss']:.4f}"
    return "  ".join(f"{k.upper()} {v:.4f}" for k, v in metrics.items() if k != "samples") or "no held-out samples"


def _action_in_words(metrics: dict[str, float], action: str) -> str:
    text = f"{action}: AUC {metrics[f'auc/{action}']:.4f}  GAUC {metrics[f'gauc/{action}']:.4f}"
    text += f"  log loss {metrics[f'log_loss/{action}']:.4f}"
    best = metrics.get(f"best_auc/{action}")
    return text if best is None else f"{text}  best AUC {best:.4f}"
