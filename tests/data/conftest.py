"""Paths of `write_files`, and of `ranks`, which starts several ranks."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
