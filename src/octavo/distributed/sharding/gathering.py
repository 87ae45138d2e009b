"""How each weight of a sharded model is gathered, and why: decided before anything is changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from octavo.conversion.structure import full_name
from octavo.kernels import Target
from octavo.nn import Linear
from octavo.nn.functional import target_of
from octavo.recipes import Recipe, reused_from
from octavo.tensor import FP8Tensor, local


@dataclass(frozen=True)
class Use:
    """A place where a parameter is a module's."""

    module: nn.Module
    name: str
    """The module's full name."""
    attribute: str

    @property
    def full_name(self) -> str:
        """The parameter's name there."""
        return full_name(self.name, self.attribute)


@dataclass(frozen=True, kw_only=True, slots=True)
class GatherPlan:
    """How one parameter is gathered."""

    name: str
    """Its first name in the model."""
    shape: tuple[int, ...]
    sent: str
    """What is sent: codes by their format and granularity, or the values by their dtype, or rows that are looked up."""
    bytes: int
    """Of all ranks' parts together, padding included: what each rank has once it is gathered. 0: it never is."""
    reason: str
    """Why the weight of an FP8 layer is not sent as codes; empty where it is, and for all other parameters."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How a sharded model is gathered. `print(plan)` shows the weights of FP8 layers as a table."""

    ranks: int
    """That a parameter is cut for."""
    parameters: tuple[GatherPlan, ...]
    in_high_precision: int = field(repr=False)
    """The bytes of a gather of all parameters, were none sent as codes."""

    @property
    def bytes(self) -> int:
        """The bytes of a gather of all parameters: a rank receives (ranks - 1) / ranks of them."""
        return sum(parameter.bytes for parameter in self.parameters)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        parameters = [asdict(parameter) for parameter in self.parameters]
        return json.dumps({"ranks": self.ranks, "bytes": self.bytes, "parameters": parameters}, indent=1)

    def __str__(self) -> str:
        rows = [("parameter", "shape", "sent as", "MB", "why")]
        for p in self.parameters:
            shape = " x ".join(map(str, p.shape))
            rows.append((p.name, shape, p.sent, f"{p.bytes / 1e6:.2f}", p.reason))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, (*widths, 0), strict=True)) for row in rows]
        share = (
            f"{self.bytes / 1e6:.2f} MB a gather on {self.ranks} ranks, {self.in_high_precision / 1e6:.2f} without FP8"
        )
        return "\n".join([*(line.rstrip() for line in lines), share])


def uses_of(model: nn.Module) -> list[tuple[nn.Parameter, list[Use]]]:
    """Return every parameter of a model with the modules that it is a parameter of, in the model's order."""
    found: dict[nn.Parameter, list[Use]] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append(Use(module, name, attribute))
    return list(found.items())


def is_fp8_weight(uses: Sequence[Use]) -> bool:
    """Return whether a converted layer reads this parameter as its weight."""
    return any(isinstance(use.module, Linear) and use.attribute == "weight" for use in uses)


def target_or_reason(parameter: Tensor, uses: Sequence[Use], ranks: int) -> Target | str:
    """Return what the weight of an FP8 layer is sent as, or why its values are sent."""
    others = [use.full_name for use in uses if not (type(use.module) is Linear and use.attribute == "weight")]
    if others:
        return f"it is {others[0]} too, which reads its values"
    parameter = local(parameter)  # what tensor parallel has left of it on this rank
    if isinstance(parameter, FP8Tensor):
        return Target(parameter.format, parameter.granularity.name, parameter.scaling)
    recipes = [use.module.recipe for use in uses if isinstance(use.module, Linear)]
    reason = next(filter(None, map(_unfit, recipes)), None)
    if reason is not None:
        return reason
    targets = {target_of(recipe.fprop.weight) for recipe in recipes}
    if len(targets) > 1:
        return "layers that share it quantise it in different ways"
    target = targets.pop()
    height, rows = target.tile.rows, -(-parameter.shape[0] // ranks)
    if height is not None and (rows % height or parameter.shape[0] % height):
        return f"a rank has {rows} of {parameter.shape[0]} rows, and {height} share a scale"
    return target


def _unfit(recipe: Recipe) -> str | None:
    for name in ("fprop", "dgrad"):
        if not recipe.gemm(name).is_fp8:
            return f"{name} runs in BF16"
    if recipe.fprop.weight.rounding != "nearest":
        return "its codes are drawn anew in each forward"
    if reused_from(recipe, "dgrad", "weight") is None:
        return "dgrad reads other codes than fprop: two copies of one byte are as much as BF16"
    return None


def gather_plan(
    parameter: Tensor, name: str, sent: Target | str | None, dtype: torch.dtype | None, ranks: int
) -> GatherPlan:
    """Return the line of one parameter. `dtype`: of values that are sent; `sent`: None where it is no FP8 layer's."""
    parameter = local(parameter)
    rows = -(-parameter.shape[0] // ranks) if parameter.dim() else 1
    shape = (rows, *parameter.shape[1:])
    if isinstance(sent, Target):
        assert len(shape) == 2
        scales = prod(sent.tile.scale_shape(*shape)) if sent.tile.rows is not None else 0
        size = ranks * (prod(shape) * sent.fmt.dtype.itemsize + scales * torch.float32.itemsize)
        return GatherPlan(
            name=name, shape=tuple(parameter.shape), sent=f"{sent.format} {sent.granularity}", bytes=size, reason=""
        )
    size = ranks * prod(shape) * (dtype or parameter.dtype).itemsize
    text = str(dtype or parameter.dtype).removeprefix("torch.")
    return GatherPlan(name=name, shape=tuple(parameter.shape), sent=text, bytes=size, reason=sent or "")


def rows_plan(parameter: Tensor, name: str, dtype: torch.dtype | None) -> GatherPlan:
    """Return the line of an embedding that is not gathered: its rows are sent where they are looked up."""
    text = str(dtype or parameter.dtype).removeprefix("torch.")
    return GatherPlan(name=name, shape=tuple(parameter.shape), sent=f"{text}, rows looked up", bytes=0, reason="")
