"""Recipes: what runs in FP8 and how, as data. `load("folded")`, `names()`, `explain(recipe)`."""

from octavo.recipes.spec import GEMMS, OPERANDS, Dgrad, Fprop, Gemm, Operand, Recipe, Wgrad
from octavo.recipes.text import RecipeLike, explain, kept_for_backward, load, names, reused_from

__all__ = [
    "GEMMS",
    "OPERANDS",
    "Dgrad",
    "Fprop",
    "Gemm",
    "Operand",
    "Recipe",
    "RecipeLike",
    "Wgrad",
    "explain",
    "kept_for_backward",
    "load",
    "names",
    "reused_from",
]
