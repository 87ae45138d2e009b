"""Layers that cannot compute in FP8 because of code: their own `forward`, or that of the module around them.

A module may read the weight of a layer and multiply by it itself. That is found in the source of what its `forward` may
run, as `self.qkv.weight` in an argument; of a branch that the module's own attributes decide, such as
`if self.q_bias is None`, only the part that runs counts. A layer that is named in any other way may be called, and is
planned as others are: the first step tells (`octavo.conversion.first_step`).
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from octavo.conversion.linears import find_own_forwards
from octavo.conversion.roles import is_layer
from octavo.conversion.shared_inputs import parsed
from octavo.nn.probe import judge_once
from octavo.nn.recognised import functions_of

_DESCRIBES = ("bias", "in_features", "out_features", "weight")
"""Attributes that a module reads of a layer without calling it."""


def find_unfit(model: nn.Module, layers: Iterable[nn.Module]) -> dict[int, str]:
    """Return the `id` of each layer that code rules out, with the reason."""
    layers = list(layers)
    own = find_own_forwards(layers)
    why = "{}, a subclass of nn.Linear, computes more than a linear layer"
    reasons = {id(layer): why.format(type(layer).__name__) for layer in layers if id(layer) in own}
    return reasons | find_uncalled(model)


def find_uncalled(model: nn.Module) -> dict[int, str]:
    """Return the `id` of each layer whose parent reads its weight and never calls it, with the reason."""
    children_of, found = judge_once(_uncalled_children), {}
    for module in model.modules():
        layers = {name: child for name, child in module.named_children() if is_layer(child)}
        for name in children_of(module) if layers else ():
            if name in layers:
                found[id(layers[name])] = f"{type(module).__name__} reads its weight and never calls it"
    return found


def _uncalled_children(module: nn.Module) -> frozenset[str]:
    """Return the names of children of which the code of a module reads the weight and does nothing else."""
    reads: set[str] = set()
    others: set[str] = set()
    for function in functions_of(module):
        tree = parsed(function)
        if tree is None or not tree.args.args:
            continue
        owner = tree.args.args[0].arg
        for child, attribute in _uses(tree, owner, module):
            (reads if attribute == "weight" else others if attribute not in _DESCRIBES else set()).add(child)
    return frozenset(reads - others)


def _uses(node: ast.AST, owner: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (child, attribute) for each `self.child.attribute` in code that may run, ("child", "") for `self.child`."""
    if isinstance(node, ast.If | ast.IfExp) and (value := _value_of(node.test, owner, module)) is not _UNDECIDED:
        taken = node.body if value else node.orelse
        for statement in taken if isinstance(taken, list) else [taken]:
            yield from _uses(statement, owner, module)
        return
    if isinstance(node, ast.Attribute):
        if (child := _child_of(node.value, owner)) is not None:
            yield child, node.attr
            return
        if (child := _child_of(node, owner)) is not None:
            yield child, ""
            return
    for part in ast.iter_child_nodes(node):
        yield from _uses(part, owner, module)


def _child_of(node: ast.AST, owner: str) -> str | None:
    """Return the name of `self.name`, None for other expressions."""
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner
    return node.attr if isinstance(node, ast.Attribute) and is_attribute else None


_UNDECIDED = object()


def _value_of(test: ast.expr, owner: str, module: nn.Module) -> Any:
    """Return the value of a condition on attributes of the module, whether they are None or true, or `_UNDECIDED`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = _value_of(test.operand, owner, module)
        return value if value is _UNDECIDED else not value
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Is | ast.IsNot):
        value, constant = _attribute(module, _child_of(test.left, owner)), test.comparators[0]
        if value is not _UNDECIDED and isinstance(constant, ast.Constant) and constant.value is None:
            return (value is None) == isinstance(test.ops[0], ast.Is)
        return _UNDECIDED
    name = _child_of(test, owner)
    value = _attribute(module, name) if name != "training" else _UNDECIDED
    return value if isinstance(value, bool | None) else _UNDECIDED


def _attribute(module: nn.Module, name: str | None) -> Any:
    """Return an attribute, or `_UNDECIDED` without one.

    A library that warns of its name, as diffusers does of those that are in its config, warns users who read it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _UNDECIDED if name is None else getattr(module, name, _UNDECIDED)
