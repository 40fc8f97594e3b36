"""What ranking models share: tokens of a history and of candidates, a head per action, and the loss.

A history token is its item's row, times the root of dim, with its place, the vectors of its actions (a learned one for each
bit that is set) and the rows of its context added.  A candidate is its item's row, with the learned vector "candidate" and the
place after the history, and no action.  Candidates see the whole history and themselves, never each other (M-FALCON).  They
all stand at place n and at the time of the request, so each score is that of ranking the candidate alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.data.batch import Batch
from nestpipe.data.jagged import JaggedTensor, KeyedJaggedTensor
from nestpipe.models.flops import Cost, Trained
from nestpipe.nn.collections import EmbeddingCollection
from nestpipe.ops.dropout import dropout
from nestpipe.ops.event_times import EventTimes
from nestpipe.ops.gating import gated_norm
from nestpipe.ops.lookup import lookup
from nestpipe.tables.config import TableDefaults


class RankingModel(nn.Module):
    """Ranking: the mean binary cross-entropy over candidates and actions, and logits [C, actions] of all candidates.

    Features: `history` [n ids], `candidate` [c ids], `time` [n + 1 times, the last of the request], `action` [n bit masks],
    `label` [c bit masks], and the features of model.context [n ids].
    """

    table = "item"
    """Of the items, of histories and candidates."""

    blocks: nn.ModuleList

    def __init__(self, config: Any, actions: Sequence[str], tables: TableDefaults | None = None) -> None:
        super().__init__()
        if not actions:
            raise ValueError("model.task = 'ranking' needs actions to predict: set data.actions, such as ['click']")
        tables = tables or TableDefaults(init="normal", init_scale=0.02)
        self.config, self.actions = config, tuple(actions)
        self.sparse = EmbeddingCollection(
            [
                tables.sequence(self.table, config.dim, ["history", "candidate"]),
                *(tables.sequence(name, config.dim, [name]) for name in config.context),
            ]
        )
        self.places = nn.Parameter(torch.empty(config.places, config.dim).normal_(0, 0.02))
        self.action_vectors = nn.Parameter(torch.empty(len(self.actions), config.dim).normal_(0, 0.02))
        self.candidate_vector = nn.Parameter(torch.empty(config.dim).normal_(0, 0.02))
        self.head = nn.Linear(config.dim, len(self.actions))
        nn.init.normal_(self.head.weight, 0, 0.02)
        nn.init.zeros_(self.head.bias)
        self.trained = Trained()

    def cost(self) -> Cost:
        """FLOPs of a token and of a pair of places."""
        raise NotImplementedError

    def history_flops(self) -> tuple[float, float, float]:
        """(a, b, c): a history of n tokens needs a + b n + c n^2 FLOPs.  Load balance starts from it."""
        return self.cost().of_history()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features = batch.sparse_features
        self._check(features)
        history, candidates = features["history"], features["candidate"]
        known = history.lengths_on_host()
        if self.training:
            self.trained.add(known + candidates.lengths_on_host())
        found = self.sparse(features)
        tokens = self._history_tokens(found, features)
        asked = self._candidate_tokens(found["candidate"], history)
        x = dropout(torch.cat([tokens, asked]), self.config.dropout, self.training)
        events = EventTimes(features["time"])
        for block in self.blocks:
            x = block(x, events, candidates)
        logits = self.head(gated_norm(x[tokens.shape[0] :], None, "layer"))
        wanted = self.bits(features["label"].values()).to(logits)
        loss = functional.binary_cross_entropy_with_logits(logits, wanted) if len(logits) else logits.sum()
        return loss, logits.detach()

    def bits(self, masks: Tensor) -> Tensor:
        """bool [..., actions]: which actions a mask has."""
        places = torch.arange(len(self.actions), device=masks.device)
        return (masks[..., None] >> places) & 1 == 1

    def _history_tokens(self, found: dict[str, JaggedTensor], features: KeyedJaggedTensor) -> Tensor:
        history = found["history"]
        _, place = history.places()
        x = history.values() * self.config.dim**0.5 + lookup(self.places, place)
        x = x + self.bits(features["action"].values()).to(x) @ self.action_vectors
        for name in self.config.context:
            x = x + found[name].values()
        return x

    def _candidate_tokens(self, candidates: JaggedTensor, history: JaggedTensor) -> Tensor:
        request, _ = candidates.places()
        place = lookup(self.places, history.lengths()[request])
        return candidates.values() * self.config.dim**0.5 + place + self.candidate_vector

    def _check(self, features: KeyedJaggedTensor) -> None:
        """Raises ValueError for a batch that is not one of requests."""
        name, known = type(self).__name__, features["history"].lengths_on_host()
        if len(known) and int(known.max()) > self.config.max_length:
            raise ValueError(
                f"a history has {int(known.max())} items; raise model.max_length ({self.config.max_length})"
            )
        wanted = {"time": known + 1, "action": known, "label": features["candidate"].lengths_on_host()}
        wanted |= {feature: known for feature in self.config.context}
        for feature, lengths in wanted.items():
            if not torch.equal(features[feature].lengths_on_host(), lengths):
                raise ValueError(
                    f"{name}: 'action' and context have an entry for each item of 'history', 'time' one more, and 'label' one "
                    f"for each 'candidate'; {feature!r} has not"
                )
