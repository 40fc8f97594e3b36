"""What is written past the page cache is what was given, whatever its size, and wherever that cache cannot be passed by."""

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

ROOM = direct_file._ROOM


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, ROOM - 1, ROOM, ROOM + 1, ROOM + 4096, 2 * ROOM + 5000])
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
            count = draw.choice([1, 4096, 10_000, ROOM, 3 * ROOM])
            file.write(memoryview(data)[at : at + count])
            at += count
        digest = file.end()
    assert (tmp_path / "file").read_bytes() == data and digest == hashlib.sha256(data).hexdigest()
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")


def test_a_disk_that_takes_less_than_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short write of odd length, as before a full disk: the rest goes through the page cache, or says why it cannot."""
    real = os.write
    room = [ROOM + 1000]

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
        file.write(bytes(2 * ROOM))
    assert (tmp_path / "file").stat().st_size == ROOM + 1000


def test_a_file_system_that_takes_the_flag_but_not_the_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def write(file: int, view: memoryview) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, view)

    monkeypatch.setattr(os, "write", write)
    data = random.Random(1).randbytes(ROOM + 5000)
    with DirectFile(tmp_path / "file") as file:
        file.write(data)
        assert file.end() == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "file").read_bytes() == data
