"""Octavo trains models in FP8: one byte for a weight, an activation, a gradient and an optimizer state.

The public names load on first use, so that `import octavo` and the command line stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.calibration import Calibration, calibrate
    from octavo.conversion import Operators, Plan, Policy, autocast, convert, disabled, offload, recompute, revert
    from octavo.conversion import make_plan as plan
    from octavo.monitor.monitor import Monitor
    from octavo.nn.observe import observed
    from octavo.nn.scaling_state import scales
    from octavo.numerics import dequantize, quantize
    from octavo.recipes import Recipe
    from octavo.sensitivity import localize
    from octavo.serving import export
    from octavo.tensor import FP8Tensor

__version__ = "0.1.0"

_HOME = {
    "Calibration": "octavo.calibration:Calibration",
    "Monitor": "octavo.monitor.monitor:Monitor",
    "Operators": "octavo.conversion:Operators",
    "Plan": "octavo.conversion:Plan",
    "Policy": "octavo.conversion:Policy",
    "autocast": "octavo.conversion:autocast",
    "calibrate": "octavo.calibration:calibrate",
    "calibration": "octavo.calibration",
    "convert": "octavo.conversion:convert",
    "disabled": "octavo.conversion:disabled",
    "offload": "octavo.conversion:offload",
    "plan": "octavo.conversion:make_plan",
    "recompute": "octavo.conversion:recompute",
    "revert": "octavo.conversion:revert",
    "observed": "octavo.nn.observe:observed",
    "localize": "octavo.sensitivity:localize",
    "export": "octavo.serving:export",
    "dequantize": "octavo.numerics:dequantize",
    "distributed": "octavo.distributed",
    "guard": "octavo.guard",
    "optim": "octavo.optim",
    "quantize": "octavo.numerics:quantize",
    "Recipe": "octavo.recipes:Recipe",
    "scales": "octavo.nn.scaling_state:scales",
    "FP8Tensor": "octavo.tensor:FP8Tensor",
}

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
    "convert",
    "dequantize",
    "disabled",
    "distributed",
    "export",
    "guard",
    "localize",
    "observed",
    "offload",
    "optim",
    "plan",
    "quantize",
    "recompute",
    "revert",
    "scales",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute '{name}'")
    module, _, attribute = _HOME[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted(__all__)
