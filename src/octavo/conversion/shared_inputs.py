"""Layers of a user's module that share an input, found in the source of its `forward`.

They are calls `self.a(x)`, `self.b(x)` of the same name without an assignment in between. A mistake costs time, never
correctness: a layer that receives another tensor than its group computes alone.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from tokenize import TokenError
from typing import Any

from torch import nn


def find_shared(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of linear children of a module that its `forward` calls on the same variable, by group."""
    layers = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
    forward = getattr(type(module), "parent", type(module)).forward
    function = parsed(forward) if len(layers) > 1 and isinstance(forward, Hashable) else None
    if function is None or not function.args.args:
        return []
    owner = function.args.args[0].arg
    groups: dict[tuple[str, int], list[str]] = {}
    assigned: dict[str, int] = {}
    for statement in _straight_line(function.body):
        for name, argument in _calls(statement, owner):
            if name in layers:
                groups.setdefault((argument, assigned.get(argument, 0)), []).append(name)
        for variable in _assigned(statement):
            assigned[variable] = assigned.get(variable, 0) + 1
    return [tuple(names) for names in groups.values() if len(set(names)) == len(names) > 1]


@lru_cache(maxsize=64)
def parsed(forward: Callable[..., Any]) -> ast.FunctionDef | None:
    """Return a parsed `forward` without its decorators; None if there is no source. A model's blocks share one."""
    try:
        source = textwrap.dedent(inspect.getsource(forward))
        return next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    except (OSError, TypeError, SyntaxError, StopIteration, TokenError):  # the last: lines of another file
        return None


def _straight_line(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield statements in execution order, for a `with` its items and then its body."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from statement.items
            yield from _straight_line(statement.body)
        else:
            yield statement


def _calls(statement: ast.AST, owner: str) -> Iterator[tuple[str, str]]:
    """Yield (child, variable) for each call `self.child(variable)` in a statement, in the order of the source."""
    calls = [node for node in _certain(statement) if isinstance(node, ast.Call) and len(node.args) == 1]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        target, argument = call.func, call.args[0]
        if not (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == owner):
            continue
        if isinstance(argument, ast.Name):
            yield target.attr, argument.id


def _certain(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below one, except those in branches, loops and functions, which may not run, or run often."""
    simple = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return | ast.withitem
    doubtful = ast.Lambda | ast.IfExp | ast.BoolOp | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    if isinstance(node, simple) or (isinstance(node, ast.expr | ast.keyword) and not isinstance(node, doubtful)):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _certain(child)


def _assigned(statement: ast.AST) -> set[str]:
    """Return the variables that a statement may assign."""
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
