"""Names within a kernel are unique: Inductor writes everything a kernel calls into one module, under its bare name."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType
from typing import Any

import pytest

import octavo.kernels as package
from octavo.kernels.triton.launch import Kernel

pytest.importorskip("triton")


def kernels() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if ".triton" not in module.name:
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Kernel):
                found[f"{module.name.removeprefix('octavo.kernels.').replace('.triton', '')}.{name}"] = value
    return found


def names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def reached(kernel: Kernel) -> dict[str, set[Any]]:
    """The functions and constants that a kernel reaches, by the name that it or a function of its knows them by."""
    found: dict[str, set[Any]] = defaultdict(set)
    waiting, seen = [kernel.function.fn], set()
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        for name in names_in(function.__code__):
            value = function.__globals__.get(name)
            inner = getattr(value, "fn", None)
            if callable(inner) and inner.__module__.startswith("octavo."):
                found[name].add(inner)
                waiting.append(inner)
            elif isinstance(getattr(value, "value", value), bool | int | float | str):
                found[name].add(repr(value))
    return found


def test_no_two_kernels_have_one_name() -> None:
    """Profiles know a kernel by its name alone: they counted grouped products as passes that quantise."""
    functions = {kernel.function.fn for kernel in kernels().values()}
    names = [function.__name__ for function in functions]
    assert len(names) > 40 and len(names) == len({*names})


def test_no_name_within_a_kernel_is_of_two_things() -> None:
    every = kernels()
    assert len(every) > 40 and len(reached(every["activation._forward_write_kernel"])) > 20
    twice = {
        kernel: {name: sorted(map(str, things)) for name, things in reached(found).items() if len(things) > 1}
        for kernel, found in every.items()
    }
    assert {kernel: names for kernel, names in twice.items() if names} == {}
