"""Turn a user's model into one that computes in FP8, and back."""

from octavo.conversion.apply import convert, disabled, enable, revert
from octavo.conversion.autocast_mode import AutocastReport, autocast
from octavo.conversion.compilation import Compiled, compile_blocks
from octavo.conversion.layer_plan import LayerPlan
from octavo.conversion.offloading import Offload, offload
from octavo.conversion.operators import Operators
from octavo.conversion.plan import Plan
from octavo.conversion.planner import make_plan
from octavo.conversion.policy import Policy
from octavo.conversion.recomputation import Cost, Recompute, recompute

__all__ = [
    "AutocastReport",
    "Compiled",
    "Cost",
    "LayerPlan",
    "Offload",
    "Operators",
    "Plan",
    "Policy",
    "Recompute",
    "autocast",
    "compile_blocks",
    "convert",
    "disabled",
    "enable",
    "make_plan",
    "offload",
    "recompute",
    "revert",
]
