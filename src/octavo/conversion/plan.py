"""A plan, as data and as text: the precision of every layer with a GEMM, and why."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from octavo._util.terminal import columns, quantity
from octavo.conversion.choices import advice, choices
from octavo.conversion.fusion_patterns import FusionPattern
from octavo.conversion.layer_plan import LayerPlan
from octavo.conversion.policy import TOO_SMALL, Policy
from octavo.conversion.unconverted import Unconverted
from octavo.nn.experts import ExpertRoles
from octavo.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a whole model. `print(plan)` shows it as a table."""

    recipe: Recipe
    device: str
    tokens: int
    layers: tuple[LayerPlan, ...]
    recipes: dict[str, Recipe]
    """Layer name -> its recipe."""
    structures: tuple[FusionPattern, ...] = ()
    """Patterns whose layers are computed together."""
    experts: dict[str, ExpertRoles] = field(default_factory=dict)
    """Full name of each module of experts in FP8 -> roles of its parameters."""
    stacks: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Full name of each module in FP8 with one matrix per expert -> names of the arguments of its `forward`."""
    policy: Policy = field(default_factory=Policy, repr=False)
    """The policy of this plan."""
    instead: str = ""
    """Why the recipe is not the default, if the user named none; empty otherwise."""
    allow_reference: bool = False
    """Whether `convert` was asked to run reference kernels on a GPU."""
    refused: str = ""
    """Why the device cannot run FP8, so that `convert` refuses the plan; empty if it can."""
    unapplied: tuple[str, ...] = ()
    """Activations that the policy asks for in FP8 and that are not, a line each with the reason."""
    notes: tuple[str, ...] = ()
    """Further surprises for a user: little or nothing in FP8, weights in FP16, or in FP32 on a GPU."""
    unconverted: tuple[Unconverted, ...] = ()
    """Weights that no convertible layer reads."""
    parameters: int = 0
    """Number of all parameters of the model."""

    @property
    def fp8_layers(self) -> int:
        """Number of layers that run in FP8."""
        return sum(layer.is_fp8 for layer in self.layers)

    @property
    def fp8_weights(self) -> int:
        """Number of weights of layers that run in FP8."""
        return sum(layer.weights for layer in self.layers if layer.is_fp8)

    @property
    def fp8_shares(self) -> dict[str, float]:
        """Shares of FP8 in a token's products with weights, forward and backward; of a convolution, per pixel.

        `fp8_flops`, and if gains are predicted `fp8_time`, with the quantisation passes.
        """
        left = sum(weight.multiplied for weight in self.unconverted)
        flops = sum(layer.multiplied for layer in self.layers) + left
        if not flops:
            return {}
        fp8 = sum(layer.multiplied * layer.precision.count("fp8") / 3 for layer in self.layers)
        found = {"fp8_flops": fp8 / flops}
        if any(layer.gain for layer in self.layers):
            fp8 = sum(layer.multiplied / layer.gain for layer in self.layers if layer.gain)
            left += sum(layer.multiplied for layer in self.layers if not layer.gain)
            found["fp8_time"] = fp8 / (fp8 + left)
        return found

    @property
    def share(self) -> float:
        """The share of FP8 in these FLOPs; 0 without any."""
        return self.fp8_shares.get("fp8_flops", 0.0)

    @property
    def is_little(self) -> bool:
        """Whether less than half of these FLOPs is in FP8 because weights are left that no layer reads."""
        return bool(self.unconverted) and self.share < 0.5

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory that weights in FP8 save, compared with now."""
        return sum(layer.saves for layer in self.layers)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        body = {"recipe": self.recipe.name, "device": self.device, "tokens": self.tokens}
        layers = [asdict(layer) for layer in self.layers]
        structures = [asdict(pattern) for pattern in self.structures]
        said: dict[str, Any] = {
            "instead": self.instead,
            "unapplied": self.unapplied,
            "notes": self.notes,
            "refused": self.refused,
            "parameters": self.parameters,
        }
        said["unconverted"] = [asdict(weight) for weight in self.unconverted]
        said["choices"] = [choice._asdict() for choice in choices(self.layers, self.device, self.tokens)]
        return json.dumps({**body, "layers": layers, "structures": structures, **said}, indent=1)

    def __str__(self) -> str:
        return "\n".join(table(self))


def table(plan: Plan) -> list[str]:
    """Return the lines of `print(plan)`."""
    return [*header(plan), *columns(table_rows(plan)), "", *footer(plan)]


def header(plan: Plan) -> list[str]:
    """Return the lines above a plan's table: what keeps all of it from running, and from the default recipe."""
    said = [*filter(None, (plan.refused, plan.instead))]
    return [*said, ""] if said else []


def table_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return the titles and the rows of a plan's table; the gain column is left out if no gain is predicted."""
    rows = [("layer", "N x K", "recipe", "fprop / dgrad / wgrad", "gain", "why"), *_alike(plan.layers)]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for weight in plan.unconverted:
        key = _starred(weight.name), " x ".join(map(str, weight.shape)), weight.reason
        groups.setdefault(key, []).append(weight.name)
    rows += [(_counted(key[0], names), key[1], "-", "not converted", "-", key[2]) for key, names in groups.items()]
    has_gain = any(layer.gain for layer in plan.layers)
    return rows if has_gain else [(*row[:4], row[5]) for row in rows]


def footer(plan: Plan) -> list[str]:
    """Return the lines below a plan's table: counts, gains, weights in FP8, fusions, options without effect, advice."""
    weights = sum(layer.weights for layer in plan.layers)
    layers = "layers" if any("conv" in layer.kind for layer in plan.layers) else "linear layers"
    share = f"{_percent(plan.fp8_weights / max(weights, 1))} of their weights"
    if plan.unconverted:
        share += f", {_percent(plan.share)} of the FLOPs of GEMMs with weights"
    share += f", {_percent(plan.fp8_weights / max(plan.parameters, 1))} of all parameters"
    slow = sum("reference" in layer.kernels for layer in plan.layers) if plan.device != "cpu" else 0
    slowly = f", {slow} of them by the slow reference" if slow else ""
    return [
        f"{plan.fp8_layers} of {len(plan.layers)} {layers} in FP8 ({share}) on {plan.device}{slowly}",
        *_gains(plan),
        *_stored(plan),
        *_together(plan.structures),
        *plan.unapplied,
        *plan.notes,
        *advice(plan.layers, plan.device, plan.tokens),
    ]


def _percent(share: float) -> str:
    """Format a share; 100% only if it is everything."""
    return f"{share if share >= 1 else min(share, 0.99):.0%}"


def _gains(plan: Plan) -> list[str]:
    """Return a line on the column of gains, if there is one."""
    said = f"gain: predicted speed relative to BF16, with {plan.tokens:,} tokens per forward"
    return [said] if any(layer.gain for layer in plan.layers) else []


def _stored(plan: Plan) -> list[str]:
    """Return a line on the weights that are stored in FP8, if there are any."""
    count = sum(layer.weight == "fp8" for layer in plan.layers)
    saves = f"{plan.saved_bytes / 2**20:,.1f} MiB less than now" if plan.saved_bytes else "as they are now"
    return [f"weights of {quantity(count, 'layer')} stored in FP8, {saves}"] if count else []


def _together(patterns: tuple[FusionPattern, ...]) -> list[str]:
    """Return a line per kind of pattern; those that differ only by the numbers in their names are one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for pattern in patterns:
        groups.setdefault((_starred(pattern.name), pattern.what), []).append(pattern.name)
    names = {key: _counted(key[0], found) for key, found in groups.items()}
    return [f"{names[key]}: {key[1]}" for key in groups]


def _starred(name: str) -> str:
    """Return a name with stars in place of numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _counted(pattern: str, names: list[str]) -> str:
    return names[0] or "the model itself" if len(names) == 1 else f"{pattern} ({len(names)})"


def _alike(layers: tuple[LayerPlan, ...]) -> list[tuple[str, ...]]:
    """Return the rows of the table; layers that differ only by the numbers in their names share one, with a count."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer in layers:
        kind = "" if layer.kind == "linear" else f", {layer.kind}"
        shape, gain = "{} x {}{}".format(*layer.shape, kind), f"{layer.gain:.2f}" if layer.gain else "-"
        precision = _kernels(layer.kernels) if layer.is_fp8 else "bf16"
        key = (_starred(layer.name), shape, layer.recipe, precision, gain, layer.reason)
        groups.setdefault(key, []).append(layer.name)
    return [(_counted(key[0], names), *key[1:]) for key, names in groups.items()]


def _kernels(names: str) -> str:
    """Return the kernels of the three GEMMs; neighbours that are alike are one, with a count."""
    alike = [(name, len([*same])) for name, same in groupby(names.split(" / "))]
    return " / ".join(name if count == 1 else f"{count} x {name}" for name, count in alike)


def commonest_reason(layers: tuple[LayerPlan, ...], unconverted: tuple[Unconverted, ...] = ()) -> str:
    """Return the most common reason of layers that stay in BF16, with their number; of other weights without layers."""
    given = (TOO_SMALL if layer.reason.startswith(TOO_SMALL) else layer.reason for layer in layers if not layer.is_fp8)
    reasons = Counter(given).most_common(1)  # each layer that is too small has its own gain
    alike = [f"{reason} ({count} of {quantity(len(layers), 'layer')})" for reason, count in reasons]
    others = f"no nn.Linear and no convolution; {unconverted[0].reason}" if unconverted else ""
    return "".join(alike) or others or "the model has no linear layer and no convolution"
