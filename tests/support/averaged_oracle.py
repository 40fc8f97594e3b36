"""M trainers that share nothing but the dense model, in plain torch, whose tables are averaged every k steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Steps = list[list[list[int]]]
"""Per step, per worker: the keys of its samples, one each."""
Tables = dict[str, dict[int, Tensor]]


def train(
    steps: Steps,
    groups: int,
    every: int,
    first: Tables,
    dense: nn.Linear,
    lr: float,
    dense_lr: float,
    scale: float,
    averaged_after: Sequence[int] = (),
) -> tuple[list[float], list[Tables], list[Tables]]:
    """Losses, and rows and sums of squares of every trainer.  `first`: all keys with the rows they begin with.

    `averaged_after`: numbers of steps after which tables are averaged as well.
    """
    rows: list[Tables] = [
        {t: {k: row.clone() for k, row in of.items()} for t, of in first.items()} for _ in range(groups)
    ]
    sums: list[Tables] = [{t: {k: torch.zeros((), dtype=row.dtype) for k, row in of.items()} for t, of in first.items()}
                          for _ in range(groups)]  # fmt: skip
    changed: set[int] = set()
    losses = []
    for number, step in enumerate(steps):
        size = len(step) // groups
        keys = [[key for worker in step[g * size : (g + 1) * size] for key in worker] for g in range(groups)]
        total = sum(map(len, keys))
        dense.zero_grad()
        loss_of_all = 0.0
        for mine, my_rows, my_sums in zip(keys, rows, sums):
            if not mine:
                continue
            leaves = {t: {k: of[k].clone().requires_grad_() for k in set(mine)} for t, of in my_rows.items()}
            pooled = torch.stack([torch.cat([leaves[t][k] for t in first]) for k in mine])
            loss = dense(pooled).square().mean()
            share = len(mine) / total
            dense_grads = torch.autograd.grad(loss, list(dense.parameters()), retain_graph=True)
            for parameter, grad in zip(dense.parameters(), dense_grads):
                parameter.grad = share * grad if parameter.grad is None else parameter.grad + share * grad
            loss.backward(inputs=[row for of in leaves.values() for row in of.values()])
            for t, of in leaves.items():
                for k, leaf in of.items():
                    assert leaf.grad is not None
                    my_sums[t][k] += scale * leaf.grad.square().mean()
                    my_rows[t][k] -= lr / (my_sums[t][k].sqrt() + 1e-8) * leaf.grad
            loss_of_all += share * loss.item()
            changed |= set(mine)
        if total:
            with torch.no_grad():
                for parameter in dense.parameters():
                    parameter -= dense_lr * parameter.grad
        losses.append(loss_of_all)
        if (number + 1) % every == 0 or number + 1 in averaged_after:
            for copies in (rows, sums):
                for t in first:
                    for k in changed:
                        mean = sum(copy[t][k] for copy in copies) / groups
                        for copy in copies:
                            copy[t][k] = mean.clone()  # type: ignore[union-attr]
            changed = set()
    return losses, rows, sums
