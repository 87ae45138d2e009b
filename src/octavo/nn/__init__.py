"""Layers that compute in FP8."""

from octavo.nn.attention import ScaledDotProduct
from octavo.nn.code_reuse import reuse_weight_codes
from octavo.nn.conv import Conv1d, Conv2d
from octavo.nn.grouped import GroupedLinear
from octavo.nn.linear import Linear
from octavo.nn.step_codes import reuse_weight_codes_per_step

__all__ = [
    "Conv1d",
    "Conv2d",
    "GroupedLinear",
    "Linear",
    "ScaledDotProduct",
    "reuse_weight_codes",
    "reuse_weight_codes_per_step",
]
