"""Model FLOPs utilisation (MFU): the share of a machine's peak that a run's FLOPs are, in both conventions of `models.flops`."""

from __future__ import annotations

from typing import Any

import torch

from nestpipe.comm.exchange import Exchange
from nestpipe.comm.world import World
from nestpipe.models.flops import measured_peak
from nestpipe.models.next_item import NextItemModel
from nestpipe.models.ranking import RankingModel

PADDED_ABOVE_PEAK = "The padded convention counts padding and masked pairs, which are not computed: it can pass 100 %"


def utilisation(
    model: NextItemModel | RankingModel, steps: int, step_ms: float, world: World, peak_tflops: float | None
) -> dict[str, Any]:
    """FLOPs of a mean step over all workers, and the share of all workers' peak.  All workers call it together."""
    peak = measured_peak(next(model.parameters()).device) if peak_tflops is None else peak_tflops * 1e12
    cost = model.cost()
    sums = torch.tensor([cost.jagged(model.trained), cost.padded(model.trained), peak], dtype=torch.float64)
    Exchange(world, "metrics").all_reduce(sums)
    jagged, padded, all_peaks = (sums / torch.tensor([max(1, steps), max(1, steps), 1])).tolist()
    found = {
        "jagged": jagged,
        "padded": padded,
        "peak": all_peaks,
        "peak_is": "measured" if peak_tflops is None else "given",
    }
    if all_peaks and step_ms:
        seconds = step_ms / 1e3
        found |= {"mfu_jagged": jagged / seconds / all_peaks, "mfu_padded": padded / seconds / all_peaks}
    return found


def utilisation_in_words(found: dict[str, Any]) -> list[str]:
    """For the terminal: a line, and a second one where a figure needs a word."""
    if "mfu_jagged" not in found:
        return [
            f"{found['jagged'] / 1e9:,.3g} GFLOPs a step; set train.peak_tflops to know the share of the device's peak"
        ]
    line = (
        f"{found['jagged'] / 1e9:,.3g} GFLOPs a step: {found['mfu_jagged']:.1%} MFU of {found['peak'] / 1e9:,.0f} GFLOP/s "
        f"({found['peak_is']}); {found['mfu_padded']:.1%} padded and without causal discount"
    )
    return [line, PADDED_ABOVE_PEAK] if found["mfu_padded"] > 1 else [line]
