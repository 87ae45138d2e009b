"""Layers that compute in FP8."""

from octavo.nn.linear import Linear
from octavo.nn.weights import weights_changed

__all__ = ["Linear", "weights_changed"]
