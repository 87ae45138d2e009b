"""Modules that `octavo.disabled` turns off and on again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_open: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Module -> number of open blocks of `switched_off`, of all threads, for which it is off."""
_switching = threading.Lock()


class Switchable(nn.Module):
    """Base of modules with a switch. A copy or a pickle made in a block of `switched_off` is of a module that is on.

    Only this module returns to FP8 when the block ends; nothing would turn its copy on.
    """

    enabled: bool
    """Whether it computes in FP8, and not in the precision that it had before."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if self not in _open or not (isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict)):
            return reduced
        make, arguments, state, *others = reduced
        return make, arguments, {**state, "enabled": True}, *others


@contextmanager
def switched_off(modules: Sequence[Switchable]) -> Iterator[None]:
    """Turn off the modules that are on. Blocks of several threads may overlap; the last one turns them on."""
    with _switching:
        off = [module for module in modules if module.enabled or module in _open]
        for module in off:
            _open[module] = _open.get(module, 0) + 1
            module.enabled = False
    try:
        yield
    finally:
        with _switching:
            for module in off:
                _open[module] -= 1
                if not _open[module]:
                    del _open[module]
                    module.enabled = True
