"""Modules that were recognised by what their `forward` computes, and whether they still compute that."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from octavo._util.compiler import assume_constant_result
from octavo.kernels.ledger import warn_once
from octavo.nn.adopted import Adopted, own_class
from octavo.nn.modules import full_name, is_position


class Recognised(Adopted):
    """Mixin for the class of a module that was recognised by what its `forward` computes.

    A new value of one of its attributes, such as its activation or the probability of a dropout in it, may change that:
    the module's own forward runs from then on. Linear layers may be replaced; each call checks them.
    """

    fields: tuple[str, ...] = ("recognised_with",)
    recognised_with: tuple[tuple[str, str, Any], ...] = ()
    """(path of a child module, name of an attribute, its value at recognition)"""

    @classmethod
    def take(cls, module: nn.Module, **fields: Any) -> None:
        """Mix this class into that of a module in place, and record the attributes of the module."""
        before = tuple(each for each in _settings(module) if each[1] not in cls.fields)
        super().take(module, recognised_with=before, **fields)

    def is_as_recognised(self) -> bool:
        """Return whether all recorded attributes have their values still; warn of the first that has not."""
        for path, name, before in self.recognised_with:
            if not _is_same(getattr(self.get_submodule(path), name, None), before):
                _warn_of_change(own_class(self).__name__, full_name(path, name))
                return False
        return True


def _settings(module: nn.Module, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the attributes of a module and its children that may decide what it computes.

    Excluded are attributes that every module has, parameters, linear layers, and the position of a module, for which
    each layer would be compiled separately. Lists, tuples and dictionaries of numbers and strings are yielded as
    tuples. Other collections are excluded, because compilers do not preserve their identity.
    """
    for name, value in itertools.chain(vars(module).items(), module._modules.items(), module._parameters.items()):
        contents = _contents(value)
        if name not in _OF_EVERY_MODULE and not isinstance(contents, _NOT_COMPARED) and not is_position(name, value):
            yield path, name, contents
    for name, child in module.named_children():
        if not isinstance(child, nn.Linear):
            yield from _settings(child, full_name(path, name))


_NOT_COMPARED = (nn.Linear, nn.Parameter, list, set, frozenset, range, slice)


def _contents(value: Any) -> Any:
    """Return a list, tuple or dictionary of numbers and strings as a tuple of pairs; other values are never a tuple."""
    if not isinstance(value, list | tuple | dict):
        return value
    found = tuple(value.items() if isinstance(value, dict) else enumerate(value))
    if all(isinstance(each, int | float | str | None) for _, each in found):
        return found
    return list(value) if isinstance(value, tuple) else value  # lists are not compared, dictionaries by identity


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(before, tuple):
        return bool(_contents(now) == before)
    if isinstance(before, partial):
        parts = [(each.func, each.args, each.keywords) for each in (now, before) if isinstance(each, partial)]
        return len(parts) == 2 and parts[0] == parts[1]
    return now is before or (isinstance(before, int | float | str) and now == before)


_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "_compiled_call_impl"))


@assume_constant_result
def _warn_of_change(cls: str, attribute: str) -> None:
    warn_once(
        f"{cls}.{attribute} has changed since octavo.convert. Modules of this class now run their own forward, unfused:"
        " call octavo.convert again"
    )
