"""How much memory a worker uses, and for what."""

from __future__ import annotations

import os
from pathlib import Path

from nestpipe.engine.sparse import SparseStages


def memory_of(sparse: SparseStages) -> dict[str, int]:
    """Of this worker, now: its rows, and bytes of DRAM of tables (rows, state, index), of row buffers and of the process."""
    memory = {
        "rows": sum(len(store) for store in sparse.stores),
        "table_bytes": sum(store.nbytes() for store in sparse.stores),
        "buffer_bytes": sparse.buffers.bytes,
    }
    if sparse.ledger is not None:
        memory["ledger_bytes"] = sparse.ledger.nbytes()
    resident = resident_bytes()
    return memory if resident is None else {**memory, "resident_bytes": resident}


def resident_bytes() -> int | None:
    """None where the system does not say (not Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
