"""What next-item models share: tables, checks of a batch, and the sampled-softmax loss.  HSTU, FuXi and SASRec differ in
`encode` and `cost`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.data.batch import Batch
from nestpipe.data.jagged import JaggedTensor
from nestpipe.models.flops import Cost, Trained
from nestpipe.models.item_chances import ItemChances
from nestpipe.nn.collections import EmbeddingCollection, UniqueRows
from nestpipe.ops.dropout import dropout
from nestpipe.ops.lookup import lookup
from nestpipe.ops.sampled_softmax import SHORTEST, pooled_softmax_loss, sampled_softmax_loss
from nestpipe.ops.sharing import share
from nestpipe.tables.config import TableDefaults

POOL_AND_SHARING = (
    "model.sharing shares the negatives of positions, but with data.negatives_from = 'pool' all have the same: set "
    "model.sharing = 'none', or data.negatives_from = 'each'"
)


@dataclass(frozen=True)
class NextItemConfig:
    """Keys of [model] that every next-item model has."""

    dim: int = 50
    """Embedding dimension."""
    blocks: int = 2
    """Attention blocks."""
    heads: int = 1
    """Attention heads of a block."""
    max_length: int = 200
    """Longest history.  data.max_length must not be larger."""
    dropout: float = 0.2
    """Share of the values that dropout zeroes while training."""
    temperature: float = 0.05
    """Divides the similarities before the softmax."""
    sharing: Literal["none", "logits", "negatives"] = "none"
    """What positions of one history share, to count more negatives than are drawn.  logits: those of another position, as
    they are.  negatives: another position's, with this one's query."""
    sharing_factor: int = 2
    """With sharing: how many times the negatives that are drawn."""
    logq: bool = False
    """Subtracts the logarithm of an item's chance to be drawn from its logit: for data.sampling other than uniform."""
    task: Literal["next_item", "ranking"] = "next_item"
    """next_item: which item follows.  ranking: what the user will do with given candidates, a logit per action."""
    context: Sequence[str] = ()
    """For task = "ranking": features of data.context that are added to history tokens, each with a table of its name."""

    @property
    def places(self) -> int:
        """Of a history, and in the ranking task one more: that of the candidates."""
        return self.max_length + (self.task == "ranking")

    def __post_init__(self) -> None:
        if self.task not in ("next_item", "ranking"):
            raise ValueError(f"model.task must be 'next_item' or 'ranking', not {self.task!r}")
        if isinstance(self.context, str) or not all(isinstance(name, str) and name for name in self.context):
            raise ValueError(f"model.context must be a list of features, not {self.context!r}")
        if self.context and self.task != "ranking":
            raise ValueError("model.context goes with model.task = 'ranking': set both, or leave it out")
        for name in ("dim", "blocks", "heads", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, not {getattr(self, name)}")
        if getattr(self, "head_dim", None) is None and self.dim % self.heads:
            raise ValueError(f"model.dim ({self.dim}) must be a multiple of model.heads ({self.heads})")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout must be in [0, 1), not {self.dropout}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"model.temperature must be a number above 0, not {self.temperature}")
        if self.sharing not in ("none", "logits", "negatives"):
            raise ValueError(f"model.sharing must be 'none', 'logits' or 'negatives', not {self.sharing!r}")
        if self.sharing_factor < 2:
            raise ValueError(
                f"model.sharing_factor must be at least 2, not {self.sharing_factor}; to share nothing, set model.sharing = "
                "'none'"
            )


class NextItemModel(nn.Module):
    """Next-item prediction: in training, the mean sampled-softmax loss over all positions; else a query per user.

    Features: `history` [n ids], `target` (the next item of every position; one in evaluation), `negatives` (the same
    number for every position, or a pool in `batch.shared`), `time` [n + 1 times].  Outputs: a unit vector [B, dim] for
    each user's last position, to be scored against unit item vectors.
    """

    table = "item"
    """Whose rows are the items that an evaluation ranks."""

    def __init__(self, config: NextItemConfig, tables: TableDefaults | None = None) -> None:
        super().__init__()
        tables = tables or TableDefaults(init="normal", init_scale=0.02)
        self.config = config
        self.sparse = EmbeddingCollection([tables.sequence(self.table, config.dim, ["history", "target", "negatives"])])
        self.places = nn.Parameter(torch.empty(config.max_length, config.dim).normal_(0, 0.02))
        self.chances = ItemChances() if config.logq else None
        self.trained = Trained()

    def encode(self, x: Tensor, history: JaggedTensor, time: JaggedTensor) -> Tensor:
        """[T, dim] for the tokens x [T, dim] of a batch's histories, one after the other."""
        raise NotImplementedError

    def cost(self) -> Cost:
        """FLOPs of a token and of a pair of places."""
        raise NotImplementedError

    def history_flops(self) -> tuple[float, float, float]:
        """(a, b, c): a history of n tokens needs a + b n + c n^2 FLOPs.  Load balance starts from it."""
        return self.cost().of_history()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features = batch.sparse_features
        found = self.sparse.unique_rows(features)
        history, rows = found["history"], found["history"].rows
        known = history.feature.lengths_on_host()
        jagged = JaggedTensor(lookup(rows, history.index), lengths=history.lengths, host_lengths=known)
        self._check(jagged, features["time"])
        queries = self.encode(self._tokens(jagged), jagged, features["time"])
        last = functional.normalize(queries.detach()[jagged.offsets()[1:] - 1], dim=1, eps=SHORTEST)
        if not self.training:
            return queries.new_zeros(()), last
        self.trained.add(known)
        target, negatives = found["target"], found["negatives"]
        if not torch.equal(target.feature.lengths_on_host(), known):
            raise ValueError(
                f"{self._name} trains on one target per history position, but 'target' and 'history' differ in length"
            )
        log_q = self._log_q(rows.shape[0], target, negatives)
        if "negatives" in batch.shared:
            loss = self._pooled_loss(queries, rows, target.index, negatives.index, batch.shared["negatives"], log_q)
            return loss, last
        each = negatives.index.numel() // max(1, target.index.numel())
        if each < 1 or not torch.equal(negatives.feature.lengths_on_host(), each * known):
            raise ValueError(
                f"{self._name} needs the same number of negatives, at least one, for every history position"
            )
        chosen = negatives.index.view(-1, each)
        settings = self.config
        sharing = None if settings.sharing == "none" else share(settings.sharing, settings.sharing_factor, jagged)
        loss = sampled_softmax_loss(queries, rows, target.index, chosen, settings.temperature, sharing, log_q)
        return loss, last

    def _pooled_loss(
        self, queries: Tensor, rows: Tensor, target: Tensor, pool: Tensor, drawn: Tensor, log_q: Tensor | None
    ) -> Tensor:
        if self.config.sharing != "none":
            raise ValueError(POOL_AND_SHARING)
        if pool.numel() != drawn.numel() or not pool.numel():
            raise ValueError(
                f"{self._name} needs the {drawn.numel()} negatives of batch.shared, at least one, as its only negatives, but "
                f"there are {pool.numel()}: use batch.with_shared_ids(), and samples without negatives"
            )
        return pooled_softmax_loss(queries, rows, target, pool, self.config.temperature, log_q)

    def _log_q(self, rows: int, *drawn: UniqueRows) -> Tensor | None:
        """[rows]: the logarithm of each row's chance, where the model corrects by it.  Of rows not in `drawn`, anything."""
        if self.chances is None:
            return None
        ids, index = (torch.cat(parts) for parts in zip(*((d.feature.values(), d.index.long()) for d in drawn)))
        return self.chances(ids.new_zeros(rows).scatter_(0, index, ids))

    def item_vectors(self, rows: Tensor) -> Tensor:
        """What a query is multiplied with to score an item, from the items' rows."""
        return functional.normalize(rows, dim=1, eps=SHORTEST)

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _tokens(self, history: JaggedTensor) -> Tensor:
        """Item rows with their places added."""
        _, place = history.places()
        x = history.values() * self.config.dim**0.5 + lookup(self.places, place)
        return dropout(x, self.config.dropout, self.training)

    def _check(self, history: JaggedTensor, time: JaggedTensor) -> None:
        """Raises ValueError for a batch that is not what `sequence_batches` makes."""
        known = history.lengths_on_host()
        longest = int(known.max())
        if int(known.min()) == 0:
            raise ValueError(
                f"{self._name} needs at least one item in every history: remove users without one from the data"
            )
        if longest > self.config.max_length:
            raise ValueError(f"a history has {longest} items; raise model.max_length ({self.config.max_length})")
        if not torch.equal(time.lengths_on_host(), known + 1):
            raise ValueError(
                f"{self._name} needs the times of a history and of the item after it: 'time' must have one entry more "
                "than 'history'"
            )
