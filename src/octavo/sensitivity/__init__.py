"""Localisation: the cost and gain of FP8 per layer and GEMM, and the precision map that fits a loss budget."""

from octavo.sensitivity.localisation import localize
from octavo.sensitivity.result import Localisation, Sensitivity

__all__ = ["Localisation", "Sensitivity", "localize"]
