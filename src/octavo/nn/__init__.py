"""Layers that compute in FP8."""

from octavo.nn.functional import WeightCodes, linear, quantize_weight
from octavo.nn.linear import Linear

__all__ = ["Linear", "WeightCodes", "linear", "quantize_weight"]
