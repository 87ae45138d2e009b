"""Localisation: what FP8 costs in every layer and product, what it saves there, and the map that fits a loss budget."""

from octavo.sensitivity.localisation import localize
from octavo.sensitivity.result import Localisation, Sensitivity

__all__ = ["Localisation", "Sensitivity", "localize"]
