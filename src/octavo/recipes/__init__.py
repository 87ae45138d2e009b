"""Recipes: which GEMMs run in FP8, and how, as data. `load("folded")`, `names()`, `explain(recipe)`."""

from octavo._util.recipe_names import BASE, DEFAULT, FALLBACK
from octavo.recipes.operands import LinearPlan, QuantSpec, StoredScale, Transposed, plan_by
from octavo.recipes.presets import ALIASES, mx
from octavo.recipes.spec import (
    GEMMS,
    OPERANDS,
    STORED_SCALE_ROLES,
    Dgrad,
    Evidence,
    FormatName,
    Fprop,
    Gemm,
    History,
    Operand,
    Precision,
    Recipe,
    ScaleFrom,
    Wgrad,
)
from octavo.recipes.text import RecipeLike, about, brief, explain, kept_for_backward, load, names, reused_from

__all__ = [
    "ALIASES",
    "BASE",
    "DEFAULT",
    "FALLBACK",
    "GEMMS",
    "OPERANDS",
    "STORED_SCALE_ROLES",
    "Dgrad",
    "Evidence",
    "FormatName",
    "Fprop",
    "Gemm",
    "History",
    "LinearPlan",
    "Operand",
    "Precision",
    "QuantSpec",
    "Recipe",
    "RecipeLike",
    "ScaleFrom",
    "StoredScale",
    "Transposed",
    "Wgrad",
    "about",
    "brief",
    "explain",
    "kept_for_backward",
    "load",
    "mx",
    "names",
    "plan_by",
    "reused_from",
]
