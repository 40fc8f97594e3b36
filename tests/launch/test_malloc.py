"""What malloc does with large blocks in a worker process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from nestpipe.launch.malloc import MallocError, _apply

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")

FAULTS = """
import resource, sys
from nestpipe.launch.malloc import keep_large_blocks
from nestpipe.train.memory import HeapTrimmer, resident_bytes
print(keep_large_blocks())
for _ in range(3): bytearray(100 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): bytearray(100 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
trimmer, high = HeapTrimmer(), resident_bytes()
trimmer.SECONDS = 0.0
trimmer.maybe_trim()
print(high - resident_bytes())
"""


def run(**variables: str) -> tuple[str, int, int]:
    """What was done; page faults of ten blocks of 100 MB, one after the other; bytes that a trim gives back."""
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "NESTPIPE_MALLOC", "GLIBC_", "LD_PRE"))
    }
    out = subprocess.check_output([sys.executable, "-c", FAULTS], env={**clean, **variables}, text=True)
    said, faults, returned = out.splitlines()
    return said, int(faults), int(returned)


def test_blocks_are_reused_and_still_go_back() -> None:
    """Promise: a large block that is freed serves the next one without page faults; a trim gives it to the system."""
    pages = (10 * 100 << 20) // resource.getpagesize()
    said, faults, returned = run()
    assert said == "large blocks are kept for reuse" and faults < pages / 20 and returned > 90e6
    said, faults, _ = run(NESTPIPE_MALLOC="default")
    assert said == "as it is, by NESTPIPE_MALLOC" and faults > pages / 2  # the test above is able to fail


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, "as MALLOC_MMAP_THRESHOLD_ says"),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}, "as GLIBC_TUNABLES says"),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "another one, by LD_PRELOAD"),
    ],
)
def test_what_the_user_has_set_stays(variables: dict[str, str], said: str) -> None:
    """Settings of glibc, and another malloc, are left alone."""
    assert _apply(variables) == said


def test_a_wrong_switch_is_refused() -> None:
    """One line that says what to change."""
    with pytest.raises(MallocError, match="NESTPIPE_MALLOC must be 'reuse' or 'default', not 'off'"):
        _apply({"NESTPIPE_MALLOC": "off"})
