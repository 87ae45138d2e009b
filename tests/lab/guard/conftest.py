"""Tests of guardrails import `loops`, beside them, and `ranks` of tests/distributed."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "distributed")]
