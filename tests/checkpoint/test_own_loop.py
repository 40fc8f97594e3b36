"""Checkpoints in a user's own loop, with a user's own models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nestpipe import Adam, Batch, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, TrainPipeline, World
from nestpipe.checkpoint import CheckpointError, CheckpointWriter, Folder, NotWritten, restore
from nestpipe.checkpoint import writer as writing
from nestpipe.train.digest import digest
from workers import run

Change = Callable[["Ranker"], None]


class Ranker(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.sparse = EmbeddingBagCollection([EmbeddingBagConfig("item", embedding_dim=4, feature_names=["item"])])
        self.dense = nn.Linear(4, 1)
        self.between: nn.Module = nn.Identity()
        change(self)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.dense(self.between(self.sparse(batch.sparse_features).values())).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()


def plain(model: Ranker) -> None:
    pass


def frozen(model: Ranker) -> None:
    model.between = nn.Linear(4, 4).requires_grad_(False)


def names_like_prefixes(model: Ranker) -> None:
    """Names of parameters and buffers that begin like the prefixes in a checkpoint."""
    for name in ("rate", "optimizer", "number", "model"):
        model.add_module(name, nn.Linear(4, 4))
    model.between = nn.Sequential(*(model.get_submodule(name) for name in ("rate", "optimizer", "number", "model")))
    model.get_submodule("rate").register_buffer("kept", torch.arange(3.0))


def averages(model: Ranker) -> None:
    model.between = nn.BatchNorm1d(4)


def pipeline_of(world: World, change: Change) -> TrainPipeline:
    model = Ranker(change)
    return TrainPipeline(model, torch.optim.Adam(model.parameters(), 1e-2), Adam(1e-2), world=world)


def batches(rank: int, first: int, count: int) -> Iterator[Batch]:
    for t in range(first, first + count):
        draw = torch.Generator().manual_seed(100 * t + rank)
        keys = torch.randint(0, 50, (6,), generator=draw)
        yield Batch(
            KeyedJaggedTensor(["item"], keys, lengths=torch.ones(6, dtype=torch.int64)), labels=(keys % 2).float()
        )


def trained(pipeline: TrainPipeline, first: int, count: int) -> None:
    data = batches(pipeline.world.rank, first, count)
    while pipeline.progress(data):
        pass


def state_of(pipeline: TrainPipeline) -> tuple[str, list[bytes]]:
    """The digest over all workers, and this worker's own buffers."""
    return digest(pipeline), [buffer.numpy().tobytes() for buffer in pipeline.model.buffers()]


def saved_and_resumed(world: World, change: Change, folder: str) -> tuple[Any, Any, Any, Any]:
    """State at the checkpoint and four steps later: of an uninterrupted run, and of one that was restored."""
    whole = pipeline_of(world, change)
    trained(whole, 0, 3)
    writer = CheckpointWriter(whole, Folder(Path(folder)))
    writer.save({}, {})
    writer.wait()
    saved = state_of(whole)
    trained(whole, 3, 4)
    resumed = pipeline_of(world, change)
    there = Folder(Path(folder))
    last = there.find()
    assert last is not None and last.manifest.step == 3
    restore(resumed, there.chain(last))
    loaded = state_of(resumed)
    trained(resumed, 3, 4)
    return saved, loaded, state_of(whole), state_of(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("change", [plain, frozen, names_like_prefixes, averages])
@pytest.mark.parametrize("workers", [1, 2])
def test_any_model_resumes(tmp_path: Path, change: Change, workers: int) -> None:
    """Bit for bit: frozen layers, names that look like prefixes, and averages that differ between workers."""
    found = run(workers, saved_and_resumed, change, str(tmp_path))
    for saved, loaded, whole, resumed in found:
        assert saved == loaded and whole == resumed
    if change is averages and workers == 2:
        assert found[0][0][1] != found[1][0][1], "the workers' averages are equal: nothing is tested"


def begun(tmp_path: Path, change: Change = plain) -> tuple[TrainPipeline, CheckpointWriter]:
    pipeline = pipeline_of(World.single(), change)
    trained(pipeline, 0, 3)
    return pipeline, CheckpointWriter(pipeline, Folder(tmp_path))


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    left = Folder(tmp_path).writing(3)
    left.mkdir()
    (left / "worker0-group0-00000.safetensors").write_bytes(b"half")
    _, writer = begun(tmp_path)
    writer.save({}, {})
    writer.wait()
    assert Folder(tmp_path).steps() == [3] and not left.exists()


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """Saving again overwrites nothing, and the error does not ask for disk space."""
    _, writer = begun(tmp_path)
    writer.save({}, {})
    writer.wait()
    before = (tmp_path / "step-00000003" / "COMMIT").read_text()
    writer.save({}, {})
    with pytest.raises(NotWritten, match="already exists") as caught:
        writer.wait()
    assert "make room" not in str(caught.value)
    assert (tmp_path / "step-00000003" / "COMMIT").read_text() == before


def test_an_unsupported_dtype_is_refused_at_once(tmp_path: Path) -> None:
    def with_waves(model: Ranker) -> None:
        model.register_buffer("waves", torch.zeros(2, dtype=torch.complex64))

    with pytest.raises(CheckpointError, match="'waves' of the model is complex64"):
        begun(tmp_path, with_waves)


def test_a_row_larger_than_the_file_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 5)
    pipeline, writer = begun(tmp_path)
    writer.save({}, {})
    writer.wait()
    last = Folder(tmp_path).find()
    assert last is not None and {file.rows for file in last.manifest.of("rows")} == {1}
    again = pipeline_of(World.single(), plain)
    restore(again, [last])
    assert state_of(again) == state_of(pipeline)
