"""Tests of several ranks import `ranks`, which is in tests/distributed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
