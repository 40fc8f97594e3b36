"""MovieLens in all the forms it comes in."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestpipe.data.movielens import MovieLensData
from nestpipe.data.ratings import read_ratings
from nestpipe.data.source import DataError
from nestpipe.data.stream import Stream
from tiny import samples_of

# User 7 rates two films in the same second, in this order; user 3 has too few ratings for a sequence.
ROWS = [
    (7, 50, 5, 30), (9, 11, 4, 5), (7, 40, 3, 10), (3, 99, 1, 1), (7, 61, 4, 20),
    (7, 60, 2, 20), (9, 50, 1, 6), (9, 61, 4, 7), (3, 11, 2, 2), (7, 11, 5, 40),
]  # fmt: skip


@pytest.fixture
def forms(tmp_path: Path) -> dict[str, Path]:
    """The same ratings as u.data, ratings.dat, ratings.csv, a zip of each of two, and a folder."""
    lines = {
        "u.data": "".join("\t".join(map(str, row)) + "\n" for row in ROWS),
        "ratings.dat": "".join("::".join(map(str, row)) + "\n" for row in ROWS),
        "ratings.csv": "userId,movieId,rating,timestamp\n"
        + "".join(f"{user},{item},{rating}.0,{time}\r\n" for user, item, rating, time in ROWS),
    }
    found = {}
    for name, text in lines.items():
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_text(text)
        (folder / "README").write_text("not ratings")
        found[name] = folder / name
        found[f"folder of {name}"] = folder
        found[f"zip of {name}"] = tmp_path / f"{name}.zip"
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr("ml/README", "not ratings")
            archive.writestr(f"ml/{name}", text)
    return found


def test_all_forms_agree(forms: dict[str, Path]) -> None:
    """Three formats, their zips and their folders give the same samples for both tasks."""
    for task in ["clicks", "sequences"]:
        for split in ["train", "eval"]:
            sources = [MovieLensData(str(path), task, eval_fraction=0.4).open(split, 0) for path in forms.values()]
            samples = [[s for batch in Stream(source, 4) for s in samples_of(batch)] for source in sources]
            assert len(samples) == 9 and all(one == samples[0] for one in samples) and samples[0]


def test_ratings_of_one_second_keep_the_order_of_the_file(forms: dict[str, Path]) -> None:
    """Order is by time, then by place in the file, and not by item."""
    ratings = read_ratings(str(forms["u.data"]))
    assert ratings.item[ratings.user == 7].tolist() == [40, 61, 60, 50, 11]


def test_sequences(forms: dict[str, Path]) -> None:
    """Users with three ratings or more, the catalogue of all items of the file."""
    data = MovieLensData(str(forms["u.data"]), negatives=2)
    train, held_out = data.open("train", 0), data.open("eval", 0)
    assert train.catalogue.tolist() == [11, 40, 50, 60, 61, 99]  # type: ignore[attr-defined]
    samples = {int(b.extras["user"]): b for b in Stream(train, 1)}
    assert sorted(samples) == [7, 9]
    sparse = samples[7].sparse_features
    assert sparse["history"].values().tolist() == [40, 61, 60] and sparse["target"].values().tolist() == [61, 60, 50]
    assert sparse["time"].values().tolist() == [10, 20, 20, 30] and sparse["negatives"].values().numel() == 6
    targets = {int(b.extras["user"]): b.sparse_features["target"].values().tolist() for b in Stream(held_out, 1)}
    assert targets == {7: [11], 9: [61]}


def test_clicks(forms: dict[str, Path]) -> None:
    """A click is a rating of at least `positive`; the latest ratings of every user are held out."""
    data = MovieLensData(str(forms["u.data"]), task="clicks", eval_fraction=0.4)
    (train,), (held_out,) = (list(Stream(data.open(split, 0), 100)) for split in ("train", "eval"))
    assert held_out.sparse_features["user"].values().tolist() == [7, 7, 9]
    assert held_out.sparse_features["item"].values().tolist() == [50, 11, 61]
    assert held_out.labels is not None and held_out.labels.tolist() == [1, 1, 1]
    assert len(train) == 7 and train.labels is not None
    assert sorted(zip(train.sparse_features["user"].values().tolist(), train.labels.tolist())) == [
        (3, 0), (3, 0), (7, 0), (7, 0), (7, 1), (9, 0), (9, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\t2\t3\n", "u.data: .*a rating is user, item, rating, time"),
        ("1\t2\t3\t4\n1\tx\t3\t4\n", "u.data: .*'x'.*a rating is user, item, rating, time"),
        ("1\t2\t3\t4\n1\t\t3\t4\n", "u.data line 2: no movieId"),
        ("who,what\n1,2\n", "u.data: .*'userId'"),
        ("", "u.data"),
        ("1\t2\t3\t4\n", "no user has the 3 ratings"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    """What is no rating is answered by one line with the file and what is wrong."""
    (tmp_path / "u.data").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        MovieLensData(str(tmp_path / "u.data")).open("train", 0)
    assert "\n" not in str(caught.value)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """What was read is remembered for the other split, but not after the file has changed."""
    path = tmp_path / "u.data"
    path.write_text("1\t2\t3\t4\n")
    assert len(read_ratings(str(path)).user) == 1
    path.write_text("1\t2\t3\t4\n1\t3\t3\t4\n")
    assert len(read_ratings(str(path)).user) == 2


def test_missing_files_and_members(tmp_path: Path) -> None:
    """A path that is not there, and a zip without ratings, are named."""
    with pytest.raises(DataError, match=r"data.path: cannot read .*gone.zip: No such file"):
        MovieLensData(str(tmp_path / "gone.zip")).open("train", 0)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("movies.csv", "x")
    with pytest.raises(DataError, match=r"other.zip: .* found none"):
        MovieLensData(str(tmp_path / "other.zip")).open("train", 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "data.path must be a text such as 'ml-1m.zip', not ''"),
        ({"path": "x", "task": "rank"}, "data.task must be 'clicks' or 'sequences', not 'rank'"),
        ({"path": "x", "max_length": 0}, "data.max_length must be at least 1, not 0"),
        ({"path": "x", "eval_fraction": 1}, "data.eval_fraction must be less than 1, not 1"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    """A wrong value is refused when the section is made, and the message names the field."""
    with pytest.raises(ValueError, match=message):
        MovieLensData(**fields)


def test_the_real_thing() -> None:
    """MovieLens-1M has 6,040 users, 3,706 films and 1,000,209 ratings."""
    path = Path(__file__).parents[3] / "shared" / "data" / "ml-1m" / "ml-1m.zip"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    ratings = read_ratings(str(path))
    assert len(ratings.user) == 1_000_209 and (np.diff(ratings.user) >= 0).all()
    source = MovieLensData(str(path)).open("eval", 0)
    assert source.extent == 6040 and len(source.catalogue) == 3706  # type: ignore[attr-defined]
