"""Turn a user's model into one that computes in FP8, and back."""

from octavo.conversion.apply import convert, disabled, revert
from octavo.conversion.plan import LayerPlan, Plan, make_plan
from octavo.conversion.policy import Policy

__all__ = ["LayerPlan", "Plan", "Policy", "convert", "disabled", "make_plan", "revert"]
