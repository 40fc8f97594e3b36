"""A log on object storage is grouped as on local disk."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from nestpipe.data.interactions.data import InteractionsData
from nestpipe.data.stream import Stream
from nestpipe.files import FileError
from object_storage import Server
from tiny import samples_of, write_events


def test_a_remote_log_is_the_local_one(tmp_path: Path, storage: Server) -> None:
    """Parquet and packed CSV in a bucket give the batches of the same files on disk; a change there is noticed."""
    bucket = storage.bucket("logs")
    local = write_events(tmp_path / "events")
    for path in sorted(local.iterdir()):
        storage.client().upload_file(str(path), "logs", f"parquet/{path.name}")
        pacsv.write_csv(pq.read_table(path), tmp_path / "one.csv")
        packed = gzip.compress((tmp_path / "one.csv").read_bytes())
        storage.client().put_object(Bucket="logs", Key=f"csv/{path.stem}.csv.gz", Body=packed)

    def samples(paths: str) -> list[bytes]:
        section = {"actions": ["click"], "context": ["place"], "weight": "weight"}
        data = InteractionsData(paths, **section, negatives=2, cache=str(tmp_path / "cache"))
        return [sample for batch in Stream(data.open("train", 1), 16) for sample in samples_of(batch)]

    expected = samples(str(local))
    assert samples(f"{bucket}/parquet") == expected
    assert samples(f"{bucket}/csv/*.csv.gz") == expected
    storage.client().delete_object(Bucket="logs", Key="csv/0.csv.gz")
    assert samples(f"{bucket}/csv/*.csv.gz") != expected


def test_a_bucket_that_is_not_there(tmp_path: Path, storage: Server) -> None:
    """One line names the bucket."""
    with pytest.raises(FileError, match="no-such"):
        InteractionsData("s3://no-such/log/*.parquet", cache=str(tmp_path)).open("train", 0)
