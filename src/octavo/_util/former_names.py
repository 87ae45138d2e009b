"""Former names of modules whose classes are in pickled files: `torch.save(model)` stores the module of each class.

Files that an earlier Octavo wrote load for ever. A module that moves gets a line in `MOVED` if such files may name it.
Python asks `FormerNames` last of all, so that a module that exists is never hidden; imports in code use the new names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {f"models.{name}": f"lab.models.{name}" for name in ("config", "gpt", "llama", "moe")}
"""Former name of a module, and its name today, both below `octavo`."""


class FormerNames(MetaPathFinder, Loader):
    """Finds modules of a package under their former names; their attributes are those of the modules of today."""

    def __init__(self, package: str, moved: Mapping[str, str]) -> None:
        self.homes = {f"{package}.{former}": f"{package}.{now}" for former, now in moved.items()}
        self.packages = {former.rpartition(".")[0] for former in self.homes} - {package}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how a former name is loaded; None for any other."""
        if fullname not in self.homes and fullname not in self.packages:
            return None
        return ModuleSpec(fullname, self, is_package=fullname in self.packages)

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Forward the attributes of a module; a former package has none."""
        if home := self.homes.get(module.__name__):
            vars(module)["__getattr__"] = partial(getattr, importlib.import_module(home))


def find_former_names() -> None:
    """Let pickled files name modules of Octavo as they did when they were written."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.append(FormerNames("octavo", MOVED))
