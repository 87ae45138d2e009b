"""Octavo trains models in FP8: one byte for a weight, an activation, a gradient and an optimizer state.

The public names load on first use, so that `import octavo` and the command line stay quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo._util.former_names import find_former_names
from octavo._util.lazy import lazy

if TYPE_CHECKING:
    from octavo._util.compiler import skip_own_guards
    from octavo.calibration import Calibration, calibrate
    from octavo.conversion import Operators, Plan, Policy, autocast, convert, disabled, offload, recompute, revert
    from octavo.conversion import compile_blocks as compile
    from octavo.conversion import make_plan as plan
    from octavo.lab import guard
    from octavo.lab.monitor.monitor import Monitor
    from octavo.lab.sensitivity import localize
    from octavo.lab.train.replay import graph
    from octavo.nn.observe import observed
    from octavo.nn.scaling_state import scales
    from octavo.numerics import dequantize, quantize
    from octavo.recipes import Recipe
    from octavo.serving import export
    from octavo.tensor import FP8Tensor

__version__ = "0.1.0"

__all__ = [
    "Calibration",
    "FP8Tensor",
    "Monitor",
    "Operators",
    "Plan",
    "Policy",
    "Recipe",
    "__version__",
    "autocast",
    "calibrate",
    "calibration",
    "compile",
    "convert",
    "dequantize",
    "disabled",
    "distributed",
    "export",
    "graph",
    "guard",
    "lab",
    "localize",
    "observed",
    "offload",
    "optim",
    "plan",
    "quantize",
    "recompute",
    "revert",
    "scales",
    "skip_own_guards",
]


_HOMES = {
    "_util.compiler": "skip_own_guards",
    "calibration": "Calibration calibrate",
    "conversion": (
        "Operators Plan Policy autocast compile=compile_blocks convert disabled offload plan=make_plan recompute revert"
    ),
    "lab.monitor.monitor": "Monitor",
    "nn.observe": "observed",
    "nn.scaling_state": "scales",
    "numerics": "dequantize quantize",
    "recipes": "Recipe",
    "lab.sensitivity": "localize",
    "serving": "export",
    "tensor": "FP8Tensor",
    "lab.train.replay": "graph",
    "lab": "guard",
    **dict.fromkeys(("distributed", "optim"), ""),
}
__getattr__ = lazy(__name__, _HOMES)
find_former_names()


def __dir__() -> list[str]:
    return sorted(__all__)
