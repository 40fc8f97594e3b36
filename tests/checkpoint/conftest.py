"""Tests of checkpoints use the helpers of tests/ and of tests/cli too."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "cli")]
