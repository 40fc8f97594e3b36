"""What a log may be wrong in: each gets one line that names the file and what to change."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestpipe.data.hash import hash_text
from nestpipe.data.interactions.data import InteractionsData
from nestpipe.data.source import DataError

GOOD: dict[str, list[Any]] = {"user_id": [1, 1, 1], "item_id": [4, 5, 6], "timestamp": [10, 20, 30]}


def log(folder: Path, *tables: dict[str, Any], **section: Any) -> InteractionsData:
    for number, table in enumerate(tables):
        pq.write_table(pa.table(table), folder / f"{number}.parquet")
    return InteractionsData(str(folder), cache=str(folder / "cache"), **section)


def csv(folder: Path, text: str, **section: Any) -> InteractionsData:
    (folder / "log.csv").write_text(text)
    return InteractionsData(str(folder / "log.csv"), cache=str(folder / "cache"), **section)


def refused(data: InteractionsData) -> str:
    with pytest.raises(DataError) as error:
        data.open("train", 0)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"item_id": None}, "0.parquet has no column 'item_id' (data.item); it has user_id, timestamp"),
        ({"item_id": [1.5, 2.0, 3.0]}, "column 'item_id' is double, but data.item needs whole numbers or text"),
        ({"timestamp": ["2020-01-01"] * 3}, "column 'timestamp' is string, but data.time needs whole numbers"),
        ({"timestamp": [1.0, 2.0, 3.0]}, "column 'timestamp' is double"),
        ({"user_id": [1, None, 1]}, "0.parquet row 1 (the first is 0): no value in column 'user_id'"),
        ({"timestamp": [1_650_000_000_000] * 3}, "look like ms, not seconds: set data.time_unit = 'ms'"),
    ],
)
def test_columns_that_cannot_be_used(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """A column that is missing, of a wrong type, without a value or in another unit is named."""
    table = {name: values for name, values in {**GOOD, **change}.items() if values is not None}
    assert says in refused(log(tmp_path, table))


def test_files_that_differ(tmp_path: Path) -> None:
    """Ids or times that are one thing in one file and another in the next are refused, and both files are named."""
    said = refused(log(tmp_path, GOOD, {**GOOD, "user_id": ["a", "b", "c"]}))
    assert "column 'user_id' holds whole numbers in" in said and "text in" in said and "1.parquet" in said
    moment = datetime.datetime(2022, 1, 1)
    said = refused(log(tmp_path, GOOD, {**GOOD, "timestamp": pa.array([moment] * 3, pa.timestamp("ms"))}))
    assert "holds whole numbers in" in said and "timestamps in ms in" in said
    seconds, finer = [1_650_000_000] * 3, [1_650_000_000_000] * 3
    said = refused(log(tmp_path, {**GOOD, "timestamp": seconds}, {**GOOD, "timestamp": finer}, time_unit="s"))
    assert "they are not in one unit" in said and "0.parquet" in said and "1.parquet" in said


def test_timestamps_tell_their_unit(tmp_path: Path) -> None:
    """Times of a timestamp column become seconds, and another unit in the recipe is refused."""
    moments = [datetime.datetime(2022, 1, 1, second=second) for second in (3, 1, 2)]
    table = {**GOOD, "timestamp": pa.array(moments, pa.timestamp("us"))}
    times = log(tmp_path, table).open("train", 0).histories.times
    assert times.tolist() == [1_640_995_201, 1_640_995_202, 1_640_995_203]
    assert "leave data.time_unit out" in refused(log(tmp_path, table, time_unit="ms"))


def test_rows_without_a_user_can_be_skipped(tmp_path: Path) -> None:
    """With on_error = 'skip' they are left out, and the report tells how many."""
    table = {"user_id": [1, None, 1, 1, 1], "item_id": [1, 2, 3, None, 5], "timestamp": [1, 2, 3, 4, 5]}
    source = log(tmp_path, table, on_error="skip").open("train", 0)
    assert source.histories.items.tolist() == [1, 3, 5]
    assert source.statistics["notes"][0].startswith("2 rows were left out; the first: ")


BROKEN = "user_id,item_id,timestamp\n1,4,10\n1,5,20\n1,six,30\n1,7,40\n1,8\n1,9,60\n"


def test_a_broken_csv_line(tmp_path: Path) -> None:
    """It is named by its line, or skipped and counted."""
    wide = BROKEN.replace("1,six,30", "1,6,30")
    assert "log.csv line 6: " in refused(csv(tmp_path, wide))
    source = csv(tmp_path, wide, on_error="skip").open("train", 0)
    assert source.histories.items.tolist() == [4, 5, 6, 7, 9]
    assert "1 row was left out" in source.statistics["notes"][0]


def test_one_broken_line_does_not_make_text_of_numbers(tmp_path: Path) -> None:
    """A word among numbers is named, skipped if asked for, and taken as an id where ids are said to be text."""
    said = refused(csv(tmp_path, BROKEN))
    assert "log.csv line 4: 'six' in column 'item_id', where most are whole numbers" in said and "data.text_ids" in said
    source = csv(tmp_path, BROKEN, on_error="skip").open("train", 0)
    assert source.histories.items.tolist() == [4, 5, 7, 9]
    assert "2 rows were left out" in source.statistics["notes"][0]
    source = csv(tmp_path, BROKEN.replace("1,8\n", ""), text_ids=True).open("train", 0)
    assert source.histories.items.tolist() == hash_text(["4", "5", "six", "7", "9"]).tolist()


def test_a_value_of_another_type_deep_in_a_csv_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looked like numbers must be numbers to the end: the line is named, or skipped and counted."""
    monkeypatch.setattr("nestpipe.data.interactions.event_files.BLOCK_BYTES", 64)
    lines = [f"{n % 3},{n},{n}" for n in range(60)]
    lines[47] = "1,what,47"
    text = "user_id,item_id,timestamp\n" + "\n".join(lines)
    said = refused(csv(tmp_path, text))
    assert "log.csv line 49" in said and "what" in said, said
    source = csv(tmp_path, text, on_error="skip").open("train", 0)
    assert sorted(source.histories.items.tolist()) == [n for n in range(60) if n != 47]


@pytest.mark.parametrize("column", [0, 1, 2, 3])
def test_a_quote_that_is_not_closed_swallows_nothing(tmp_path: Path, column: int) -> None:
    """It is named by its line, or that one line is left out; the lines behind it stay."""
    lines = [f"1,{n},{n},DE" for n in range(40)]
    broken = lines[20].split(",")
    broken[column] = '"' + broken[column]
    text = "\n".join(["user_id,item_id,timestamp,country", *lines[:20], ",".join(broken), *lines[21:]]) + "\n"
    said = refused(csv(tmp_path, text, context=["country"]))
    assert "log.csv line 22: a quote that is not closed" in said, said
    source = csv(tmp_path, text, context=["country"], on_error="skip").open("train", 0)
    assert source.histories.items.tolist() == [n for n in range(40) if n != 20]
    assert source.statistics["notes"][0].startswith("1 row was left out")


def test_a_quote_inside_a_value_is_no_quote(tmp_path: Path) -> None:
    """5" is a screen's size, not a broken line; quoted values and empty lines are read as they should be."""
    text = 'user_id,item_id,timestamp,what\n1,4,10,5" screen\n\n1,5,20,"a, b"\n1,6,30,"say ""hi"""\r\n\n'
    source = csv(tmp_path, text, context=["what"]).open("train", 0)
    assert source.histories.items.tolist() == [4, 5, 6]
    assert source.histories.features["what"].tolist() == hash_text(['5" screen', "a, b", 'say "hi"']).tolist()


def test_numbers_of_19_digits(tmp_path: Path) -> None:
    """Times in ns and snowflake ids stay whole beside a broken line; what does not fit int64 is one bad line."""
    moment = 1_700_000_000_000_000_000
    rows = [f"{9 * 10**18 + n % 3},{n},{moment + n}" for n in range(30)]
    text = "\n".join(["user_id,item_id,timestamp", *rows, "broken line", f"99{moment},1,{moment}"]) + "\n"
    source = csv(tmp_path, text, on_error="skip", time_unit="ns").open("train", 0)
    assert len(source.histories.items) == 30 and len(source.histories.users) == 3
    assert source.statistics["notes"][0].startswith("2 rows were left out")


def test_one_word_among_times_or_flags(tmp_path: Path) -> None:
    """It is named by line, column and word, or its line is left out."""
    for row, column in (("1,9,soon,1", "timestamp"), ("1,9,35,yes", "click"), ("1,9,35.5,1", "timestamp")):
        text = f"user_id,item_id,timestamp,click\n1,4,10,1\n1,5,20,0\n\n{row}\n1,6,30,\n1,7,40,1.0\n"
        said = refused(csv(tmp_path, text, actions=["click"]))
        assert f"log.csv line 5: {row.split(',')[2 if column == 'timestamp' else 3]!r} in column {column!r}" in said, (
            said
        )
        source = csv(tmp_path, text, actions=["click"], on_error="skip").open("train", 0)
        assert source.histories.items.tolist() == [4, 5, 6, 7]
        assert source.histories.features["action"].tolist() == [1, 0, 0, 1]


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    """Packed and plain CSV are read together; Parquet beside CSV is refused; a folder without a log says so."""
    import gzip

    (tmp_path / "a.csv").write_text("user_id,item_id,timestamp\n1,4,10\n1,5,20\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"user_id,item_id,timestamp\n1,6,30\n"))
    data = InteractionsData(str(tmp_path), cache=str(tmp_path / "cache"))
    assert data.open("train", 0).histories.items.tolist() == [4, 5, 6]
    pq.write_table(pa.table(GOOD), tmp_path / "c.parquet")
    assert "has Parquet (" in refused(data)
    (tmp_path / "none").mkdir()
    assert "has no file that ends in .parquet" in refused(InteractionsData(str(tmp_path / "none")))


def test_an_empty_text_is_no_user(tmp_path: Path) -> None:
    """In Parquet as in CSV."""
    table = {**GOOD, "user_id": ["a", "", "a"]}
    assert "row 1 (the first is 0): no value in column 'user_id'" in refused(log(tmp_path, table))


def test_a_split_time_outside_the_log(tmp_path: Path) -> None:
    """The message names the times that the log has."""
    said = refused(log(tmp_path, GOOD, split="time", split_time=5))
    assert "data.split_time: no user has two events before 5; the log has times from 10 to 30 (s)" in said


def test_a_unit_that_does_not_look_right_is_noted(tmp_path: Path) -> None:
    """A unit that is given is believed, and doubted aloud."""
    table = {**GOOD, "timestamp": [1_650_000_000_000 + n for n in range(3)]}
    notes = log(tmp_path, table, time_unit="us").open("train", 0).statistics["notes"]
    assert notes == ["times such as 1650000000001 look like ms, but data.time_unit is 'us'"]


def test_what_was_read_is_told_when_only_the_last_are_kept(tmp_path: Path) -> None:
    """The first stage is the whole log."""
    table = {"user_id": [1] * 9, "item_id": list(range(9)), "timestamp": list(range(9))}
    stages = log(tmp_path, table, last=4).open("train", 0).statistics["stages"]
    assert [(stage["name"], stage["events"]) for stage in stages] == [("read", 9), ("last 4 of each user", 4)]


def test_csv_forms(tmp_path: Path) -> None:
    """Tabs, gzip, a missing last line end, an empty file beside others, and a header alone."""
    import gzip

    (tmp_path / "a.tsv").write_text("user_id\titem_id\ttimestamp\n1\t4\t10\n1\t5\t20\n1\t6\t30")
    source = InteractionsData(str(tmp_path / "a.tsv"), cache=str(tmp_path / "cache")).open("train", 0)
    assert source.histories.items.tolist() == [4, 5, 6]
    packed = gzip.compress(b"user_id,item_id,timestamp\n1,4,10\n1,5,20\n1,6,30\n")
    (tmp_path / "b.csv.gz").write_bytes(packed)
    (tmp_path / "c.csv").write_text("user_id,item_id,timestamp\n")
    paths = [str(tmp_path / name) for name in ("b.csv.gz", "c.csv")]
    source = InteractionsData(paths, cache=str(tmp_path / "cache")).open("train", 0)
    assert source.histories.items.tolist() == [4, 5, 6]
    (tmp_path / "d.csv.gz").write_bytes(packed[:-9])
    assert "d.csv.gz cannot be read" in refused(
        InteractionsData(str(tmp_path / "d.csv.gz"), cache=str(tmp_path / "cache"))
    )


def test_other_settings_are_another_cache(tmp_path: Path) -> None:
    """A cache is used only for the log and the settings that it was made from."""
    assert len(log(tmp_path, GOOD).open("train", 0).catalogue) == 3
    kept = log(tmp_path, {**GOOD, "item_id": [4, 4, 4]}).open("train", 0)  # the file changed
    assert kept.catalogue.tolist() == [4]
    assert "no user has the 3 events after its filters" in refused(log(tmp_path, GOOD, min_item_events=2))


def test_a_damaged_cache_is_not_used(tmp_path: Path) -> None:
    """A file of the cache that is missing or cut short is noticed before anything is trained."""
    data = log(tmp_path, GOOD)
    data.open("train", 0)
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    file = folder / "histories-00000.parquet"
    file.write_bytes(file.read_bytes()[:-5])
    assert "is damaged: remove it" in refused(data)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        pytest.skip("needs root to make a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_while_grouping(tmp_path: Path, small_disk: Path) -> None:
    """It says where there is no room, and once there is, the run goes on."""
    count = 100_000
    pq.write_table(
        pa.table({name: pa.array(range(count)) for name in ("user_id", "item_id", "timestamp")}), tmp_path / "a.parquet"
    )
    said = refused(InteractionsData(str(tmp_path / "a.parquet"), cache=str(small_disk)))
    assert f"no room left in {small_disk}" in said and "data.cache" in said


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"paths": ()}, "data.paths must be"),
        ({"actions": "click"}, "data.actions must be a list of columns"),
        ({"split": "time"}, "data.split_time goes with"),
        ({"context": ["time"]}, "'time' is the name of a feature of every batch"),
        ({"context": ["a"], "candidate": ["a"]}, "name a column twice"),
        ({"last": 2}, "data.last must be at least 3"),
        ({"delimiter": "::"}, "data.delimiter must be one character"),
        ({"memory_gb": 0}, "data.memory_gb must be at least 0.1"),
    ],
)
def test_settings_are_checked_when_they_are_made(section: dict[str, Any], says: str) -> None:
    """The message names the key to change."""
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        InteractionsData(**{"paths": "log.parquet", **section})


def test_histories_that_do_not_fit(tmp_path: Path) -> None:
    """Histories larger than memory_gb are refused in words."""
    count = 20_000_000 // 16
    table = {name: pa.array(range(count)) for name in ("item_id", "timestamp")}
    data = log(tmp_path, {"user_id": pa.array([n // 9 for n in range(count)]), **table}, memory_gb=0.1)
    data.prepare(lambda done, what: None)
    object.__setattr__(data, "memory_gb", 0.01)
    assert "the histories take 0.0 GB in every worker: set data.shuffle" in refused(data)
