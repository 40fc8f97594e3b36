"""Direct I/O writes the given bytes, whatever their size, and falls back where a file system has none."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
from pathlib import Path

import pytest

from nestpipe.checkpoint import direct_file
from nestpipe.checkpoint.direct_file import DirectFile

BUFFER = direct_file._BUFFER_BYTES


@pytest.mark.parametrize(
    "size", [0, 1, 4095, 4096, 4097, BUFFER - 1, BUFFER, BUFFER + 1, BUFFER + 4096, 2 * BUFFER + 5000]
)
@pytest.mark.parametrize("direct", [True, False])
def test_all_bytes_in_pieces_of_any_size(
    tmp_path: Path, size: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not direct:
        monkeypatch.setattr(direct_file, "_set_direct", lambda file, on: None)
    draw = random.Random(size)
    data = draw.randbytes(size)
    with DirectFile(tmp_path / "file") as file:
        at = 0
        while at < size:
            count = draw.choice([1, 4096, 10_000, BUFFER, 3 * BUFFER])
            file.write(memoryview(data)[at : at + count])
            at += count
        digest = file.end()
    assert (tmp_path / "file").read_bytes() == data and digest == hashlib.sha256(data).hexdigest()
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")


def test_a_short_write_of_a_nearly_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a short write of odd length, as before a full disk, the rest is written without direct I/O, or fails."""
    real = os.write
    room = [BUFFER + 1000]

    def write(file: int, view: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = min(len(view), room[0])
        if count % 4096:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT)
        room[0] -= count
        return real(file, view[:count])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"), DirectFile(tmp_path / "file") as file:
        file.write(bytes(2 * BUFFER))
    assert (tmp_path / "file").stat().st_size == BUFFER + 1000


def test_a_file_system_that_accepts_the_flag_but_not_the_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def write(file: int, view: memoryview) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, view)

    monkeypatch.setattr(os, "write", write)
    data = random.Random(1).randbytes(BUFFER + 5000)
    with DirectFile(tmp_path / "file") as file:
        file.write(data)
        assert file.end() == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "file").read_bytes() == data
