"""Search for a `DistributedDataParallel` over parameters whose gradients the optimizer takes in backward.

It reduces a gradient after the optimizer's hook has taken it. Its hooks are in C++, and a parameter does not show them;
with `find_unused_parameters` or `static_graph` it does not write a gradient either where it found none.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def is_under_ddp(parameters: Iterable[Tensor]) -> bool:
    """Return whether a `DistributedDataParallel` reduces the gradient of one of these parameters.

    All objects are searched: tens of milliseconds, and more only where one is found.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    known = {id(parameter) for parameter in parameters}
    if not _is_found(known):
        return False
    gc.collect()  # what was found may be garbage: a model that was wrapped before
    return _is_found(known)


def _is_found(known: set[int]) -> bool:
    for found in gc.get_objects():
        if issubclass(type(found), DistributedDataParallel) and "module" in vars(found).get("_modules", ()):
            ignored = vars(found).get("parameters_to_ignore", ())
            named = found.module.named_parameters()
            if any(id(parameter) in known and name not in ignored for name, parameter in named):
                return True
    return False
