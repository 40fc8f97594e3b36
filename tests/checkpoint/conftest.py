"""Tests of checkpoints use the helpers of tests/ too (workers, training, samples)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
