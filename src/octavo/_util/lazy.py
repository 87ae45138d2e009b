"""Packages whose names are loaded on first use, so that imports and the command line stay quick."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: its name.
        homes: modules, relative to the package and attributes of it themselves, and the names that it has from each,
            separated by spaces; `plan=make_plan` has another name there.
    """
    pairs = ((module, *name.partition("=")[::2]) for module, names in homes.items() for name in names.split())
    places = {name: (module, there or name) for module, name, there in pairs}

    def attribute(name: str) -> Any:
        if name in homes:
            return importlib.import_module(f"{package}.{name}")
        if name not in places:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module, there = places[name]
        return getattr(importlib.import_module(f"{package}.{module}"), there)

    return attribute
