"""Turn a user's model into one that computes in FP8, and back."""

from octavo.conversion.apply import convert, disabled, enable, revert
from octavo.conversion.mode import autocast
from octavo.conversion.operators import Operators
from octavo.conversion.plan import LayerPlan, Plan, make_plan
from octavo.conversion.policy import Policy
from octavo.conversion.seen import Seen

__all__ = [
    "LayerPlan",
    "Operators",
    "Plan",
    "Policy",
    "Seen",
    "autocast",
    "convert",
    "disabled",
    "enable",
    "make_plan",
    "revert",
]
