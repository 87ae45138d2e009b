"""A recipe, resolved: what kernels and layers read of it in each call, as values, decided once."""

from __future__ import annotations

import ast
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from octavo.errors import ConfigError
from octavo.numerics import Format, Granularity, Rounding, Scaling, format_named, granularity_named

if TYPE_CHECKING:
    from octavo.recipes.spec import Operand, Recipe

_RULES: dict[Scaling, int] = {"float32": 0, "power_of_two": 1, "engine": 2}


class QuantSpec(NamedTuple):
    """Quantisation target: codes of a format with one scale per tile."""

    format: str
    granularity: str
    scaling: Scaling
    rounding: Rounding = "nearest"
    """`nearest` for fused kernels."""
    rotation: int = 0
    """Largest block of the rotation of each row (`numerics.block_for`), negative for Sylvester's; 0: none."""

    @property
    def fmt(self) -> Format:
        """The format by name."""
        return format_named(self.format)

    @property
    def tile(self) -> Granularity:
        """The granularity by name."""
        return granularity_named(self.granularity)

    @property
    def rule(self) -> int:
        """Scaling rule as an integer argument of kernels (`octavo.kernels.triton.codes`)."""
        return _RULES[self.scaling]

    @property
    def needs_whole_rows(self) -> bool:
        """Whether one program of a kernel must hold a whole row to make its codes: integer or rotated ones."""
        return bool(self.rotation) or self.fmt.is_integer

    def __str__(self) -> str:
        return " ".join(map(str, self))


def spec_of(operand: Operand) -> QuantSpec:
    """Return the quantisation target for an operand of a recipe."""
    return QuantSpec(operand.format, operand.granularity, operand.scaling, operand.rounding, operand.signed_rotation)


class Transposed(Enum):
    """How a backward GEMM reads an operand of fprop: dgrad W^T, wgrad X^T."""

    VALUES = "the GEMM is not in FP8, and reads the values"
    CODES = "the codes of fprop, transposed with their scales"
    FOLDED = "codes by row, transposed with scale 1: their scales are in the gradient"
    QUANTIZED = "the transpose is quantised by itself"


class StoredScale(NamedTuple):
    """A scale that a layer stores from step to step."""

    row: int
    """Row in `scale_and_amax`: index in `STORED_SCALE_ROLES`."""
    is_just_in_time: bool


class LinearPlan:
    """How a linear layer quantises the operands of its three GEMMs. Recipes with equal GEMMs have the same plan."""

    key: str
    """All of the plan as text. It stands for the plan in graphs of compilers and in recordings: one constant with one
    guard, which means the same in every process. Traced code compares keys: that two objects differ is not guarded."""

    x: QuantSpec | None
    """X (M, K) as fprop reads it; like `w` None if fprop is not in FP8."""
    w: QuantSpec | None
    """W (N, K)."""
    dy: QuantSpec | None
    """dY (M, N) as dgrad reads it; None if that is not in FP8."""
    dy_t: QuantSpec | None
    """dY^T (N, M) as wgrad reads it; None if that is not in FP8."""
    x_t: QuantSpec
    """X^T (K, M) as wgrad reads it. Its granularity refers to the transpose."""
    w_t: QuantSpec
    """W^T (K, N) as dgrad reads it."""
    x_back: Transposed
    w_back: Transposed
    x_second: QuantSpec | None
    """Target of a second set of codes of X by row, which wgrad reads in place of those of fprop; None if there is none
    (`Recipe.second`)."""
    w_second: QuantSpec | None
    x_rows: QuantSpec
    """Target of the codes of X (M, K) that wgrad transposes: those of fprop, or of the second set."""
    w_rows: QuantSpec
    x_stored: StoredScale | None
    """None: scaled by its own maximum."""
    dy_stored: StoredScale | None
    requantises_exactly: bool
    """Whether wgrad's codes of X follow from its values and the scale in fprop."""
    accumulate: tuple[str, str, str]
    """`slow` or `fast`, of fprop, dgrad and wgrad."""

    def __init__(self, recipe: Recipe, key: str) -> None:
        self.key = key
        fprop, dgrad, wgrad = recipe.fprop, recipe.dgrad, recipe.wgrad
        self.x = spec_of(fprop.input) if fprop.is_fp8 else None
        self.w = spec_of(fprop.weight) if fprop.is_fp8 else None
        self.dy = spec_of(dgrad.grad_output) if dgrad.is_fp8 else None
        self.dy_t = spec_of(wgrad.grad_output) if wgrad.is_fp8 else None
        self.x_t, self.w_t = spec_of(wgrad.input), spec_of(dgrad.weight)
        self.x_back, self.w_back = _transposed(recipe, "wgrad.input"), _transposed(recipe, "dgrad.weight")
        self.x_second, self.w_second = (_spec_or_none(recipe.second(role)) for role in ("input", "weight"))
        self.x_rows, self.w_rows = (spec_of(recipe.folded_rows(role)) for role in ("input", "weight"))
        self.x_stored, self.dy_stored = _stored(recipe, 0, "input"), _stored(recipe, 1, "grad_output")
        self.requantises_exactly = self.x_back is Transposed.FOLDED and self.x_rows.scaling == "power_of_two"
        self.accumulate = fprop.accumulate, dgrad.accumulate, wgrad.accumulate


def plan_of(recipe: Recipe) -> LinearPlan:
    """Return the plan of a recipe: the same object for all recipes with these GEMMs, and this history of scales."""
    key = repr((recipe.fprop, recipe.dgrad, recipe.wgrad, recipe.history))
    return _plans.get(key) or _plans.setdefault(key, LinearPlan(recipe, key))


class _Plans(dict[str, LinearPlan]):
    """Plans by key. The key of a program from another process, such as an exported one, is made a recipe again."""

    def __missing__(self, key: str) -> LinearPlan:
        from octavo.recipes import spec  # which makes plans, as it is read

        def value(node: ast.expr) -> Any:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                return getattr(spec, node.func.id)(**{str(each.arg): value(each.value) for each in node.keywords})
            return ast.literal_eval(node)

        try:
            read = ast.parse(key, mode="eval").body
            names = "fprop", "dgrad", "wgrad", "history"
            gemms = dict(zip(names, map(value, read.elts if isinstance(read, ast.Tuple) else ()), strict=True))
            made = spec.Recipe(name="program", **gemms).plan
        except (AttributeError, SyntaxError, TypeError, ValueError) as error:
            raise ConfigError(
                f"a program has the plan '{key}', which this version of Octavo cannot read: export the program again."
            ) from error
        return self.setdefault(key, made)


_plans = _Plans()
plan_by = _plans.__getitem__
"""Return the plan with a key.

Raises:
    ConfigError: the key is not that of a plan, or another version's.
"""


def _transposed(recipe: Recipe, operand: str) -> Transposed:
    if not recipe.gemm(operand.partition(".")[0]).is_fp8:
        return Transposed.VALUES
    if recipe.folds(operand):
        return Transposed.FOLDED
    return Transposed.CODES if recipe.reuses(operand) else Transposed.QUANTIZED


def _spec_or_none(operand: Operand | None) -> QuantSpec | None:
    return None if operand is None else spec_of(operand)


def _stored(recipe: Recipe, row: int, role: str) -> StoredScale | None:
    operand = recipe.stored_scale(role)
    return None if operand is None else StoredScale(row, operand.scale_from == "just_in_time")
