"""Modules that were recognised by what their `forward` computes, and whether they still compute that."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo._util.compiler import answer, ask_tracer, assume_constant_result, module_of
from octavo.kernels.runtime.ledger import warn_once
from octavo.nn.adopted import Adopted, is_taken, own_class
from octavo.nn.modules import OF_EVERY_MODULE, full_name, is_position


class Recognised(Adopted):
    """Mixin for the class of a module that was recognised by what its `forward` computes.

    A new value of one of its attributes, such as its activation or the probability of a dropout in it, may change that,
    and so may another function in its class, in those of its children, or in the code that they run: the module's own
    forward runs from then on. Linear layers may be replaced; each call checks them.
    """

    fields: tuple[str, ...] = ("recognised_with", "recognised_code")
    recognised_with: tuple[tuple[str, str, Any], ...] = ()
    """(path of a child module, name of an attribute, its value at recognition). `config.dropout` is a name too: that of
    a field of an object or dictionary."""

    recognised_code: Code | None = None
    """The functions of its forward; None in a module from a file, until its first call."""

    @classmethod
    def take(cls, module: nn.Module, **fields: Any) -> None:
        """Mix this class into that of a module in place, and record the module's attributes and its code."""
        functions = functions_of(module)
        found = _settings(module, _all_names(functions))
        before = tuple(each for each in found if each[1].partition(".")[0] not in cls.fields)
        super().take(module, recognised_with=before, recognised_code=Code.of(module, functions), **fields)

    def is_as_recognised(self) -> bool:
        """Return whether attributes and code are as they were recorded; warn of the first that is not."""
        recorded = ask_tracer(None, _find_recorded, self) if torch.compiler.is_compiling() else None
        if recorded is not None:
            return _guard(self, *recorded)
        for path, name, before in self.recognised_with:
            if not _is_same(_value(self.get_submodule(path), name), before):
                _warn_of_change(own_class(self).__name__, full_name(path, name))
                return False
        if self.recognised_code is None:
            if torch.compiler.is_compiling():
                return True
            self.recognised_code = Code.of(self, functions_of(self))
        code = self.recognised_code
        for owner, name, before in code.traced if torch.compiler.is_compiling() else code.parts:
            if getattr(owner, name, None) is not before:
                _warn_of_change(owner.__name__, name)
                return False
        return True


class Code:
    """Functions that the forward of a module runs, and where they were at recognition."""

    parts: tuple[tuple[Any, str, Any], ...]
    """(class, function or Python module, name of an attribute, its value)."""
    traced: tuple[tuple[Any, str, Any], ...]
    """Those that compiled code checks: not classes of autograd functions, which Dynamo cannot compare."""
    owners: tuple[Any, ...]
    """Each owner of `traced` once."""

    def __init__(self, parts: Iterable[tuple[Any, str, Any]]) -> None:
        self.parts = tuple(parts)
        self.traced = tuple(part for part in self.parts if not _is_autograd_function(part[2]))
        self.owners = tuple({id(owner): owner for owner, _, _ in self.traced}.values())

    @classmethod
    def of(cls, module: nn.Module, functions: Iterable[FunctionType]) -> Code:
        """Record the code of a module and its children: of classes what `functions` name, and these themselves."""
        functions = list(functions)
        names = _all_names(functions)
        kinds = dict.fromkeys(_kind_of(part) for part in module.modules())
        found: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for kind in kinds:
            own = [name for name in names if not hasattr(nn.Module, name) and not _is_of_a_library(kind.__module__)]
            values = {name: getattr(kind, name, None) for name in ("forward", "__call__", *own)}
            found |= {(id(kind), name): (kind, name, value) for name, value in values.items() if _is_code(value)}
        for function in functions:
            found[id(function), "__code__"] = function, "__code__", function.__code__
            if (space := sys.modules.get(function.__module__)) is None or vars(space) is not function.__globals__:
                continue
            called = {name: value for name in function.__code__.co_names if _is_code(value := vars(space).get(name))}
            found |= {(id(space), name): (space, name, value) for name, value in called.items()}
        return cls(found.values())

    def __deepcopy__(self, memo: Any) -> Code:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a file is read where classes may be others


def _find_recorded(context: Any) -> None:
    """Answer what `_guard` takes if all is as it was recorded, otherwise None: the loop over all then finds it."""
    module: Recognised = module_of(context)
    settings, code = module.recognised_with, module.recognised_code
    if any(not _is_same(_value(module.get_submodule(path), name), before) for path, name, before in settings):
        return answer(None)
    if code is not None and any(getattr(owner, name, None) is not value for owner, name, value in code.traced):
        return answer(None)
    literal = [i for i, (*_, before) in enumerate(settings) if before is None or type(before) in (bool, int, str)]
    values = [(tuple(filter(None, settings[i][0].split("."))), *settings[i][1:]) for i in literal]
    names = [tuple([name for at, name, _ in code.traced if at is owner]) for owner in code.owners] if code else []
    return answer((tuple(values), tuple([i for i in range(len(settings)) if i not in literal]), tuple(names)))


def _guard(
    module: Recognised,
    values: Sequence[tuple[Sequence[str], str, Any]],
    others: Sequence[int],
    names: Sequence[Sequence[str]],
) -> bool:
    """Return True in traced code, with one guard on each value that was just compared.

    Args:
        values: path of a child, name of an attribute or field, and its value, of `recognised_with` where it is a
            number or a string.
        others: indices of the rest.
        names: of the attributes of each of `Code.owners`.
    """
    for path, name, before in values:
        child: Any = module
        for part in path:
            child = child._modules[part]
        if _value(child, name) != before:
            return False
    for i in others:
        where, name, before = module.recognised_with[i]
        if not _is_same(_value(module.get_submodule(where), name), before):
            return False
    for i in range(len(names)):  # `zip` is a guard more
        for name in names[i]:
            if getattr(cast(Code, module.recognised_code).owners[i], name) is None:
                return False
    return True


def _is_autograd_function(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | property | BuiltinFunctionType | type)


def _kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before its conversion."""
    return cast(type[nn.Module], own_class(module).parent) if is_taken(module) else type(module)


def _settings(module: nn.Module, named: Collection[str], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the attributes of a module and its children that may decide what it computes.

    Excluded are attributes that every module has, parameters, linear layers, and the position of a module, for which
    each layer would be compiled separately. Lists, tuples and dictionaries of numbers and strings are yielded as
    tuples. Other collections are excluded, because compilers do not preserve their identity. Of other objects, such as
    configurations, numbers and strings in them are yielded as well, if they are named.

    Args:
        named: names in the code of `forward`. A configuration of transformers has a hundred fields, most of which have
            nothing to do with an MLP, and may change.
    """
    for name, value in itertools.chain(vars(module).items(), module._modules.items(), module._parameters.items()):
        contents = _contents(value)
        if name not in _NO_SETTING and not isinstance(contents, _NOT_COMPARED) and not is_position(name, value):
            yield path, name, contents
            yield from ((path, f"{name}.{field}", inner) for field, inner in _fields(contents, named))
    for name, child in module.named_children():
        if not isinstance(child, nn.Linear):
            yield from _settings(child, named, full_name(path, name))


_NO_SETTING = OF_EVERY_MODULE | {"call_key"}
_NOT_COMPARED = (nn.Linear, nn.Parameter, list, set, frozenset, range, slice)
_ATOMS = (int, float, str, tuple, type, type(None), FunctionType, ModuleType, partial, nn.Module, Tensor)
"""Values without fields of their own, or with such that are compared otherwise."""
_HOW_IT_IS_COMPUTED = ("_attn_implementation", "_experts_implementation")
"""Fields of transformers that change no result, and change in `generate`."""


def _fields(value: Any, named: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and strings in an object or dictionary that are named."""
    if isinstance(value, _ATOMS):
        return
    for name in named:
        try:
            found = value.get(name, value) if isinstance(value, dict) else getattr(value, name, value)
        except Exception:  # a property that fails
            continue
        is_position_or_way = name in _HOW_IT_IS_COMPUTED or is_position(name, found)
        if isinstance(found, int | float | str | None) and not is_position_or_way:
            yield name, found


def _value(module: nn.Module, name: str) -> Any:
    """Return the value of an attribute, or of a field of one; None if there is none."""
    owner, _, field = name.partition(".")
    value = getattr(module, owner, None)
    if not field:
        return value
    return value.get(field) if isinstance(value, dict) else getattr(value, field, None)


def functions_of(module: nn.Module) -> list[FunctionType]:
    """Return the functions that the forward of a module may run, without those of PyTorch and linear layers.

    Followed are methods of its modules and of objects that they hold, functions by their names, and wrapped ones.
    """
    parts = parts_of(module)
    held = [value for part in parts for value in vars(part).values()]
    kinds = [_kind_of(part) for part in parts]
    kinds += [type(value) for value in held if not isinstance(value, (*_ATOMS, Code))]
    classes = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base not in (nn.Module, object))
    waiting: list[Any] = [vars(base).get(entry) for base in classes for entry in ("forward", "__call__")]
    waiting += held
    functions: dict[FunctionType, None] = {}
    while waiting:
        function = _unwrapped(waiting.pop())
        if not isinstance(function, FunctionType) or function in functions or _is_of_a_library(function.__module__):
            continue
        functions[function] = None
        names = names_in(function)
        known = [value for name in names if (value := function.__globals__.get(name)) is not None]
        files = [value for value in known if isinstance(value, ModuleType) and not _is_of_a_library(value.__name__)]
        waiting += [*known, *enclosed(function)]
        waiting += [vars(space).get(name) for space in (*files, *classes) for name in names]
    return list(functions)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """Return a module and all in it that is no linear layer: those are recognised, and checked, by themselves."""
    return [part for part in module.modules() if part is module or not isinstance(part, nn.Linear)]


def _all_names(functions: Iterable[FunctionType]) -> list[str]:
    """Return the names and strings in the code of functions, in order."""
    return sorted({name for function in functions for name in names_in(function)})


def names_in(function: FunctionType) -> set[str]:
    """Return the names of globals and attributes, and the strings, in the code of a function."""
    return set(_names_of(function.__code__))


def _unwrapped(value: Any) -> Any:
    """Return the function of a property, a method or a partial call; other values unchanged."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, partial | cached_property):
        return value.func
    return value.__func__ if isinstance(value, staticmethod | classmethod | MethodType) else value


def enclosed(function: FunctionType) -> Iterator[Any]:
    """Yield the values that a function has from the functions around it, such as the one that it wraps."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it has none yet
            yield cell.cell_contents


def _is_of_a_library(name: str | None) -> bool:
    """Return whether a Python module belongs to PyTorch, the standard library or Octavo (except its models)."""
    root, _, rest = (name or "").partition(".")
    return (
        root == "torch" or root in sys.stdlib_module_names or (root == "octavo" and not rest.startswith("lab.models"))
    )


def _names_of(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes, and the strings, in code and in functions defined in it."""
    yield from (name for name in code.co_names if not name.startswith("__"))
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names_of(constant)


def _contents(value: Any) -> Any:
    """Return a list, tuple or dictionary of numbers and strings as a tuple of pairs; other values are never a tuple."""
    if not isinstance(value, list | tuple | dict):
        return value
    found = tuple(value.items() if isinstance(value, dict) else enumerate(value))
    if all(isinstance(each, int | float | str | None) for _, each in found):
        return found
    return list(value) if isinstance(value, tuple) else value  # lists are not compared, dictionaries by named fields


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(before, tuple):
        return bool(_contents(now) == before)
    if isinstance(before, partial):
        parts = [(each.func, each.args, each.keywords) for each in (now, before) if isinstance(each, partial)]
        return len(parts) == 2 and parts[0] == parts[1]
    return now is before or (isinstance(before, int | float | str) and now == before)


@assume_constant_result
def _warn_of_change(cls: str, attribute: str) -> None:
    warn_once(
        f"{cls}.{attribute} has changed since octavo.convert. Modules of this class now run their own forward, unfused:"
        " call octavo.convert again"
    )
