"""Whether autocast would change what a module computes in 16 bits, as the functions that it calls show.

Autocast casts the arguments of functions on its lists: some to its own dtype, others to FP32. A copy of the module runs
without it, and each function that Python calls is looked at. If none is on a list, or those on the list for FP32 have
FP32 arguments only, then autocast changes nothing, on any device: a test under `torch.autocast("cpu")` would show
nothing of a GPU's lists, which differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octavo.nn.probe import as_written
from octavo.nn.recognised import functions_of, names_in

_LEFT_ALONE = {
    "__get__", "__getitem__", "add", "bfloat16", "cat", "chunk", "contiguous", "detach", "dim", "double", "expand",
    "flatten", "float", "half", "mul", "neg", "reshape", "size", "split", "stack", "sub", "to", "transpose", "type_as",
    "unsqueeze", "view",
}  # fmt: skip
"""Functions that autocast leaves alone, whatever their arguments. `__get__` reads an attribute. Arguments of `cat` and
`stack` get the widest dtype among them, as without autocast."""
_AT_MOST_FP32 = {"div", "mean", "pow", "reciprocal", "rsqrt", "sqrt", "square", "sum", "var"}
"""Functions that autocast may cast to FP32, never to 16 bits."""


def ignores_autocast(probe: nn.Module, x: Tensor) -> bool:
    """Return whether autocast changes nothing of `probe.forward(x)`.

    Args:
        probe: a copy of a module, on the CPU, with parameters in the dtype that its forward would see.
        x: its argument, on the CPU.
    """
    if any("autocast" in name for function in functions_of(probe) for name in names_in(function)):
        return False  # it asks for autocast, or changes it
    calls = _Calls()
    try:
        with as_written(), torch.no_grad(), calls:
            type(probe).forward(probe, x)
    except Exception:  # it needs more than one tensor
        return False
    return calls.are_left_alone


class _Calls(TorchFunctionMode):
    """Whether autocast leaves alone every function that was called."""

    are_left_alone = True

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = getattr(func, "__name__", ""), (*args, *(kwargs or {}).values())
        is_wide = all(x.dtype == torch.float32 for x in given if isinstance(x, Tensor) and x.is_floating_point())
        self.are_left_alone &= name in _LEFT_ALONE or (name in _AT_MOST_FP32 and is_wide)
        return func(*args, **(kwargs or {}))
