"""docs/checkpoints.md is enough to read a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from made import CHANGED, make
from nestpipe.checkpoint.manifest import name_of


def test_the_documented_reader_reads_a_checkpoint(tmp_path: Path) -> None:
    """The program in the docs, run verbatim, finds every row of a chain with removed keys, bit for bit."""
    tables = make(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(program[0], names)
    found = names["rows"](str(tmp_path), name_of(CHANGED))  # type: ignore[operator]
    wanted = {(table, key): values for table, rows in tables.items() for key, (values, _) in rows.items()}
    assert {place: row.tobytes() for place, row in found.items()} == {k: v.tobytes() for k, v in wanted.items()}
