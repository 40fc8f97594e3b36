"""`nestpipe predict` and `nestpipe checkpoint export --for-serving`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from test_open_run import evaluated

from nestpipe.cli.main import main
from nestpipe.cli.predict import bytes_in
from nestpipe.comm.world import World
from nestpipe.data.stream import Stream
from nestpipe.infer import predict
from nestpipe.infer.open_run import OpenModel, open_data, open_model
from runs import EVERY, small, train_run
from tiny import write_parquet


@pytest.fixture(scope="module", params=["dlrm", "hstu"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[str]]:
    path = tmp_path_factory.mktemp(request.param) / "run"
    settings = small(request.param, EVERY, "train.epochs=1")
    train_run(World.single(), request.param, settings, str(path))
    return request.param, path, settings


def test_scores_of_the_evaluation_split(run: tuple[str, Path, list[str]], tmp_path: Path) -> None:
    """Promise: the file has every sample of the split in order, with the bits of the training run's evaluation: logits of
    clicks; the best items that are not in the history, best first."""
    model, path, settings = run
    to = tmp_path / "scores.parquet"
    assert main(["predict", str(path), "--to", str(to), "--top", "5", "--json", str(tmp_path / "j")]) == 0
    table = pq.read_table(to)
    outputs, _ = evaluated(World.single(), model, settings, str(path))
    whole = np.concatenate(outputs)
    assert table["row"].to_pylist() == list(range(len(whole)))
    assert json.loads((tmp_path / "j").read_text())["rows"] == len(whole)
    assert [file.name for file in tmp_path.iterdir()] != [] and not list(tmp_path.glob(".*"))
    if model == "dlrm":
        assert table.column_names == ["row", "probability", "logit", "label"]
        assert table["logit"].to_numpy().tobytes() == whole.tobytes()
        probabilities = torch.from_numpy(whole).sigmoid().numpy()
        assert table["probability"].to_numpy().tobytes() == probabilities.tobytes()
        return
    opened = open_model(path)
    source: Any = open_data(opened.recipe, "eval")
    catalogue = source.catalogue
    vectors = opened.model.item_vectors(torch.from_numpy(opened.rows.read("item", catalogue)))  # type: ignore[operator]
    seen = [set(one.tolist()) for batch in Stream(source, 64) for one in batch.sparse_features["history"].to_dense()]
    every = np.concatenate([(torch.from_numpy(part) @ vectors.T).numpy() for part in outputs])
    for user, scores in enumerate(every):
        allowed = [place for place in range(len(catalogue)) if catalogue[place] not in seen[user]]
        best = sorted(allowed, key=lambda place: (-scores[place], place))[:5]
        assert table["items"][user].as_py() == catalogue[best].tolist()
        assert table["scores"][user].as_py() == scores[best].tolist()


def test_an_export_gives_the_same_file(run: tuple[str, Path, list[str]], tmp_path: Path, capsys: Any) -> None:
    """Promise: exported rows as trained change no bit of a score; fewer bits say by how much they do."""
    _, path, _ = run
    files = []
    for number, (source, flags) in enumerate([(path, []), (tmp_path / "e", []), (tmp_path / "e", ["--memory", "8kB"])]):
        if number == 1:
            assert main(["checkpoint", "export", str(path), "--for-serving", "--to", str(tmp_path / "e")]) == 0
        assert main(["predict", str(source), "--to", str(tmp_path / f"{number}.parquet"), *flags]) == 0
        files.append((tmp_path / f"{number}.parquet").read_bytes())
    assert files[0] == files[1] == files[2]
    for kind in ("int8", "float16"):
        capsys.readouterr()
        assert (
            main(["checkpoint", "export", str(path), "--for-serving", "--to", str(tmp_path / kind), "--rows", kind])
            == 0
        )
        said = capsys.readouterr().out
        assert "rows: largest change" in said and "of their standard deviation" in said
        assert ("best 10 items the same for" in said) == (run[0] == "hstu")


def test_other_data(tmp_path: Path) -> None:
    """Promise: --data takes all rows of other files, in their order, in place of the recipe's, and needs no label."""
    data = write_parquet(tmp_path / "data")
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        f'[data]\nkind = "parquet"\npaths = "{data}"\nlabel = "clicked"\ndense = ["price"]\n'
        '[data.sparse]\nuser = "user"\ncity = "city"\ntags = "tags"\n[model]\nkind = "dlrm"\ndim = 4\nbottom = [4]\ntop = [4]\n'
        "[checkpoint]\nevery_steps = 3\n[train]\nbatch_size = 16\n"
    )
    train_run(World.single(), str(recipe), [], str(tmp_path / "run"))
    assert (
        main(["predict", str(tmp_path / "run"), "--data", str(data / "c.parquet"), "--to", str(tmp_path / "s.parquet")])
        == 0
    )
    found, given = pq.read_table(tmp_path / "s.parquet"), pq.read_table(data / "c.parquet")
    assert found["label"].to_pylist() == [float(label) for label in given["clicked"].to_pylist()]
    pq.write_table(given.drop_columns(["clicked"]), tmp_path / "new.parquet")
    to = str(tmp_path / "u.parquet")
    assert main(["predict", str(tmp_path / "run"), "--data", str(tmp_path / "new.parquet"), "--to", to]) == 0
    unlabelled = pq.read_table(to)
    assert unlabelled.column_names == ["row", "probability", "logit"]
    assert unlabelled["logit"].to_pylist() == found["logit"].to_pylist()


def test_bad_flags_are_one_line(run: tuple[str, Path, list[str]], tmp_path: Path, capsys: Any) -> None:
    """Promise: what cannot be done is said before anything is computed, with the flag to change."""
    path, to = str(run[1]), str(tmp_path / "s.parquet")
    cases = [
        (["predict", path, "--to", str(tmp_path / "s.csv")], "must end in .parquet"),
        (["predict", path, "--to", str(tmp_path / "no" / "s.parquet")], "--to"),
        (["predict", path, "--to", to, "--top", "0"], "--top must be at least 1"),
        (["predict", path, "--to", to, "--memory", "many"], "--memory must be a size such as 2GB"),
        (["predict", path, "--to", to, "--data", "x.parquet"], "reads no files"),
        (["predict", str(tmp_path), "--to", to], "no checkpoint in"),
        (["checkpoint", "export", path, "--to", to], "give --table T"),
        (["checkpoint", "export", path, "--to", to, "--table", "f0", "--rows", "int8"], "--rows is for --for-serving"),
        (["checkpoint", "export", path, "--for-serving", "--to", str(tmp_path), "--table", "f0"], "leave out --table"),
        (["checkpoint", "export", path, "--for-serving", "--to", str(tmp_path)], "already exists"),
    ]
    for arguments, words in cases:
        assert main(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1, said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_prediction_leaves_no_half_file(
    run: tuple[str, Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Promise: Ctrl-C, or any failure, in the middle leaves the folder as it was: the old file whole, nothing beside it."""
    to = tmp_path / "s.parquet"
    to.write_bytes(b"old")
    real, calls = OpenModel.outputs, []

    def fails_later(self: OpenModel, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) > 2:
            raise error("stop")
        return real(self, batch)

    monkeypatch.setattr(OpenModel, "outputs", fails_later)
    monkeypatch.setattr(predict, "GROUP_ROWS", 8)
    code = main(["predict", str(run[1]), "--to", str(to), "--batch-size", "8"])
    assert code == (130 if error is KeyboardInterrupt else 1) and len(calls) == 3
    assert to.read_bytes() == b"old" and [path.name for path in tmp_path.iterdir()] == ["s.parquet"]


def test_sizes() -> None:
    """Promise: sizes are read as people write them."""
    assert [bytes_in(text, "-") for text in ("2GB", "1.5 mb", "64kB", "7", "9B")] == [
        2 * 10**9,
        1_500_000,
        64_000,
        7,
        9,
    ]
    for text in ("", "GB", "-1MB", "nan", "inf", "0"):
        with pytest.raises(ValueError, match="must be a size"):
            bytes_in(text, "--memory")
