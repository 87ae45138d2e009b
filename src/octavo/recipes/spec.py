"""What a recipe is: for each of the three GEMMs of a linear layer, how its two operands become FP8.

    fprop   Y  (M, N) = input (M, K)        . weight (N, K)^T
    dgrad   dX (M, K) = grad_output (M, N)  . weight^T (K, N)^T
    wgrad   dW (N, K) = grad_output^T (N, M) . input^T (K, M)^T

M: tokens, N: output features, K: input features. Every operand is described as it stands in these lines: its rows are
    kept, its columns are summed over. So `row` is one scale a kept row, which every row-wise GEMM can apply to its
    result. `column` is one scale a summed index, which no GEMM can apply: such an operand is *folded*. Its codes are
    those of fprop, transposed, and its scales are multiplied into the other operand before that one is quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, cast

from octavo.errors import ConfigError
from octavo.numerics import PER_COLUMN, Granularity, Rounding, Scaling, granularity_named

GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
"""What a GEMM's left and right operand are called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """How one operand of one GEMM is quantised."""

    format: Literal["e4m3", "e5m2"] = "e4m3"
    """E4M3 for precision, E5M2 for range."""
    granularity: str = "row"
    """Which elements share a scale: tensor, row, column (folded), 1x128, 128x128, 1x32."""
    scaling: Scaling = "power_of_two"
    """Scales rounded up to a power of two, or FP32 scales."""
    rounding: Rounding = "nearest"
    """To the nearest code, or stochastic."""

    @property
    def tile(self) -> Granularity:
        """The granularity itself."""
        return granularity_named(self.granularity)

    @property
    def is_folded(self) -> bool:
        """Whether the scales lie along the summed index and move into the other operand."""
        return self.tile == PER_COLUMN

    def is_transpose_of(self, other: Operand) -> bool:
        """Whether this operand's codes and scales are those of `other`, transposed."""
        same = (self.format, self.scaling, self.rounding) == (other.format, other.scaling, other.rounding)
        return same and self.tile == other.tile.transposed and self.rounding == "nearest"

    def __str__(self) -> str:
        extras = [
            {"float32": "FP32 scales"}.get(self.scaling, ""),
            {"stochastic": "stochastic"}.get(self.rounding, ""),
        ]
        return " ".join([self.format.upper(), self.granularity, *filter(None, extras)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """What the three GEMMs have in common."""

    precision: Literal["fp8", "bf16"] = "fp8"
    """`bf16` leaves this GEMM in the precision that the model computes in."""
    accumulate: Literal["slow", "fast"] = "slow"
    """`fast` lets Hopper's tensor cores keep 13 fraction bits, truncated: quicker, but it shrinks coherent sums."""

    @property
    def is_fp8(self) -> bool:
        """Whether this GEMM runs in FP8."""
        return self.precision == "fp8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fprop(Gemm):
    """Y = input . weight^T."""

    input: Operand = field(default_factory=Operand)
    """(M, K), M tokens."""
    weight: Operand = field(default_factory=Operand)
    """(N, K)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dgrad(Gemm):
    """dX = grad_output . weight."""

    grad_output: Operand = field(default_factory=Operand)
    """(M, N)."""
    weight: Operand = field(default_factory=Operand)
    """weight^T, (K, N)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wgrad(Gemm):
    """dW = grad_output^T . input."""

    grad_output: Operand = field(default_factory=Operand)
    """grad_output^T, (N, M)."""
    input: Operand = field(default_factory=Operand)
    """input^T, (K, M)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a linear layer computes. Plain data: kernels and layers read it, nothing else decides."""

    name: str
    """Shown in plans and results."""
    fprop: Fprop = field(default_factory=Fprop)
    """The forward GEMM."""
    dgrad: Dgrad = field(default_factory=Dgrad)
    """The gradient of the input."""
    wgrad: Wgrad = field(default_factory=Wgrad)
    """The gradient of the weight."""
    modules: dict[str, Recipe] = field(default_factory=dict)
    """Other recipes for modules whose full name matches a pattern (`layers.0.*`); the last match wins."""

    def __post_init__(self) -> None:
        for gemm, a, b in self.gemms():
            self._check_gemm(gemm, a, b)
        self._check_folded("dgrad.weight", self.dgrad, self.dgrad.weight, self.fprop.weight)
        self._check_folded("wgrad.input", self.wgrad, self.wgrad.input, self.fprop.input)
        if nested := next((pattern for pattern, recipe in self.modules.items() if recipe.modules), None):
            raise ConfigError(
                f"recipe '{self.name}': modules.'{nested}': a recipe inside `modules` cannot have `modules` itself. "
                "Give each pattern its own line."
            )
        if self.wgrad.accumulate == "fast":
            raise ConfigError(
                f"recipe '{self.name}': wgrad.accumulate = 'fast' is refused: wgrad sums over all tokens, where fast "
                "accumulation loses whole percents of a coherent gradient. Use 'slow'."
            )

    def gemms(self) -> Iterator[tuple[str, Operand, Operand]]:
        """Yield (name, left operand, right operand) of each GEMM that runs in FP8."""
        for name, (left, right) in OPERANDS.items():
            gemm = self.gemm(name)
            if gemm.is_fp8:
                yield name, getattr(gemm, left), getattr(gemm, right)

    def gemm(self, name: str) -> Gemm:
        """Return the GEMM called fprop, dgrad or wgrad."""
        return cast(Gemm, getattr(self, name))

    @property
    def is_fp8(self) -> bool:
        """Whether any GEMM runs in FP8."""
        return any(self.gemm(name).is_fp8 for name in GEMMS)

    def _check_gemm(self, gemm: str, a: Operand, b: Operand) -> None:
        where = f"recipe '{self.name}': {gemm}"
        for operand in (a, b):
            try:
                _ = operand.tile
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
        if self.gemm(gemm).accumulate == "fast" and not {a.granularity, b.granularity} <= {"tensor", "row", "column"}:
            raise ConfigError(
                f"{where}.accumulate = 'fast' does nothing with {a.granularity} and {b.granularity} scales: "
                "such GEMMs accumulate slowly. Leave it out."
            )
        if a.format == b.format == "e5m2":
            raise ConfigError(f"{where}: no hardware multiplies E5M2 by E5M2. Give one operand format = 'e4m3'.")
        if a.is_folded:
            raise ConfigError(
                f"{where}: its left operand cannot be 'column' (folded). Only dgrad.weight and wgrad.input can."
            )
        if gemm == "fprop" and b.is_folded:
            raise ConfigError(f"{where}.weight cannot be 'column' (folded): fprop is where the codes are made.")

    def _check_folded(self, where: str, gemm: Gemm, operand: Operand, source: Operand) -> None:
        if not (gemm.is_fp8 and operand.is_folded):
            return
        if not self.fprop.is_fp8 or not operand.is_transpose_of(source):
            role = where.split(".")[1]
            raise ConfigError(
                f"recipe '{self.name}': {where} is 'column' (folded), so its codes are those of fprop.{role}: that one "
                "must be in FP8, 'row', with the same format, scaling and nearest rounding. "
                f"It is {source}, this one {operand}."
            )
