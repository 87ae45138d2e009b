"""Imports point down: the contract in pyproject.toml holds, and it covers every module there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_imports_point_down_the_layers() -> None:
    linter = pytest.importorskip("importlinter.cli", reason="needs import-linter")
    assert linter.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, octavo, octavo.data, octavo.models, octavo.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
