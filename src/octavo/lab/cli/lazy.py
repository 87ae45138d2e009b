"""Commands that are imported when they are called: `octavo --help` needs neither their modules nor PyTorch."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from cyclopts import App


def add_commands(app: App, package: str, commands: Mapping[str, str]) -> None:
    """Add commands to an app, whose help lists them in this order.

    Args:
        package: holds the modules of the commands.
        commands: `module:function` by name of the command. The function's docstring is its help.
    """
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations  # a package of this repository
    directory = Path(spec.submodule_search_locations[0])
    for position, (name, place) in enumerate(commands.items()):
        module, function = place.split(":")
        text = (directory / f"{module}.py").read_text(encoding="utf-8")
        about = _unwrapped(_docstring(text, function))
        app.command(f"{package}.{place}", name=name, help=about, sort_key=position)


def _docstring(source: str, function: str) -> str:
    """Return the docstring of a top-level function, from the source of its module."""
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return inspect.cleandoc(ast.get_docstring(next(node for node in functions if node.name == function)) or "")


def _unwrapped(doc: str) -> str:
    """Return a docstring with each paragraph before the parameters on one line, which the terminal wraps."""
    about, mark, parameters = doc.partition("\n\nParameters\n")
    paragraphs = (text if text.startswith("    ") else " ".join(text.split()) for text in about.split("\n\n"))
    return "\n\n".join(paragraphs) + mark + parameters
