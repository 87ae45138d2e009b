"""Recipes: how the two operands of each of a linear layer's three GEMMs become FP8.

    fprop   Y  (M, N) = input (M, K)        . weight (N, K)^T
    dgrad   dX (M, K) = grad_output (M, N)  . weight^T (K, N)^T
    wgrad   dW (N, K) = grad_output^T (N, M) . input^T (K, M)^T

M: tokens, N: output features, K: input features. Operands are described as they appear in these lines: their rows are
kept, their columns are summed over. So `row` is one scale per kept row, which every row-wise GEMM can apply to its
result. `column` is one scale per summed index, which no GEMM can apply: such an operand is *folded*. Its codes are
those of fprop, transposed, and its scales are multiplied into the other operand before that one is quantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, cast

from octavo.errors import ConfigError, did_you_mean
from octavo.numerics import BLOCKS, NARROW, PER_COLUMN, SYLVESTER, Granularity, Rounding, Scaling, granularity_named
from octavo.recipes.operands import LinearPlan, plan_of

GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
"""Names of the left and right operand of each GEMM."""

STORED_SCALE_ROLES = ("input", "grad_output")
"""Roles whose scales may be stored from step to step, in the order of a layer's rows in `ScalingState`."""
FormatName = Literal["e4m3", "e5m2", "int8", "e2m3", "e3m2", "e2m1"]
"""Formats of codes; the last three are MX formats."""
Precision = Literal["fp8", "bf16"]
"""Precision of a GEMM, or of a tensor saved for backward: `bf16` unchanged, `fp8` as codes."""
ScaleFrom = Literal["current", "delayed", "just_in_time", "static"]
"""Source of a scale."""
MOST_MARGIN = 8
"""Bits of headroom with which no scale overflows: the smaller of the formats' maxima is above 2^8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand:
    """Quantisation of one operand of one GEMM."""

    format: FormatName = "e4m3"
    """E4M3 for precision, E5M2 for range, INT8 for precision where a row has no outliers, or is rotated."""
    granularity: str = "row"
    """Elements that share a scale: tensor, row, column (folded), 1x128, 128x128, 1x32."""
    scaling: Scaling = "power_of_two"
    """Scales rounded up to a power of two, FP32 scales, or FP32 scales as inference engines compute them."""
    rounding: Rounding = "nearest"
    """To the nearest code, or stochastic."""
    scale_from: ScaleFrom = "current"
    """Source of its scale: its own maximum (`current`), those of earlier steps (`delayed`), these unless they would
    saturate it (`just_in_time`), or a calibration file (`static`)."""
    rotation: int = 0
    """Largest block of the Hadamard rotation along the summed index, before quantisation: 4, 16, 64, 256 or 1024; a
    layer takes the largest that divides its features (`octavo.numerics.rotation`). 0: none."""
    hadamard: Literal["regular", "sylvester"] = "regular"
    """Matrices of the rotation: regular ones, or Sylvester's, which have every power of two from 4 to 1024."""

    def __setstate__(self, state: list[Any]) -> None:
        """Restore a pickled operand: the values of its fields in order, of which older files have fewer."""
        values = dict(zip((each.name for each in fields(self)), state, strict=False))
        for each in fields(self):
            object.__setattr__(self, each.name, values.get(each.name, each.default))

    @property
    def stored_format(self) -> Literal["e4m3", "e5m2"]:
        """Format of an operand with a scale per tensor, which is never an MX format."""
        assert self.format in ("e4m3", "e5m2")
        return self.format

    @property
    def signed_rotation(self) -> int:
        """The rotation as one integer: negative for Sylvester's matrices (`octavo.numerics.rotation`)."""
        return -self.rotation if self.hadamard == "sylvester" else self.rotation

    @property
    def has_stored_scale(self) -> bool:
        """Whether its scale is known in advance: a layer stores it from step to step."""
        return self.scale_from != "current"

    @property
    def is_repeatable(self) -> bool:
        """Whether its codes follow from the tensor alone, and are the same each time."""
        return self.rounding == "nearest" and not self.has_stored_scale

    @property
    def tile(self) -> Granularity:
        """The granularity as an object."""
        return granularity_named(self.granularity)

    @property
    def as_rows(self) -> Operand:
        """This operand with one scale per row of the untransposed matrix, as a folded one is quantised."""
        return replace(self, granularity=self.tile.transposed.name) if self.is_folded else self

    @property
    def is_folded(self) -> bool:
        """Whether the scales lie along the summed index and move into the other operand."""
        return self.tile == PER_COLUMN

    def is_transpose_of(self, other: Operand) -> bool:
        """Whether this operand's codes and scales are those of `other`, transposed."""
        alike = self == replace(other, granularity=other.tile.transposed.name)
        return alike and self.rounding == "nearest" and not self.rotation  # a rotation belongs to one summed index

    @property
    def _shown_rotation(self) -> str:
        return f"{'Sylvester ' if self.signed_rotation < 0 else ''}{self.rotation}"

    def __str__(self) -> str:
        extras = [
            {"float32": "FP32 scales", "engine": "engine scales"}.get(self.scaling, ""),
            {"stochastic": "stochastic"}.get(self.rounding, ""),
            f"rotated by {self._shown_rotation}" if self.rotation else "",
            {"current": ""}.get(self.scale_from, self.scale_from.replace("_", " ")),
        ]
        return " ".join([self.format.upper(), self.granularity, *filter(None, extras)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """Fields that the three GEMMs have in common."""

    precision: Precision = "fp8"
    """`bf16` leaves this GEMM in the precision of the model."""
    accumulate: Literal["slow", "fast"] = "slow"
    """`fast` lets Hopper's tensor cores keep 13 fraction bits, truncated: faster, but coherent sums are biased toward
    zero."""

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
class History:
    """Scales from maxima of earlier steps, for operands that are `delayed` or `just_in_time`."""

    length: int = 16
    """Number of optimizer steps whose maxima are kept."""
    choose: Literal["max", "last"] = "max"
    """Use the largest of them, or the last one."""
    margin: int = 0
    """Bits of headroom: the scale is multiplied by 2^margin."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"history.length = {self.length}: keep the maxima of 1 step at least.")
        if not 0 <= self.margin <= MOST_MARGIN:
            raise ConfigError(
                f"history.margin = {self.margin}: it is the bits of headroom above the largest value seen, 0 to "
                f"{MOST_MARGIN}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Why a module has its recipe, as found by `octavo localize`. Shown in plans; no computation depends on it."""

    reason: str
    """Short reason."""
    loss_change: float
    """Nats per token, with fprop of this module alone in FP8."""
    loss_error: float | None = None
    """Standard error of `loss_change` over sequences; None if it is of a single one."""
    turned: dict[str, float] = field(default_factory=dict)
    """GEMM -> 1 - cosine between the model's gradient with it in FP8 and without."""
    ms_saved: float = 0.0
    """Milliseconds per step that the module's recipe saves."""
    ms_offered: float = 0.0
    """Milliseconds per step that it would save with all of its GEMMs in FP8."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Numerics of a linear layer. Plain data, read by kernels and layers; nothing else decides."""

    name: str
    """Shown in plans and results."""
    fprop: Fprop = field(default_factory=Fprop)
    """The forward GEMM."""
    dgrad: Dgrad = field(default_factory=Dgrad)
    """The gradient of the input."""
    wgrad: Wgrad = field(default_factory=Wgrad)
    """The gradient of the weight."""
    history: History = field(default_factory=History)
    """Scales from maxima of earlier steps, for operands that use them."""
    modules: dict[str, Recipe] = field(default_factory=dict)
    """Recipes of modules whose full name matches a pattern (`layers.0.*`); the last match wins."""
    evidence: dict[str, Evidence] = field(default_factory=dict)
    """Why a pattern of `modules` has its recipe, from a precision map; shown in plans."""

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled recipe. What is derived from its fields is derived again: older files lack some of it."""
        names = {each.name for each in fields(self)}
        vars(self).update({name: value for name, value in state.items() if name in names})
        self.__post_init__()

    def __post_init__(self) -> None:
        for gemm, a, b in self.gemms():
            self._check_gemm(gemm, a, b)
        # Layers ask in every call.
        object.__setattr__(self, "_reused", frozenset(self._find_reused()))
        object.__setattr__(self, "_stored", dict(self._find_stored()))
        object.__setattr__(self, "_folded", frozenset(self._find_folded()))
        object.__setattr__(self, "_second", dict(self._find_second()))
        for role in STORED_SCALE_ROLES:
            self._check_one_quantisation(role)
        object.__setattr__(self, "plan", plan_of(self))
        if nested := next((pattern for pattern, recipe in self.modules.items() if recipe.modules), None):
            raise ConfigError(
                f"recipe '{self.name}': modules.'{nested}': a recipe inside `modules` cannot have `modules` itself. "
                "Give each pattern its own line."
            )
        if unknown := next((pattern for pattern in self.evidence if pattern not in self.modules), None):
            near = did_you_mean(unknown, self.modules)
            raise ConfigError(f"recipe '{self.name}': evidence.'{unknown}': `modules` has no such pattern.{near}")
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

    def for_layer(self, name: str) -> Recipe:
        """Return the recipe of a layer by its full name: the last match in `modules`, otherwise this one."""
        return next((own for pattern, own in reversed(self.modules.items()) if fnmatchcase(name, pattern)), self)

    def reuses(self, operand: str) -> bool:
        """Return whether the codes of an operand, such as `dgrad.weight`, are those of another GEMM, transposed."""
        return operand in self.__dict__["_reused"]

    def _find_reused(self) -> Iterator[str]:
        if self.fprop.is_fp8 and self.dgrad.is_fp8 and self.dgrad.weight.is_transpose_of(self.fprop.weight):
            yield "dgrad.weight"
        if self.fprop.is_fp8 and self.wgrad.is_fp8 and self.wgrad.input.is_transpose_of(self.fprop.input):
            yield "wgrad.input"
        folds = self.wgrad.input.is_folded or self.dgrad.weight.is_folded
        alike = self.wgrad.grad_output.is_transpose_of(self.dgrad.grad_output)
        if self.dgrad.is_fp8 and self.wgrad.is_fp8 and alike and not folds:
            yield "wgrad.grad_output"

    def folds(self, operand: str) -> bool:
        """Return whether the scales of an operand, `dgrad.weight` or `wgrad.input`, move into the gradient."""
        return operand in self.__dict__["_folded"]

    def _find_folded(self) -> Iterator[str]:
        """Yield the folded operands. Their codes must be those of fprop, or a second set beside integer codes."""
        for gemm, role in (("dgrad", "weight"), ("wgrad", "input")):
            operand, where = getattr(self.gemm(gemm), role), f"{gemm}.{role}"
            if not (self.gemm(gemm).is_fp8 and operand.is_folded):
                continue
            if not self.reuses(where) and not self._has_second_set(role, operand):
                raise ConfigError(
                    f"recipe '{self.name}': {where} is 'column' (folded), so its codes are those of fprop.{role}: that "
                    "one must be in FP8, 'row', with the same format, scaling and nearest rounding. "
                    f"It is {getattr(self.fprop, role)}, this one {operand}."
                )
            yield where

    def second(self, role: str) -> Operand | None:
        """Return how `input` or `weight` is quantised a second time, by rows, for a folded backward GEMM.

        None: the backward GEMM reads the codes of fprop, or quantises its transpose by itself.
        """
        second: dict[str, Operand] = self.__dict__["_second"]
        return second.get(role)

    def folded_rows(self, role: str) -> Operand:
        """Return how the codes that a folded backward GEMM reads of `input` or `weight` were quantised, by rows."""
        return self.second(role) or cast(Operand, getattr(self.fprop, role))

    @cached_property
    def plan(self) -> LinearPlan:
        """What layers and kernels read of this recipe."""
        return plan_of(self)

    @property
    def has_integer_fprop(self) -> bool:
        """Whether fprop multiplies INT8 or rotated codes, which only linear layers make."""
        return self.fprop.is_fp8 and (self.fprop.input.format == "int8" or bool(self.fprop.input.rotation))

    def with_fprop_in_fp8(self) -> Recipe | None:
        """Return this recipe with fprop by the second set of codes, which backward reads; None if there is none.

        For layers and devices that cannot multiply INT8 or rotated codes.
        """
        x, w = self.second("input"), self.second("weight")
        if x is None or w is None:
            return None
        return replace(self, name=f"{self.name}, fprop in FP8", fprop=replace(self.fprop, input=x, weight=w))

    def _find_second(self) -> Iterator[tuple[str, Operand]]:
        for gemm, role in (("dgrad", "weight"), ("wgrad", "input")):
            if self.folds(f"{gemm}.{role}") and not self.reuses(f"{gemm}.{role}"):
                yield role, getattr(self.gemm(gemm), role).as_rows

    def _has_second_set(self, role: str, operand: Operand) -> bool:
        """Return whether codes of fprop that no backward GEMM can read have others beside them, for a folded operand.

        Integer codes are not multiplied by those of a gradient in FP8, and rotated ones lie in another basis.
        """
        forward: Operand = getattr(self.fprop, role)
        apart = forward.rotation or (forward.format == "int8") != (operand.format == "int8")
        repeatable = forward.is_repeatable and operand.is_repeatable and not operand.rotation
        return bool(self.fprop.is_fp8 and apart and forward.granularity == "row" and repeatable)

    def _find_stored(self) -> Iterator[tuple[str, Operand]]:
        for role in STORED_SCALE_ROLES:
            operands = [operand for operand in self._operands(role).values() if operand.has_stored_scale]
            yield from ((role, operand) for operand in operands[:1])

    @property
    def is_fp8(self) -> bool:
        """Whether any GEMM runs in FP8."""
        return any(self.gemm(name).is_fp8 for name in GEMMS)

    def stored_scale(self, role: str) -> Operand | None:
        """Return the operand of a role, `input` or `grad_output`, if its scale is stored from step to step."""
        stored: dict[str, Operand] = self.__dict__["_stored"]
        return stored.get(role)

    @property
    def has_stored_scales(self) -> bool:
        """Whether layers store scales from step to step."""
        return bool(self.__dict__["_stored"])

    @property
    def needs_calibration(self) -> bool:
        """Whether layers need the scales of a calibration file."""
        return any(operand.scale_from == "static" for operand in self.__dict__["_stored"].values())

    @property
    def is_emulated(self) -> bool:
        """Whether no supported hardware runs one of its GEMMs: results are right, but nothing is gained."""
        return any("1x32" in (a.granularity, b.granularity) for _, a, b in self.gemms())

    def _operands(self, role: str) -> dict[str, Operand]:
        """Return the operands of a role by GEMM, for the GEMMs that run in FP8."""
        both = ((name, dict(zip(OPERANDS[name], operands, strict=True))) for name, *operands in self.gemms())
        return {name: operands[role] for name, operands in both if role in operands}

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
        if (a.format == "int8") != (b.format == "int8"):
            raise ConfigError(
                f"{where}: no hardware multiplies INT8 by FP8. Give both operands format = 'int8', or neither."
            )
        if a.signed_rotation != b.signed_rotation:
            raise ConfigError(
                f"{where}: its operands are rotated by {a._shown_rotation} and {b._shown_rotation}. A rotation of the "
                "summed index cancels only if both have the same."
            )
        for operand in (a, b):
            _check_integer_and_rotation(where, operand)
        if a.format == b.format == "e5m2":
            raise ConfigError(f"{where}: no hardware multiplies E5M2 by E5M2. Give one operand format = 'e4m3'.")
        if a.is_folded:
            raise ConfigError(
                f"{where}: its left operand cannot be 'column' (folded). Only dgrad.weight and wgrad.input can."
            )
        if gemm == "fprop" and b.is_folded:
            raise ConfigError(f"{where}.weight cannot be 'column' (folded): fprop is where the codes are made.")
        if narrow := next((o.format for o in (a, b) if o.format in NARROW and o.granularity != "1x32"), None):
            raise ConfigError(f"{where}: {narrow} is a format of MX. Give that operand granularity = '1x32'.")
        if any(operand.granularity == "1x32" and operand.scaling != "power_of_two" for operand in (a, b)):
            raise ConfigError(f"{where}: 1x32 scales are E8M0, powers of two. Leave scaling out.")
        for role, operand, partner in zip(OPERANDS[gemm], (a, b), (b, a), strict=True):
            if operand.has_stored_scale:
                _check_kept_scale(f"{where}.{role}.scale_from = '{operand.scale_from}'", role, operand, partner)

    def _check_one_quantisation(self, role: str) -> None:
        """Refuse one stored scale for two quantisations of a matrix: its codes are made once, and transposed."""
        operands = self._operands(role)
        if len({replace(operand, granularity="tensor") for operand in operands.values()}) > 1 and any(
            operand.has_stored_scale for operand in operands.values()
        ):
            described = " and ".join(f"{gemm}.{role} ({operand})" for gemm, operand in operands.items())
            raise ConfigError(
                f"recipe '{self.name}': {described} must be alike: with a scale that is kept from step to step they "
                "are one quantisation, read by both GEMMs."
            )


def _check_integer_and_rotation(where: str, operand: Operand) -> None:
    if operand.hadamard == "sylvester" and operand.rotation not in SYLVESTER:
        raise ConfigError(
            f"{where}: hadamard = 'sylvester' with rotation = {operand.rotation}: it is one of {SYLVESTER}. Without a "
            "rotation leave hadamard out."
        )
    if operand.hadamard == "regular" and operand.rotation and operand.rotation not in BLOCKS:
        raise ConfigError(
            f"{where}: rotation = {operand.rotation}: it is one of {BLOCKS}, or 0 for none. Other powers of two: "
            "hadamard = 'sylvester'."
        )
    if operand.rotation and operand.granularity not in ("row", "tensor"):
        raise ConfigError(
            f"{where}: a rotated operand has one scale per 'row' or 'tensor', not '{operand.granularity}'. "
            "A rotation mixes the values of smaller tiles, and a folded operand has the codes of another product."
        )
    if operand.format == "int8" and operand.granularity not in ("row", "column", "tensor"):
        raise ConfigError(
            f"{where}: INT8 has one scale per 'row' or 'tensor', not '{operand.granularity}': its sums are integers, "
            "and scales are multiplied into the result."
        )
    if operand.format == "int8" and operand.has_stored_scale:
        raise ConfigError(
            f"{where}: INT8 has the scale of its own maximum (scale_from = 'current'), not '{operand.scale_from}': an "
            "integer format has no range to spare for a value above it."
        )


def override(modules: Mapping[str, Recipe], others: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Return `modules` and `others`, which match last: also a pattern of both, which a dict would leave where it is."""
    return {**{pattern: own for pattern, own in modules.items() if pattern not in others}, **others}


def _check_kept_scale(where: str, role: str, operand: Operand, partner: Operand) -> None:
    if role not in STORED_SCALE_ROLES:
        raise ConfigError(
            f"{where} is refused: a weight is scaled by its own maximum, in every forward. "
            "Maxima of earlier steps could only be worse. Leave it out."
        )
    if operand.granularity != "tensor":
        raise ConfigError(
            f"{where} is one scale per tensor, and this operand is '{operand.granularity}'. Set granularity = 'tensor'."
        )
    if operand.rounding != "nearest":
        raise ConfigError(f"{where} rounds to nearest only, not '{operand.rounding}'.")
    if partner.is_folded:
        raise ConfigError(
            f"{where} does not go with a folded partner, whose scales are multiplied into this operand: its maximum "
            "would follow them. Give the partner another granularity than 'column'."
        )
