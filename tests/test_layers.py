"""Imports point down: the contract in pyproject.toml holds, and it covers every module. Signatures stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_imports_point_down_the_layers() -> None:
    linter = pytest.importorskip("importlinter.cli", reason="needs import-linter")
    assert linter.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, octavo, octavo.data, octavo.models, octavo.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def parameters(function: ast.FunctionDef) -> int:
    found = function.args
    every = (*found.posonlyargs, *found.args, *found.kwonlyargs, found.vararg, found.kwarg)
    return len([each for each in every if each is not None and each.arg not in ("self", "cls")])


def is_compiled(function: ast.FunctionDef) -> bool:
    """Functions of Triton take pointers, strides and extents one by one."""
    return any("jit" in ast.unparse(each) for each in function.decorator_list)


def functions_that(is_too: Callable[[ast.FunctionDef], bool]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and not is_compiled(node) and is_too(node)
    ]


def test_functions_have_at_most_eight_parameters() -> None:
    found = functions_that(lambda node: parameters(node) > 8)
    assert not found, f"group what belongs together: {found}"


def test_functions_have_at_most_sixty_lines() -> None:
    found = functions_that(lambda node: (node.end_lineno or 0) - node.lineno >= 60)
    assert not found, f"longer than a screen, split them: {found}"
