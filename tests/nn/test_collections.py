"""The collections are what plain torch makes of the same rows, forward and backward, whatever the bags look like."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nestpipe import (
    SGD,
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    TrainPipeline,
    World,
)
from nestpipe.data.jagged import JaggedTensor
from nestpipe.nn.collections import Collection
from nestpipe.nn.local_rows import LocalRows
from nestpipe.ops.pooling import Untrained
from nestpipe.sparse.attach import attach_collections
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.sparse.view import MicroBatchView
from nestpipe.tables.config import TableConfig
from oracle import OracleBags, OracleSequences, OracleTables, distance

IDS = [0, 1, 2, 3, -1, 2**63 - 1, -(2**63)]
CLOSE = 1e-12


def bags() -> EmbeddingBagCollection:
    """Two tables of one dimension and one of another; f and g look into two tables each; a and b are shared by features."""
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig("a", 3, ["f", "g"], dtype="float64", init_scale=1.0),
            EmbeddingBagConfig("c", 5, ["g"], dtype="float64", init_scale=1.0, pooling="mean"),
            EmbeddingBagConfig("b", 3, ["h", "f"], dtype="float64", init_scale=1.0, pooling="mean"),
        ]
    )


def sequences() -> EmbeddingCollection:
    return EmbeddingCollection(
        [
            EmbeddingConfig("a", 3, ["f", "g"], dtype="float64", init_scale=1.0),
            EmbeddingConfig("c", 5, ["g", "h"], dtype="float64", init_scale=1.0),
        ]
    )


class Trial:
    """A collection in the middle of a batch, next to the oracle's version of it over the same rows."""

    def __init__(self, collection: Collection, features: KeyedJaggedTensor, micro_batches: int = 1) -> None:
        self.collection = collection
        self.stages = attach_collections([collection], World.single(), SGD(), seed=3)
        ids = np.unique(features.values().numpy())
        first_rows = {t.name: (ids, self.stages.rows_of(t.name, ids)) for t in collection.tables}
        kind = OracleBags if isinstance(collection, EmbeddingBagCollection) else OracleSequences
        self.oracle: OracleTables = kind(collection, first_rows, sparse_grads=False)
        self.context = BatchContext(0, Batch(features).split(micro_batches), micro_batches, has_data=True)
        self.context.moved = self.context.micros
        self.stages.plan(self.context)
        self.stages.route(self.context)
        self.stages.retrieve(self.context)
        self.stages.sync(self.context)
        for micro in range(micro_batches):
            self.stages.embed(self.context, micro)

    def look(self, micro: int) -> KeyedJaggedTensor:
        """The features of one micro-batch, which the collection now looks at."""
        self.collection.look_at(MicroBatchView(self.context, micro, True, self.stages.device))
        return self.context.micros[micro].sparse_features

    def check_grads(self) -> None:
        """What the window holds is what the oracle's tables got."""
        for table in self.collection.tables:
            group, number = self.stages.place_of(table.name)
            assert self.context.routes is not None
            window = self.context.routes.windows[group]
            mine = np.flatnonzero(window.tables == number)
            places = self.oracle.places(table.name, torch.from_numpy(window.keys[mine]))
            wanted = self.oracle.weights[table.name].grad
            found = np.zeros((len(self.oracle.keys[table.name]), table.embedding_dim))
            found[places] = self.context.windows[group].of(0).grads[mine]
            assert distance(found, np.zeros_like(found) if wanted is None else wanted.numpy()) <= CLOSE


@st.composite
def jagged(draw: st.DrawFn, weights: bool | None = None) -> KeyedJaggedTensor:
    """Features f, g and h (and one nobody looks up) of 0 to 5 samples; bags may be empty, features too; f may be very long."""
    count = draw(st.integers(0, 5))
    longest = {"f": draw(st.sampled_from([0, 3, 40])), "other": 2, "g": 4, "h": 1}
    lengths = [draw(st.integers(0, most)) for most in longest.values() for _ in range(count)]
    values = draw(st.lists(st.sampled_from(IDS), min_size=sum(lengths), max_size=sum(lengths)))
    weighted = draw(st.booleans()) if weights is None else weights
    given_weights = torch.linspace(-1, 2, len(values), dtype=torch.float64) if weighted else None
    return KeyedJaggedTensor(
        list(longest),
        torch.tensor(values, dtype=torch.int64),
        given_weights,
        lengths=torch.tensor(lengths, dtype=torch.int64),
        stride=count,
    )


def upstream(like: Tensor) -> Tensor:
    """A gradient that differs in every entry."""
    return torch.sin(torch.arange(like.numel(), dtype=like.dtype) + 1).view_as(like)


ONE_SAMPLE = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([1, 1, 2]), lengths=torch.tensor([3, 0, 0]))
NOTHING = KeyedJaggedTensor(
    ["f", "g", "h"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(6, dtype=torch.int64)
)


@settings(deadline=None, max_examples=60)
@given(jagged(), st.sampled_from([1, 3]))
@example(ONE_SAMPLE, 1)
@example(NOTHING, 3)
def test_bags_are_plain_torchs(features: KeyedJaggedTensor, micro_batches: int) -> None:
    """Promise: sums and means, weighted or not, and all gradients are plain torch's, whatever the micro-batches."""
    trial = Trial(bags(), features, micro_batches)
    for micro in range(micro_batches):
        mine = trial.look(micro)
        if len(trial.context.micros[micro]) == 0:
            continue
        weights = mine.weights_or_none()
        ours, theirs = (None if weights is None else weights.clone().requires_grad_() for _ in range(2))
        found = trial.collection(_weighted(mine, ours))
        wanted = trial.oracle(_weighted(mine, theirs))
        assert found.keys() == wanted.keys() == ["f@a", "g@a", "g@c", "h", "f@b"]
        assert found.length_per_key() == wanted.length_per_key()
        assert distance(found.values().detach().numpy(), wanted.values().detach().numpy()) <= CLOSE
        found.values().backward(upstream(found.values()))
        wanted.values().backward(upstream(wanted.values()))
        if ours is not None and theirs is not None and ours.numel():
            assert ours.grad is not None and theirs.grad is not None
            assert distance(ours.grad.numpy(), theirs.grad.numpy()) <= CLOSE
    trial.check_grads()


def _weighted(features: KeyedJaggedTensor, weights: Tensor | None) -> KeyedJaggedTensor:
    """The same ids with other weights: what a model with learned weights does."""
    if weights is None:
        return features
    return KeyedJaggedTensor(
        features.keys(), features.values(), weights, lengths=features.lengths(), stride=features.stride()
    )


@settings(deadline=None, max_examples=60)
@given(jagged(weights=False), st.sampled_from([1, 3]), st.booleans())
@example(ONE_SAMPLE, 1, True)
@example(NOTHING, 3, True)
def test_sequences_are_plain_torchs(features: KeyedJaggedTensor, micro_batches: int, unique: bool) -> None:
    """Promise: id by id, or as unique rows and an index, rows and gradients are plain torch's."""
    trial = Trial(sequences(), features, micro_batches)
    for micro in range(micro_batches):
        mine = trial.look(micro)
        if len(trial.context.micros[micro]) == 0:
            continue
        found = _by_id(trial.collection, mine, unique)
        wanted = _by_id(trial.oracle, mine, unique)
        assert list(found) == list(wanted) == ["f", "g@a", "g@c", "h"]
        for name in found:
            assert torch.equal(found[name].lengths(), wanted[name].lengths())
            assert torch.equal(found[name].values(), wanted[name].values())
        for parts in (found, wanted):
            total = sum((part.values() * upstream(part.values())).sum() for part in parts.values())
            assert isinstance(total, Tensor)
            total.backward()
    trial.check_grads()


def _by_id(collection: nn.Module, features: KeyedJaggedTensor, unique: bool) -> dict[str, JaggedTensor]:
    if not unique:
        return collection(features)
    found = collection.unique_rows(features)
    return {name: JaggedTensor(part.rows[part.index.long()], lengths=part.lengths) for name, part in found.items()}


def test_float32_bags_follow_their_dtype() -> None:
    """Promise: float32 tables give float32, and weights of another dtype are taken as they are meant."""
    collection = EmbeddingBagCollection([EmbeddingBagConfig("t", 2, ["f"])])
    features = KeyedJaggedTensor(
        ["f"], torch.tensor([5, 6, 5]), torch.ones(3, dtype=torch.float64), torch.tensor([1, 2])
    )
    weighted = collection(features).values()
    plain = collection(KeyedJaggedTensor(["f"], features.values(), lengths=features.lengths())).values()
    assert weighted.dtype == torch.float32 and torch.equal(weighted, plain)


def test_features_may_come_in_any_order() -> None:
    """Promise: the batch may list its features in any order, and more of them than the model looks up."""
    lengths = {"f": [2, 1], "g": [0, 3], "h": [1, 0]}
    ids = {"f": [1, 2, 3], "g": [4, 5, 4], "h": [7]}
    found = []
    for order in (["f", "g", "h"], ["h", "x", "g", "f"]):
        collection = bags()
        features = KeyedJaggedTensor(
            order,
            torch.tensor([i for f in order for i in ids.get(f, [8])]),
            lengths=torch.tensor([n for f in order for n in lengths.get(f, [1, 0])]),
        )
        found.append(collection(features).values().detach())
    assert torch.equal(found[0], found[1])


# Outside a pipeline


def test_outside_a_pipeline_a_collection_looks_up_at_once() -> None:
    """Promise: no pipeline is needed to look up; the rows are those of seed 0, and looking creates none."""
    features = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([1, 2, 1]), lengths=torch.tensor([2, 0, 0, 1, 0, 0]))
    collection = bags()
    first = collection(features)["f@a"].detach()
    assert torch.equal(first, collection(features)["f@a"].detach())
    same = attach_collections([bags()], World.single(), SGD(), seed=0).rows_of("a", np.array([1, 2]))
    assert torch.equal(first[0], same.sum(0)) and not first[1].any()
    assert isinstance(collection._source, LocalRows) and all(len(store) == 0 for store in collection._source.stores)


def test_backward_outside_a_pipeline_is_refused() -> None:
    """Promise: a backward pass that would train nothing says so, and says what to do."""
    features = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([1, 2, 1]), lengths=torch.tensor([2, 0, 0, 1, 0, 0]))
    with pytest.raises(Untrained, match=r"TrainPipeline\.progress to train"):
        bags()(features).values().sum().backward()
    with pytest.raises(Untrained, match=r"torch\.no_grad\(\) to evaluate"):
        sequences()(features)["f"].values().sum().backward()
    with pytest.raises(Untrained):
        sequences().unique_rows(features)["f"].rows.sum().backward()
    with torch.no_grad():
        assert not bags()(features).values().requires_grad


def test_a_missing_feature_is_named() -> None:
    """Promise: a batch without a feature that a table needs is refused by its name."""
    with pytest.raises(KeyError, match="no feature 'g' in this batch; it has f"):
        bags()(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1])))


# Configuration


def test_impossible_collections_are_refused() -> None:
    """Promise: a collection that cannot be meant is refused when it is made, or when its tables are grouped."""
    with pytest.raises(ValueError, match="at least one table"):
        EmbeddingBagCollection([])
    with pytest.raises(ValueError, match="lists a feature twice"):
        EmbeddingBagCollection([EmbeddingBagConfig("a", 2, ["f", "f"])])
    with pytest.raises(ValueError, match="two tables have one name"):
        EmbeddingBagCollection([EmbeddingBagConfig("a", 2, ["f"]), EmbeddingBagConfig("a", 2, ["g"])])
    apart = [EmbeddingBagCollection([EmbeddingBagConfig("a", 2, [feature])]) for feature in ("f", "g")]
    with pytest.raises(ValueError, match="two tables are named 'a'"):
        attach_collections(apart, World.single(), SGD(), 0)
    mixed = EmbeddingBagCollection([EmbeddingBagConfig("a", 2, ["f"]), EmbeddingBagConfig("b", 2, ["f"], "float64")])
    with pytest.raises(ValueError, match="one dtype"):
        mixed(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1])))


# Features that were not routed


class Changing(nn.Module):
    """A model that does something to its features before it looks them up."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection([EmbeddingBagConfig("a", 2, ["f", "g"], dtype="float64")])
        self.weights = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.change = change

    def forward(self, batch: Batch) -> tuple[Tensor, None]:
        given = batch.sparse_features
        keys, values, lengths = given.keys(), given.values(), given.lengths()
        match self.change:
            case "ids":
                given = KeyedJaggedTensor(keys, values + 1, lengths=lengths)
            case "samples":
                given = given.select(torch.arange(1))
            case "fewer ids":  # begins where the routed ids begin
                given = KeyedJaggedTensor(keys, values[:3], lengths=torch.tensor([1, 1, 1, 0]))
            case "lengths":
                given = KeyedJaggedTensor(keys, values, lengths=lengths.roll(1))
            case "names":
                given = KeyedJaggedTensor(keys[::-1], values, lengths=lengths)
            case "weights":
                given = KeyedJaggedTensor(keys, values, self.weights * torch.ones(values.numel()), lengths=lengths)
        return self.sparse(given).values().square().mean() + 0 * self.weights.sum(), None


def two_samples() -> Batch:
    features = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 1, 0, 1]))
    return Batch(features)


@pytest.mark.parametrize("change", ["ids", "samples", "fewer ids", "lengths", "names"])
def test_features_changed_inside_the_model_are_refused(change: str) -> None:
    """Promise: looking up other ids than were routed is an error that says where to change them, never other rows."""
    pipeline = TrainPipeline(Changing(change), world=World.single())
    with pytest.raises(ValueError, match=r"not routed for this batch.*change ids where the batch is loaded"):
        pipeline.progress(iter([two_samples()]))


@pytest.mark.parametrize("change", ["nothing", "weights"])
def test_weights_may_be_made_inside_the_model(change: str) -> None:
    """Promise: the routed ids with weights of the model's own are fine, and the weights learn."""
    pipeline = TrainPipeline(Changing(change), world=World.single())
    pipeline.progress(iter([two_samples()]))
    grad = pipeline.model.weights.grad
    assert grad is not None and bool(grad.any()) == (change == "weights")


def test_tables_configs_are_checked() -> None:
    """Promise: a table that cannot be meant is refused by the field to change."""
    with pytest.raises(ValueError, match="pooling must be 'sum' or 'mean'"):
        EmbeddingBagConfig("a", 2, ["f"], pooling="max")
    for bad in ({"embedding_dim": 0}, {"feature_names": []}, {"dtype": "int8"}, {"init": "ones"}, {"init_scale": -1.0}):
        with pytest.raises(ValueError, match=f"table 'a'.*{next(iter(bad))}"):
            TableConfig(**{"name": "a", "embedding_dim": 2, "feature_names": ["f"], **bad})
    with pytest.raises(TypeError, match=r"feature_names is a list of names, not 'item': use \['item'\]"):
        EmbeddingBagConfig("a", 2, "item")


def test_the_rows_of_a_lookup_by_itself_are_all_used() -> None:
    """Promise: a view outside a pipeline gives what the protocol promises, though collections do not ask it."""
    collection = EmbeddingCollection([EmbeddingConfig("a", 3, ["f"])])
    features = KeyedJaggedTensor(["f"], torch.tensor([5, 9, 5]), lengths=torch.tensor([2, 1]))
    wanted = collection(features)["f"].values()
    assert collection._source is not None
    view = collection._source.view(features)
    used, (index,) = view.used_rows(0, [0])
    assert torch.equal(view.rows(0)[0][used][index], wanted)
