"""Tests of several ranks import `ranks`, the helper beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
