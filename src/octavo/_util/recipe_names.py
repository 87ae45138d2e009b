"""Recipes where none is named, as the command line reads them: without torch. `octavo.recipes` has them too."""

DEFAULT = "rotated"
"""The recipe where none is named."""
FALLBACK = "folded"
"""The recipe where none is named and `DEFAULT` is refused: weights stored in FP8, experts, devices without its GEMM."""
BASE = "folded"
"""The preset that a recipe's mapping without `base` changes, and the recipe of a written configuration without one.

Files that exist mean this one: it stays, whatever `DEFAULT` is.
"""
