"""Whatever is wrong with a command, a recipe or its data is answered by one line that names what to change.

With several workers, too, it is the line of the worker that met the fault, not what its end caused on the others.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import Command, nestpipe, refused, small
from nestpipe.cli.recipes import RECIPES
from nestpipe.comm.world import World
from nestpipe.config.recipe import load_recipe
from nestpipe.data import kinds as data_kinds
from nestpipe.models import kinds as model_kinds
from nestpipe.train.build import open_source

CRITEO_LINE = "\t".join(["1", *map(str, range(13)), *(f"{i:08x}" for i in range(26))])
PARQUET = """
[data]
kind = "parquet"
paths = ["rows.parquet"]
sparse = { item = "item_id" }
dense = ["price"]
label = "clicked"
[model]
kind = "dlrm"
dim = 4
bottom = [4]
top = [4]
"""


def criteo(folder: Path, lines: list[str], *arguments: str) -> list[str]:
    (folder / "train.txt").write_text("\n".join(lines) + "\n")
    return ["train", "criteo", "--set", "train.batch_size=2", "--workers", "1", *arguments]


def parquet(folder: Path, **columns: object) -> list[str]:
    """Arguments of a training on these columns instead of the right ones; None leaves a column out."""
    rows = {"item_id": [1, 2, 3, 4], "price": [0.5, 1.0, 1.5, 2.0], "clicked": [0, 1, 0, 1], **columns}
    pq.write_table(pa.table({k: v for k, v in rows.items() if v is not None}), folder / "rows.parquet")
    (folder / "rows.toml").write_text(PARQUET)
    return ["train", "rows.toml"]


@pytest.mark.parametrize(
    ("workers", "setting", "words"),
    [
        (1, "modle.dim=8", ["'modle.dim'", "'model.dim'"]),
        (2, "model.dmi=8", ["'model.dmi'", "'model.dim'"]),
        (1, "model.dim=big", ["model.dim must be a whole number", "'big'"]),
        (2, "tables.lr=0", ["tables.lr must be above 0"]),
        (
            1,
            "pipeline.schedule=nestde",
            ["pipeline.schedule must be one of 'serial'", "'nestde'; did you mean 'nested'?"],
        ),
        (
            2,
            "pipeline.schedule=nestde",
            ["pipeline.schedule must be one of 'serial'", "'nestde'; did you mean 'nested'?"],
        ),
        (1, "pipeline.micro_batches=0", ["pipeline.micro_batches must be from 1 to 32767"]),
        (2, "model.kind=hstu", ["unknown key 'model.bottom'"]),
        (1, "train.workers", ["section.key=value", "'train.workers'"]),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, workers: int, setting: str, words: list[str]) -> None:
    """A misspelt section or key, a wrong type or a value out of range: the line names key and remedy, and nothing starts."""
    refused(nestpipe(tmp_path, *small(setting, workers=workers)), *words)
    assert not list(tmp_path.glob("run*"))


def test_a_wrong_flag_is_named(tmp_path: Path) -> None:
    """Flags are settings: they are checked alike."""
    refused(nestpipe(tmp_path, *small(), "--steps", "0"), "train.steps must be at least 1, not 0")
    refused(nestpipe(tmp_path, *small(), "--timeout", "-1"), "train.timeout must be above 0")
    refused(nestpipe(tmp_path, *small(), "--workers", "0"), "train.workers must be at least 1")
    refused(nestpipe(tmp_path, "recipe", "tabels"), "'tabels'", "tables")
    refused(nestpipe(tmp_path, "bench", "no-such-ladder"), "no-such-ladder", "dlrm")


def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """No such file: the line lists what there is; not TOML: it names file and line; click data under hstu: both sections."""
    refused(nestpipe(tmp_path, "train", "no/such.toml"), "no/such.toml", "dlrm")
    (tmp_path / "bad.toml").write_text('[data]\nkind = "clicks"\nsamples = = 3\n')
    refused(nestpipe(tmp_path, "train", "bad.toml"), "bad.toml", "line 3")
    (tmp_path / "mixed.toml").write_text('[data]\nkind = "clicks"\n[model]\nkind = "hstu"\n')
    refused(nestpipe(tmp_path, "train", "mixed.toml"), "'hstu' needs sequences", "data.kind")


def test_bad_text_data_is_named_by_file_and_line(tmp_path: Path) -> None:
    """A missing file, a line with too few columns, an id that is not hexadecimal, no lines at all."""
    refused(nestpipe(tmp_path, "train", "criteo", "--workers", "1"), "data.paths", "train.txt")
    lines = [CRITEO_LINE] * 20
    short = criteo(tmp_path, [*lines[:4], "1\t2\t3", *lines])
    refused(nestpipe(tmp_path, *short), "train.txt line 5", "3 columns", "40")
    refused(
        nestpipe(tmp_path, *criteo(tmp_path, [*lines[:7], CRITEO_LINE[:-1] + "x", *lines])), "train.txt line 8", "hex"
    )
    arguments = criteo(tmp_path, [])
    (tmp_path / "train.txt").write_text("")
    refused(nestpipe(tmp_path, *arguments), "no samples", "[data]")


def test_bad_parquet_data_is_named_by_file_and_column(tmp_path: Path) -> None:
    """A mapped column that is missing or of the wrong type, a file that was cut off, fewer rows than workers, no rows."""
    refused(nestpipe(tmp_path, *parquet(tmp_path, price=None)), "rows.parquet", "'price'", "data.dense", "item_id")
    refused(nestpipe(tmp_path, *parquet(tmp_path, item_id=[0.5, 1.0, 2.0, 3.0])), "rows.parquet", "'item_id'", "double")
    refused(nestpipe(tmp_path, *parquet(tmp_path, clicked=[0, None, 1, 1])), "rows.parquet row 1", "'clicked'", "null")
    arguments = parquet(tmp_path)
    whole = (tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "rows.parquet").write_bytes(whole[: len(whole) // 2])
    refused(nestpipe(tmp_path, *arguments), "rows.parquet", "Parquet")
    empty = {"item_id": pa.array([], pa.int64()), "price": pa.array([], pa.float32())}
    refused(nestpipe(tmp_path, *parquet(tmp_path, **empty, clicked=pa.array([], pa.int8()))), "no samples", "[data]")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A run is never written over another one, and a place that cannot be written is found out before training."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes").write_text("mine")
    refused(nestpipe(tmp_path, *small(), run="taken"), "taken' already exists", "--run")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes"]
    refused(nestpipe(tmp_path, *small(), run="taken/notes/run"), "taken/notes/run", "--run")
    if os.geteuid():
        (tmp_path / "taken").chmod(0o555)
        refused(nestpipe(tmp_path, *small(), run="taken/run"), "taken/run", "Permission denied", "--run")
    for place in ("no/folder/x.json", "taken"):
        command = Command(tmp_path, [*small(), "--json", place])
        refused(command.wait(), "--json", place)
        assert not command.run.exists()


def test_a_port_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A port in use, or that is none, ends the launch before workers start."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused(nestpipe(tmp_path, *small(workers=2), "--port", port), port, "--port")
    refused(nestpipe(tmp_path, *small(workers=2), "--port", "70000"), "70000", "--port")


@pytest.mark.slow
def test_a_failing_worker_speaks_for_all(tmp_path: Path) -> None:
    """Of two workers the one that meets the fault is heard, here worker 1, in whose half there is a bad line."""
    lines = [CRITEO_LINE] * 200
    bad = criteo(tmp_path, [*lines, "1\t2\t3", *lines[:120]], "--workers", "2")
    refused(nestpipe(tmp_path, *bad), "train.txt line 201", "3 columns", "40")


def test_fewer_samples_than_workers_are_refused() -> None:
    """The line says how many workers there can be."""
    recipe = load_recipe("dlrm", ["data.samples=2"], data_kinds.KINDS, model_kinds.KINDS, RECIPES)
    open_source(recipe, "train", World(0, 2, {}, 1.0))
    with pytest.raises(ValueError, match=r"2 samples, fewer than the 3 workers: use --workers 2 or more data"):
        open_source(recipe, "train", World(0, 3, {}, 1.0))
