"""Negatives of the next-item models: what goes together, what is refused, and ids that a float cannot hold."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

from nestpipe import Batch, KeyedJaggedTensor
from nestpipe.comm.world import World
from nestpipe.config.training import EvalConfig
from nestpipe.data.global_batches import GlobalBatches
from nestpipe.data.interactions.data import InteractionsData
from nestpipe.data.negatives import Negatives
from nestpipe.data.sequence_batches import Histories, SequenceSource
from nestpipe.data.sequences import SequencesData
from nestpipe.data.stream import Stream
from nestpipe.models.hstu import HSTU, HSTUConfig
from nestpipe.models.item_chances import ItemChances
from nestpipe.models.kinds import make_model
from nestpipe.ops.sampled_softmax import sampled_softmax_loss
from nestpipe.tables.config import TableDefaults
from nestpipe.train.evaluate import by_popularity

BASE = HSTUConfig(dim=4, blocks=1, max_length=5, dropout=0.0)
FEATURES = ["history", "target", "negatives", "time"]


def batch_of(history: list[int], target: list[int], negatives: list[int], **fields: Any) -> Batch:
    times = list(range(len(history) + 1))
    parts = [history, target, negatives, times]
    lengths = torch.tensor([len(part) for part in parts])
    return Batch(
        KeyedJaggedTensor(FEATURES, torch.tensor([*history, *target, *negatives, *times]), lengths=lengths), **fields
    )


def hstu(config: HSTUConfig = BASE) -> HSTU:
    torch.manual_seed(1)
    return HSTU(config, TableDefaults("float64", "normal", 0.5)).double()


def loss_of(model: HSTU, batch: Batch) -> float:
    with torch.no_grad():
        return float(model(batch)[0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"sharing": "all"}, "model.sharing must be 'none', 'logits' or 'negatives', not 'all'"),
        ({"sharing_factor": 1}, "model.sharing_factor must be at least 2, not 1; to share nothing"),
    ],
)
def test_bad_keys_are_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HSTUConfig(**keys)


def test_a_pool_is_the_same_negatives_for_every_position() -> None:
    """Promise: the loss of a pool is that of its ids given to each position."""
    pool = torch.tensor([7, 8, 2])
    pooled = batch_of([1, 2], [2, 3], [], shared={"negatives": pool}).with_shared_ids()
    each = batch_of([1, 2], [2, 3], [7, 8, 2] * 2)
    assert math.isclose(loss_of(hstu(), pooled), loss_of(hstu(), each), rel_tol=1e-12)


def test_what_does_not_go_with_a_pool_is_refused() -> None:
    """Promise: one line that says what to change: when the model is made, and for batches of one's own."""
    shared = {"negatives": torch.tensor([7, 8])}
    sharing = replace(BASE, sharing="logits")
    with pytest.raises(ValueError, match=r"set model.sharing = 'none'"):
        hstu(sharing)(batch_of([1, 2], [2, 3], [], shared=shared).with_shared_ids())
    source = SequencesData(users=20, max_length=5, negatives_from="pool").open("train", 1)
    with pytest.raises(ValueError, match=r"set model.sharing = 'none'"):
        make_model("hstu", sharing, source, TableDefaults())
    for own in ([], [5, 6]):
        batch = batch_of([1, 2], [2, 3], own, shared=shared)
        with pytest.raises(ValueError, match=r"use batch.with_shared_ids\(\)"):
            hstu()(batch.with_shared_ids() if own else batch)
    with pytest.raises(ValueError, match="at least one"):
        hstu()(batch_of([1], [2], [], shared={"negatives": torch.empty(0, dtype=torch.int64)}).with_shared_ids())


def test_logq_needs_data_that_knows_its_chances() -> None:
    source = SequencesData(users=20, max_length=5).open("train", 1)
    del source.sampler
    with pytest.raises(ValueError, match=r"set model\.logq = false"):
        make_model("hstu", replace(BASE, logq=True), source, TableDefaults())


def test_logits_are_corrected_by_the_chances_of_the_data() -> None:
    """Promise: as with the logarithms written out, item by item; ids far apart, on both sides of 2^53."""
    source = SequencesData(users=30, items=20, groups=2, max_length=5, negatives=3, sampling="popularity").open(
        "train", 1
    )
    model = make_model("hstu", replace(BASE, logq=True), source, TableDefaults("float64", "normal", 0.5)).double()
    assert isinstance(model, HSTU)
    counts = dict(zip(source.catalogue.tolist(), source.popularity().tolist()))
    (batch,) = Stream(source, 100)
    found = model.sparse.unique_rows(batch.sparse_features)
    log_q = torch.zeros(len(found["target"].rows), dtype=torch.float64)
    for name in ("target", "negatives"):
        for place, item in zip(found[name].index.tolist(), batch.sparse_features[name].values().tolist()):
            log_q[place] = math.log(counts[item] / sum(counts.values()))
    captured: dict[str, Any] = {}

    def spy(*args: Any) -> torch.Tensor:
        captured["log_q"] = args[-1]
        return sampled_softmax_loss(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nestpipe.models.next_item.sampled_softmax_loss", spy)
        corrected = loss_of(model, batch)
    used = torch.cat([found[name].index for name in ("target", "negatives")]).long()
    torch.testing.assert_close(captured["log_q"][used], log_q[used])
    model.chances = None
    assert abs(loss_of(model, batch) - corrected) > 1e-3


def test_chances_of_any_id() -> None:
    """Promise: exact for every int64, the rarest for what is no item; they are no part of the model's state."""
    chances = ItemChances().double()
    items = np.array([-(2**63), -1, 2**24, 2**24 + 1, 2**53, 2**53 + 1, 2**62, 2**62 + 1, 2**63 - 1])
    chances.set(items, -np.arange(9.0))
    assert chances(torch.from_numpy(items)).tolist() == (-np.arange(9.0)).tolist()
    assert chances(torch.tensor([0, 2**53 + 2, 2**62 - 1])).tolist() == [-8, -8, -8]
    assert (
        not chances.state_dict() and not list(chances.buffers()) and chances(torch.tensor([5])).dtype == torch.float64
    )
    chances.set(items, None)
    assert chances(torch.tensor([5, 2**62])).tolist() == [0, 0]
    for wrong in (items[::-1], items[:3], np.empty(0, np.int64)):
        with pytest.raises(ValueError, match="in ascending order, one each"):
            chances.set(wrong, np.zeros(len(wrong) + (len(wrong) == 3)))


NEAR = [2**24, 2**53, 2**62]
"""Above these, float32, float64 and most of int64 no longer tell neighbours apart."""


@pytest.mark.parametrize("near", NEAR)
def test_neighbours_of_large_ids_do_not_collide(near: int) -> None:
    """Promise: a negative is taken for the target only if it is the target."""
    history, target = [near - 2, near], [near, near + 2]
    plain = loss_of(hstu(), batch_of(history, target, [near - 1, near + 1]))
    collided = loss_of(hstu(), batch_of(history, target, [near, near + 2]))
    assert collided == 0 and plain > 0.01
    pool = torch.tensor([near + 1, near])
    pooled = batch_of(history, target, [], shared={"negatives": pool}).with_shared_ids()
    each = batch_of(history, target, [near + 1, near] * 2)
    assert math.isclose(loss_of(hstu(), pooled), loss_of(hstu(), each), rel_tol=1e-12)
    for sharing in ("logits", "negatives"):
        shared = hstu(replace(BASE, sharing=sharing))
        assert loss_of(shared, batch_of(history, target, [near - 1, near + 1])) > plain


def neighbours(near: int, count: int) -> np.ndarray:
    return near - count // 2 + np.arange(count)


@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("sampling", ["uniform", "log-uniform", "popularity", "in-batch"])
def test_large_ids_are_drawn_as_they_are(near: int, sampling: str) -> None:
    """Promise: data, draws and chances depend on the order of ids alone."""
    lengths = np.random.default_rng(0).integers(3, 9, 12)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    places = np.random.default_rng(1).integers(0, 20, offsets[-1])
    pool = "pool" if sampling == "in-batch" else "each"

    def drawn(catalogue: np.ndarray) -> list[list[int]]:
        histories = Histories(np.arange(12), offsets, catalogue[places], np.arange(offsets[-1]))
        source = SequenceSource(histories, catalogue, "train", 1, 5, Negatives(4, pool, sampling))  # type: ignore[arg-type]
        (batch,) = Stream(source, 100)
        ids = [batch.sparse_features[name].values().numpy() for name in ("history", "target", "negatives")]
        if source.pool is not None:
            ids.append(source.pool.ids(3, GlobalBatches(source.extent, source.piece, 1, 5, None)))
        return [(some - catalogue[0]).tolist() for some in ids]

    assert drawn(neighbours(near, 20)) == drawn(np.arange(20))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_large_ids_are_ranked_as_they_are(form: str, tmp_path: Path) -> None:
    """Promise: a log whose ids are neighbours of 2^24, 2^53 and 2^62 is evaluated as one with small ids."""
    random = np.random.default_rng(2)
    users = np.repeat(np.arange(40), 8)
    places = (15 * random.random(len(users)) ** 2).astype(int)
    found = []
    for name, catalogue in {
        "small": np.arange(15),
        "large": np.concatenate([neighbours(near, 5) for near in NEAR]),
    }.items():
        table = pa.table({"user_id": users, "item_id": catalogue[places], "timestamp": np.arange(len(users))})
        path = tmp_path / f"{name}.{form}"
        (pa.csv.write_csv if form == "csv" else pq.write_table)(table, path)
        data = InteractionsData(str(path), cache=str(tmp_path / "cache"))
        source = data.open("eval", 1)
        assert source.catalogue.tolist() == np.unique(catalogue[places]).tolist()
        found.append(by_popularity(World.single(), hstu(), source, EvalConfig(top_k=[1, 3])))
    assert found[0] == found[1] and 0 < found[0]["hr@3"] < 1
