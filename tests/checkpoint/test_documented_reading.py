"""docs/checkpoints.md is enough to read a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from made import CHANGED, make
from nestpipe.checkpoint.folder import Folder
from nestpipe.checkpoint.manifest import name_of
from nestpipe.checkpoint.merge import merged_rows


@pytest.fixture
def documented_reader() -> Callable[[str, str], dict[tuple[str, int], np.ndarray]]:
    """The program in the docs, verbatim."""
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(program[0], names)
    return names["rows"]  # type: ignore[return-value]


def test_the_documented_reader_reads_a_checkpoint(
    tmp_path: Path, documented_reader: Callable[[str, str], dict[tuple[str, int], np.ndarray]]
) -> None:
    """It finds every row of a chain with removed keys, bit for bit."""
    tables = make(tmp_path)
    found = documented_reader(str(tmp_path), name_of(CHANGED))
    wanted = {(table, key): values for table, rows in tables.items() for key, (values, _) in rows.items()}
    assert {place: row.tobytes() for place, row in found.items()} == {k: v.tobytes() for k, v in wanted.items()}


def test_the_documented_reader_knows_keys_without_a_row(
    documented_reader: Callable[[str, str], dict[tuple[str, int], np.ndarray]],
) -> None:
    """In a run with delayed admission, groups of frequencies share the names of their tables with the groups of rows."""
    folder = Folder(Path(__file__).parent / "written_by_5591db0" / "checkpoints")
    last = folder.find()
    assert last is not None and [group.waiting for group in last.manifest.groups] == [False, True]
    names = last.manifest.groups[0].tables
    wanted = {
        (names[table], key): values.tobytes()
        for rows in merged_rows(folder.chain(last), 0)
        for table, key, values in zip(rows.tables.tolist(), rows.keys.tolist(), rows.values)
    }
    found = documented_reader(str(folder.path), last.path.name)
    assert {place: row.tobytes() for place, row in found.items()} == wanted
