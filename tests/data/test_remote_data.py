"""Data on object storage is read as on local disk; what is wrong with it is said in one line."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import Command, refused
from nestpipe.data.criteo import CriteoData
from nestpipe.data.parquet import ParquetData
from nestpipe.data.paths import find_files
from nestpipe.data.source import DataError, Source
from nestpipe.data.stream import Stream
from nestpipe.files import FileError
from object_storage import Server, serving
from tiny import samples_of, write_criteo

RECIPE = """
[data]
kind = "parquet"
paths = "{path}"
sparse = {{ item = "item_id" }}
dense = ["price"]
label = "clicked"
[model]
kind = "dlrm"
dim = 4
bottom = [4]
top = [4]
[train]
batch_size = 10
log_every = 1
"""


@pytest.fixture(scope="module")
def bucket(storage: Server) -> str:
    return storage.bucket("data")


def put(storage: Server, file: Path, key: str) -> None:
    storage.client().upload_file(str(file), "data", key)


def write_rows(path: Path, rows: int, first: int = 0) -> Path:
    numbers = range(first, first + rows)
    columns = {"item_id": list(numbers), "price": [n / 7 for n in numbers], "clicked": [n % 2 for n in numbers]}
    pq.write_table(pa.table(columns), path, row_group_size=40)
    return path


def all_of(source: Source) -> list[object]:
    return [sample for batch in Stream(source, 16) for sample in samples_of(batch)]


@pytest.fixture(scope="module")
def days(storage: Server, bucket: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same files in a local folder and in a bucket."""
    folder = tmp_path_factory.mktemp("days")
    for name in ("b/two.parquet", "a/one.parquet", "_temporary/three.parquet", "a/notes.txt", "empty.parquet"):
        (folder / name).parent.mkdir(exist_ok=True)
        if (name.endswith("e.parquet") and "_" not in name) or "two" in name:
            write_rows(folder / name, 100, len(name))
        else:
            (folder / name).write_bytes(b"")
        put(storage, folder / name, f"days/{name}")
    return folder, f"{bucket}/days"


@pytest.mark.parametrize("what", ["", "/a", "/a/one.parquet", "/*/*.parquet", "/**/*.parquet", "/[ab]/t*.parquet"])
def test_the_same_files_in_the_same_order(days: tuple[Path, str], what: str) -> None:
    """A folder, a glob and a file stand for the same files on object storage as on local disk."""
    names = [
        [str(file).removeprefix(root) for file in find_files("paths", root + what, "*.parquet")]
        for root in (str(days[0]), days[1])
    ]
    assert names[0] == names[1] and names[0]


def test_the_same_samples(days: tuple[Path, str]) -> None:
    """Parquet gives the same samples, and units, from object storage as from local disk."""
    here, there = (ParquetData(str(root), {"item": "item_id"}, "clicked", ["price"]).open("train", 0) for root in days)
    assert all_of(here) == all_of(there) and here.extent == there.extent > 100


def test_criteo(storage: Server, bucket: str, tmp_path: Path) -> None:
    """Text is read by position from object storage, too."""
    for file in write_criteo(tmp_path):
        put(storage, file, f"criteo/{file.name}")
    here, there = (CriteoData(path).open("train", 0) for path in (str(tmp_path), f"{bucket}/criteo/day_*"))
    assert all_of(here) == all_of(there)
    half = there.extent // 2
    parts = [list(there.read(a, b, 0)) for a, b in ((0, half), (half, there.extent))]
    assert sum(len(batch) for part in parts for batch, _ in part) == len(all_of(here))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("s3://data/none.parquet", DataError, "data.paths: no such file: s3://data/none.parquet"),
        ("s3://data/none/*", DataError, "data.paths: no file matches s3://data/none/"),
        ("s3://nowhere/none", FileError, "data.paths: s3://nowhere/none: no bucket 'nowhere'"),
        ("s3://nowhere/*", FileError, "data.paths: s3://nowhere.*: no bucket 'nowhere'"),
        ("s3://data/days/_temporary", DataError, "no such file|has no"),
    ],
)
def test_what_is_missing(days: tuple[Path, str], name: str, kind: type[Exception], message: str) -> None:
    """The line names the key of the recipe, and whether a file or a bucket is missing."""
    with pytest.raises(kind, match=message):
        find_files("paths", name, "*.csv")


def test_a_lost_server_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`on_error = "skip"` leaves out what is damaged, never what cannot be reached just now."""
    monkeypatch.setattr("nestpipe.files.patience._limit", 1.0)
    with serving() as server:
        server.bucket("data")
        path = f"s3://data/rows.parquet?endpoint_override=127.0.0.1:{server.port}&scheme=http"
        put(server, write_rows(tmp_path / "rows", 100), "rows.parquet")
        data = ParquetData(path, {"item": "item_id"}, "clicked", on_error="skip")
        source = data.open("train", 0)
        server.stop()
        with pytest.raises(FileError, match=r"rows.parquet.*did not answer within 1 s"):
            list(source.read(0, source.extent, 0))
        assert source.skipped is not None and not source.skipped.parts


def train(folder: Path, path: str, *more: str, **variables: str) -> Command:
    (folder / "my.toml").write_text(RECIPE.format(path=path))
    return Command(folder, ["train", "my.toml", "--quiet", *more], variables=variables)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "without", "words"),
    [
        ("s3://data/none.parquet", (), ["data.paths", "no such file: s3://data/none.parquet"]),
        ("s3://nowhere/x", (), ["no bucket 'nowhere'", "create it"]),
        ("ftp://nowhere/x", (), ["no file system 'ftp'"]),
    ],
)
def test_bad_input(
    storage: Server, days: tuple[Path, str], tmp_path: Path, path: str, without: tuple[str, ...], words: list[str]
) -> None:
    """A training that names what is not there ends with one line and exit code 2."""
    ended = train(tmp_path, path, **storage.variables).wait()
    refused(ended, *words)
    assert ended.code == 2


def test_a_run_directory_is_local(tmp_path: Path) -> None:
    """A URL as run directory is refused, instead of becoming a local folder of that name."""
    ended = Command(tmp_path, ["train", "dlrm", "--run-dir", "s3://data/run"]).wait()
    refused(ended, "--run s3://data/run: a run directory is local", "checkpoint.path")
    assert ended.code == 2 and not (tmp_path / "s3:").exists()


@pytest.mark.slow
def test_who_may_not_read(tmp_path: Path) -> None:
    """Without credentials, or without permission, a training ends with one line and exit code 2."""
    with serving(auth_after=3) as server:
        server.bucket("closed")
        server.client("iam").create_user(UserName="nobody")
        key = server.client("iam").create_access_key(UserName="nobody")["AccessKey"]
        none = {**server.variables, "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": str(tmp_path)}
        mine = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
        for variables, words in (
            (none, ["no credentials for", "set AWS_ACCESS_KEY_ID"]),
            ({**server.variables, **mine}, ["no permission"]),
        ):
            ended = train(tmp_path, "s3://closed/rows.parquet", **variables).wait()
            refused(ended, *words)
            assert ended.code == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "frozen"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_server_that_goes_away_in_mid_epoch(tmp_path: Path, how: str, workers: int) -> None:
    """One line that names the file, within the deadline (half of --timeout), and no process is left."""
    with serving() as server:
        server.bucket("data")
        put(server, write_rows(tmp_path / "rows", 4000), "rows.parquet")
        settings = ["--timeout", "12", "--set", "train.epochs=1000", "--set", f"train.workers={workers}"]
        command = train(tmp_path, "s3://data/rows.parquet", *settings, **server.variables)
        command.once_training(workers) if workers > 1 else _once_training(command)
        server.freeze() if how == "frozen" else server.stop()
        ended = command.wait(60)
        refused(ended, "s3://data/rows.parquet", "did not answer within 6 s", "check that the server runs")
        assert ended.code == 1


def _once_training(command: Command) -> None:
    until = time.monotonic() + 60
    while not (command.run / "metrics.jsonl").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_variables_of_the_tests_are_set(bucket: str) -> None:
    """No test of this file may reach Amazon."""
    assert os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://127.0.0.1")
