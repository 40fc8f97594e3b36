"""Metrics of the samples of all workers together, exact: the number of workers and the split of samples do not matter.

Means of per-worker AUCs are not the AUC, so click scores are brought together before anything is computed; ranks need
only sums.  Every worker of the group has to call `compute`, with or without samples, and every worker gets the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

NAN = float("nan")


def _workers(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def are_scores(outputs: object, labels: Tensor | None) -> bool:
    """Whether a model's outputs are taken as click predictions: one number for each label."""
    return isinstance(outputs, Tensor) and labels is not None and outputs.shape == labels.shape


class ClickMetrics:
    """AUC, normalised entropy, log loss and calibration of predicted clicks, from all scores of all workers.

    `logits` says whether `update` is given logits or probabilities; it is not guessed from the values.  Scores are kept
    in float64 (16 bytes a sample with the label) where they were made, so that nobody waits for a device before `compute`.
    That takes place on `device`, which must be one that the process group can send from.
    """

    def __init__(self, logits: bool = True, device: torch.device | str = "cpu") -> None:
        self.logits = logits
        self.device = torch.device(device)
        self.reset()

    def reset(self) -> None:
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, scores: Tensor, labels: Tensor) -> None:
        """Add samples: one score and one label, 0 or 1, for each."""
        if scores.shape != labels.shape:
            raise ValueError(f"scores and labels differ in shape: {tuple(scores.shape)} and {tuple(labels.shape)}")
        # Checked here and not in `compute`: there, an error on one worker would leave the others waiting.
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise ValueError(
                "labels must be 0 or 1: outputs of the labels' shape are taken as predictions of clicks; a model that "
                "predicts something else returns something else, such as a dict, and is evaluated by its loss"
            )
        if not self.logits and bool(((scores < 0) | (scores > 1)).any()):
            raise ValueError("probabilities must be from 0 to 1; for logits make ClickMetrics(logits=True)")
        # A copy, as the caller may reuse its tensors for the next batch.
        self._scores.append(scores.detach().flatten().to(torch.float64, copy=True))
        self._labels.append(labels.detach().flatten().to(self.device, torch.float64, copy=True))

    def compute(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """The metrics over the union of all workers' samples, the same on every worker.

        `auc` and `ne` (log loss / entropy of the base rate) are nan when all labels are alike, `calibration` (predicted
        clicks / clicks) when there are no clicks.  Without samples, or with a nan score, all but `samples` are nan.
        """
        empty = torch.empty(0, dtype=torch.float64, device=self.device)
        scores = torch.cat(self._scores).to(self.device) if self._scores else empty
        mine = torch.stack([scores, torch.cat([empty, *self._labels])])
        if _workers(group) == 1:
            return self._evaluate(mine)

        # The union goes to one worker only: a thousand workers with a copy each would be a waste of memory and sorting.
        everything = _gather_columns(mine, group)
        names = ["auc", "ne", "log_loss", "calibration", "samples"]
        result = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        if everything is not None:
            metrics = self._evaluate(everything)
            result.copy_(torch.tensor([metrics[name] for name in names], dtype=torch.float64))
        dist.broadcast(result, group=group, group_src=0)
        return {**dict(zip(names, result.tolist())), "samples": int(result[-1])}

    def _evaluate(self, samples: Tensor) -> dict[str, float]:
        scores, labels = samples
        count, clicks = len(labels), float(labels.sum())
        if count == 0 or bool(scores.isnan().any()):
            return {"auc": NAN, "ne": NAN, "log_loss": NAN, "calibration": NAN, "samples": count}
        if self.logits:
            # logsigmoid is right for infinite logits, where torch's BCE has inf - inf, and exact for large ones, where
            # softplus turns linear at 20.
            losses = -F.logsigmoid(torch.where(labels > 0, scores, -scores))
        else:
            losses = F.binary_cross_entropy(scores, labels, reduction="none")  # a sure and wrong 0 or 1 costs 100
        log_loss = float(losses.mean())
        predicted = float((scores.sigmoid() if self.logits else scores).sum())
        entropy = _entropy(clicks / count)
        return {
            "auc": _auc(scores, labels) if entropy else NAN,
            "ne": log_loss / entropy if entropy else NAN,
            "log_loss": log_loss,
            "calibration": predicted / clicks if clicks else NAN,
            "samples": count,
        }


class GroupedAuc:
    """GAUC: the mean of every group's own AUC, weighed by its samples; groups whose labels are all alike do not count.

    No group may be split over batches or workers.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64)

    def update(self, scores: Tensor, labels: Tensor, counts: Tensor) -> None:
        """Add samples, group after group, counts[g] of each."""
        sizes = counts.tolist()
        for mine, wanted in zip(scores.detach().cpu().double().split(sizes), labels.cpu().double().split(sizes)):
            if wanted.numel() and 0 < float(wanted.sum()) < wanted.numel():
                found = NAN if bool(mine.isnan().any()) else _pairs_in_order(mine, wanted)
                self._sums += torch.tensor([found * wanted.numel(), wanted.numel()], dtype=torch.float64)

    def compute(self, group: dist.ProcessGroup | None = None) -> float:
        """Over all workers' groups, the same on every worker; nan without any that counts."""
        sums = self._sums.clone()
        if _workers(group) > 1:
            dist.all_reduce(sums, group=group)
        return float(sums[0] / sums[1]) if sums[1] else NAN


def _pairs_in_order(scores: Tensor, labels: Tensor) -> float:
    """The AUC of a few samples."""
    above, below = scores[labels > 0, None], scores[None, labels == 0]
    return float(((above > below).double() + 0.5 * (above == below).double()).mean())


def _auc(scores: Tensor, labels: Tensor) -> float:
    """The share of (click, no click) pairs in which the click scores higher, ties counting half.

    torchmetrics puts logits through a sigmoid, where large ones become equal.  AUC depends on the order alone, so it
    gets the place of each score among the distinct scores instead.
    """
    levels = torch.unique(scores, return_inverse=True)[1].double()
    return float(binary_auroc(levels / levels.max().clamp(min=1), labels.long(), validate_args=False))


def _entropy(rate: float) -> float:
    return 0.0 if rate in (0.0, 1.0) else -rate * math.log(rate) - (1 - rate) * math.log1p(-rate)


def _gather_columns(mine: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
    """The columns of all workers side by side, on the group's first worker; None on the others."""
    workers, first = _workers(group), dist.get_rank(group) == 0
    count = torch.tensor([mine.shape[1]], device=mine.device)
    counts = [torch.zeros_like(count) for _ in range(workers)]
    dist.all_gather(counts, count, group=group)
    widths = [int(c) for c in counts]
    if max(widths) == 0:
        return mine if first else None
    # gather wants equal sizes.
    padded = F.pad(mine, (0, max(widths) - mine.shape[1]))
    parts = [torch.empty_like(padded) for _ in range(workers)] if first else None
    dist.gather(padded, parts, group=group, group_dst=0)
    return torch.cat([part[:, :width] for part, width in zip(parts, widths)], dim=1) if parts else None


class RankMetrics:
    """Hit rate, NDCG and reciprocal rank of the one target of each sample, from sums over all workers in float64."""

    def __init__(self, top_k: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.top_k = tuple(top_k)
        self.device = torch.device(device)
        self.reset()

    def reset(self) -> None:
        self._sums = torch.zeros(2 + 2 * len(self.top_k), dtype=torch.float64, device=self.device)

    def update(self, ranks: Tensor) -> None:
        """Add samples by the 0-based place of their target in the whole catalogue."""
        places = ranks.detach().flatten().to(self.device, torch.float64)
        gains = 1 / torch.log2(places + 2)
        terms = [torch.ones_like(places), 1 / (places + 1)]
        for k in self.top_k:
            hit = (places < k).double()
            terms += [hit, hit * gains]
        self._sums += torch.stack(terms).sum(dim=1)

    def compute(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """`hr@k` and `ndcg@k` for every k, `mrr` and `samples`, the same on every worker; nan without samples."""
        sums = self._sums.clone()
        if _workers(group) > 1:
            dist.all_reduce(sums, group=group)
        samples, reciprocal, *at_k = sums.tolist()
        metrics: dict[str, float] = {}
        for k, hits, gains in zip(self.top_k, at_k[0::2], at_k[1::2]):
            metrics[f"hr@{k}"] = hits / samples if samples else NAN
            metrics[f"ndcg@{k}"] = gains / samples if samples else NAN
        return {**metrics, "mrr": reciprocal / samples if samples else NAN, "samples": int(samples)}


def target_ranks(scores: Tensor, target_index: Tensor, exclude: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The 0-based place of each row's target among the row's scores, ties against the target.

    `scores` is [rows, catalogue], `target_index` [rows].  All items that score as high as the target count as before
    it: if every item has the same score, the target is last, not first.  nan counts as a tie, whoever has it.
    `exclude` = (item indices, offsets [rows + 1]) lists the items already seen in each row; they do not count, however
    often they are listed, and the target itself is never excluded.
    """
    rows, catalogue = scores.shape
    indices = [target_index] if exclude is None else [target_index, exclude[0]]
    # A negative index would quietly mean an item from the end.
    if any(bool(((index < 0) | (index >= catalogue)).any()) for index in indices):
        raise ValueError(f"targets and excluded items must be indices into the catalogue, 0 to {catalogue - 1}")
    row = torch.arange(rows, device=scores.device)
    before = ~(scores < scores[row, target_index].unsqueeze(1))  # not >=, which is false for nan
    if exclude is not None:
        seen, offsets = exclude
        before[torch.repeat_interleave(row, offsets.diff()), seen] = False
    before[row, target_index] = False
    return before.sum(dim=1)
