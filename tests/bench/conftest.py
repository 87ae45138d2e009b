"""Paths of helpers that tests of the benchmarks share with others."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # `ranks`
