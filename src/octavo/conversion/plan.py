"""The plan: for every layer with a GEMM what it will compute in, and why. Nothing is changed by making one."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn

from octavo.conversion.fusion_patterns import (
    FusionPattern,
    find_gates,
    find_mlps,
    find_structures,
    full_name,
    reader_of,
)
from octavo.conversion.gain import predicted_gain
from octavo.conversion.mode import suspended
from octavo.conversion.policy import Policy
from octavo.conversion.unapplied import find_unapplied
from octavo.conversion.weights import plan_weights
from octavo.errors import ConfigError, UnsupportedError, did_you_mean
from octavo.kernels.dispatch import on_gpu, planning_for
from octavo.kernels.explain import GPUS, gemm_kernel
from octavo.kernels.gemm import EMULATED
from octavo.nn.attention import ScaledDotProduct
from octavo.nn.conv import AnyConvolution, unsupported_reason_recipe
from octavo.nn.functional import requantises_exactly
from octavo.nn.operands import dtype_note
from octavo.recipes import GEMMS, Evidence, Recipe, RecipeLike, load


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """What one linear layer or convolution will do."""

    name: str
    kind: str = "linear"
    """`linear`, or the convolution and its kernel, as in `conv2d 3x3`."""
    shape: tuple[int, int]
    """(N, K) of its GEMM: output features, input features; of a convolution channels out, and in times kernel."""
    recipe: str
    precision: str
    """fprop / dgrad / wgrad, each fp8 or bf16."""
    kernels: str
    """The kernel of each FP8 GEMM; `-` where there is none."""
    gain: float | None
    """Predicted BF16 time / FP8 time on a Hopper GPU; None on other devices and for layers in BF16."""
    reason: str
    """Why it stays in BF16, or what to know of its kernels."""

    keeps_input: bool = False
    """Whether backward quantises its input again (`Policy.requantise`)."""
    weight: Literal["as_it_is", "fp8"] = "as_it_is"
    """Whether its weight is stored in FP8 (`Policy.weights`), or is one already."""
    saves: int = 0
    """Bytes of memory that storing it so saves, against now."""
    evidence: Evidence | None = None
    """What a precision map says of it."""

    @property
    def is_fp8(self) -> bool:
        """Whether any of its GEMMs runs in FP8."""
        return "fp8" in self.precision


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a whole model. `print(plan)` shows it as a table."""

    recipe: Recipe
    device: str
    tokens: int
    layers: tuple[LayerPlan, ...]
    recipes: dict[str, Recipe]
    """Layer name -> the recipe it runs by."""
    structures: tuple[FusionPattern, ...] = ()
    """What is computed together."""
    policy: Policy = field(default_factory=Policy, repr=False)
    """The policy that it was made with."""
    unapplied: tuple[str, ...] = ()
    """Where the policy asks for activations in FP8 and they are not: a line each, with the reason."""
    notes: tuple[str, ...] = ()
    """What else a user may not expect: nothing in FP8, or weights in FP16, or in FP32 on a GPU."""

    @property
    def fp8_layers(self) -> int:
        """The count of layers that run in FP8."""
        return sum(layer.is_fp8 for layer in self.layers)

    @property
    def saved_bytes(self) -> int:
        """The bytes of memory that weights in FP8 save, against now."""
        return sum(layer.saves for layer in self.layers)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        body = {"recipe": self.recipe.name, "device": self.device, "tokens": self.tokens}
        layers = [asdict(layer) for layer in self.layers]
        structures = [asdict(structure) for structure in self.structures]
        said = {"unapplied": self.unapplied, "notes": self.notes}
        return json.dumps({**body, "layers": layers, "structures": structures, **said}, indent=1)

    def __str__(self) -> str:
        return "\n".join(_table(self))


@suspended()  # modules are looked at by running them
def make_plan(
    model: nn.Module,
    recipe: RecipeLike = "folded",
    *,
    policy: Policy | None = None,
    tokens: int = 8192,
    device: torch.device | str | None = None,
) -> Plan:
    """Return what `convert` would do to a model.

    Args:
        model: any module; on the meta device too.
        recipe: a name, a file, a mapping or a Recipe; `modules` in it overrides it by name pattern.
        policy: what stays in BF16; the default keeps heads, embeddings, routers and small layers.
        tokens: tokens of one forward, for the predicted gain; of a convolution the output pixels.
        device: where it will run; by default where the model is. `h100` or `h200` need not be here.

    Raises:
        ConfigError: an unknown recipe, a pattern of a recipe that matches no linear layer and no convolution, one of
            the policy that matches no module, or weights in FP8
            with a recipe that cannot compute with their codes.
        UnsupportedError: `device` is not there to be asked what it can run.
    """
    if (gpu := GPUS.get(str(device))) is not None:
        with planning_for(gpu):
            return replace(make_plan(model, recipe, policy=policy, tokens=tokens, device="cuda"), device=str(device))
    recipe, policy = load(recipe), policy or Policy()
    policy.check_patterns(model)
    layers = list(_layers(model))
    layers_by_name = dict(layers)
    device = torch.device(device) if device is not None else _device_of(model)
    _check_patterns(recipe, policy, [name for name, _ in layers])
    recipes = {name: _recipe_for(name, recipe) for name, _ in layers}
    mlps = find_mlps(model)
    in_mlps = find_gates(model) | {
        full_name(name, child) for name, roles in mlps.items() for child in (*roles.inner, roles.down)
    }
    blocks = policy.blocks_to_keep(model)
    kept = {
        name: next((why for block, why in blocks.items() if f"{name}.".startswith(f"{block}.")), None)
        or policy.reason_to_keep(name, layer, name in in_mlps)
        for name, layer in layers
    }
    found = {name: _evidence_for(name, recipe) for name, _ in layers}
    rows = tuple(
        _plan_layer(name, layer, recipes[name], kept[name], found[name], policy, tokens, device)
        for name, layer in layers
    )
    rows = plan_weights(model, layers_by_name, rows, recipes, policy.weights)
    rows = _without_second_copies(model, rows, recipes, policy)
    chosen = {row.name: recipes[row.name] for row in rows if row.is_fp8}
    linears = {row.name: recipes[row.name] for row in rows if row.is_fp8 and row.kind == "linear"}
    keep_input = {row.name for row in rows if row.keeps_input}
    kept_in = policy.activation_inputs, policy.norm_inputs, policy.attention_output
    together = find_structures(model, linears, mlps, *kept_in, keep_input)
    structures = tuple(together) if policy.fuse and linears else ()
    unapplied = tuple(find_unapplied(model, policy, linears, mlps, structures, keep_input))
    return Plan(
        recipe=recipe,
        device=str(device),
        tokens=tokens,
        layers=rows,
        recipes=chosen,
        structures=structures,
        policy=policy,
        unapplied=unapplied,
        notes=tuple(_notes(rows, {layers_by_name[name].weight.dtype for name in chosen}, device, recipe)),
    )


def _without_second_copies(
    model: nn.Module, rows: tuple[LayerPlan, ...], recipes: dict[str, Recipe], policy: Policy
) -> tuple[LayerPlan, ...]:
    """Let layers that read attention's output quantise it again in backward: attention keeps that tensor anyway."""
    if not policy.fuse or policy.attention_output == "fp8":
        return rows
    readers = {reader_of(name, core) for name, core in model.named_modules() if isinstance(core, ScaledDotProduct)}
    readers = {name for name in readers if name in recipes and requantises_exactly(recipes[name])}
    return tuple(replace(row, keeps_input=True) if row.is_fp8 and row.name in readers else row for row in rows)


def _notes(
    rows: tuple[LayerPlan, ...], dtypes: set[torch.dtype], device: torch.device, recipe: Recipe
) -> Iterator[str]:
    """Yield what a user may not expect. dtypes: of the weights in FP8 layers."""
    if not dtypes and (recipe.is_fp8 or recipe.modules):
        reasons = Counter(row.reason for row in rows).most_common(1)
        alike = [f"{reason} ({count} of {len(rows)} layers)" for reason, count in reasons]
        yield f"Nothing will run in FP8: {''.join(alike) or 'the model has no linear layer and no convolution'}"
    if torch.is_autocast_enabled(device.type):
        return
    for dtype in (torch.float16, torch.float32):
        if dtype in dtypes and (note := dtype_note(dtype, device.type)) is not None:
            yield f"Weights are {dtype}. Without autocast {note}"


def refuse_fallbacks(plan: Plan) -> None:
    """Raise where the plan does less than it was asked to: by a slow kernel on a GPU, or by activations not in FP8.

    Raises:
        UnsupportedError: naming the first layer that would run on the reference kernel, or the first option of the
            policy that does nothing somewhere, and the reason.
    """
    if plan.unapplied and plan.policy.memory != "low":  # which asks for whatever the model has
        raise UnsupportedError(
            f"{plan.unapplied[0]}. Leave the option out, or convert with strict=False to go without it there."
        )
    for layer in plan.layers:
        if layer.is_fp8 and plan.device.startswith("cuda") and "reference" in layer.kernels:
            raise UnsupportedError(
                f"{layer.name}: recipe '{layer.recipe}' has no fast kernel on {plan.device} ({layer.reason}). "
                "Choose another recipe, or convert with strict=False to run it slowly."
            )


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear | AnyConvolution]]:
    """Yield each layer with a GEMM once, by its first name; a layer used in two places is one layer."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | AnyConvolution):
            yield name, module


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None or parameter.is_meta else parameter.device


def _check_patterns(recipe: Recipe, policy: Policy, names: list[str]) -> None:
    wheres = dict.fromkeys(recipe.modules, f"recipe '{recipe.name}': modules")
    wheres |= dict.fromkeys(policy.requantise, "policy: requantise")
    for pattern, where in wheres.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            near = did_you_mean(pattern, names)
            raise ConfigError(f"{where}: the pattern '{pattern}' matches no linear layer or convolution.{near}")


def _recipe_for(name: str, recipe: Recipe) -> Recipe:
    chosen = recipe
    for pattern, other in recipe.modules.items():
        chosen = other if fnmatchcase(name, pattern) else chosen
    return chosen


def _evidence_for(name: str, recipe: Recipe) -> Evidence | None:
    """Return what a precision map says of the pattern that decided a layer's recipe."""
    pattern = next((pattern for pattern in reversed(recipe.modules) if fnmatchcase(name, pattern)), None)
    return None if pattern is None else recipe.evidence.get(pattern)


def _plan_layer(
    name: str, layer: nn.Linear | AnyConvolution, recipe: Recipe, kept: str | None, found: Evidence | None,
    policy: Policy, tokens: int, device: torch.device,
) -> LayerPlan:  # fmt: skip
    """Return the row of one layer. `kept`: why the policy keeps it in BF16. `found`: of a precision map."""
    kind, shape, taps = _gemm_of(layer)
    gain = predicted_gain(recipe, *shape, tokens, taps) if on_gpu(device) and recipe.is_fp8 else None
    if kept is None and taps:
        kept = unsupported_reason_recipe(recipe)
    if kept is None and not recipe.is_fp8:
        kept = found.reason if found else "the recipe says bf16"
    if kept is None and gain is not None and gain < policy.min_gain and not found:
        unit = "output pixels" if taps else "tokens"
        kept = f"too small to gain: predicted {gain:.2f} times BF16 at {tokens} {unit}"
    if kept is not None:
        recipe, gain = load("bf16"), None
    names, notes = _kernels(recipe, device)
    keeps_input = kind == "linear" and policy.keeps_input(name, recipe)
    return LayerPlan(
        name=name,
        kind=kind,
        shape=shape,
        recipe=recipe.name,
        precision=" / ".join(recipe.gemm(gemm).precision for gemm in GEMMS),
        kernels=" / ".join(names),
        gain=gain,
        reason=kept or "; ".join(filter(None, (_said(found), notes, "keeps its input" if keeps_input else ""))),
        keeps_input=keeps_input,
        evidence=found,
    )


def _said(found: Evidence | None) -> str:
    return found.reason if found else ""


def _gemm_of(layer: nn.Linear | AnyConvolution) -> tuple[str, tuple[int, int], int]:
    """Return what a layer is, (N, K) of its GEMM, and the pixels of a convolution's patch, 0 for a linear layer."""
    if isinstance(layer, nn.Linear):
        return "linear", (layer.out_features, layer.in_features), 0
    taps, kernel = math.prod(layer.kernel_size), "x".join(map(str, layer.kernel_size))
    shape = layer.out_channels, layer.in_channels // layer.groups * taps
    return f"{type(layer).__name__.lower()} {kernel}", shape, taps


def _kernels(recipe: Recipe, device: torch.device) -> tuple[list[str], str]:
    """Return the kernel of each GEMM, and a note where the reference runs on a GPU."""
    operands = {name: (a, b) for name, a, b in recipe.gemms()}
    names, notes = [], ""
    for gemm in GEMMS:
        if gemm not in operands:
            names.append("-")
            continue
        a, b = operands[gemm]
        name, refused = gemm_kernel(device, (a.format, a.granularity), (b.format, b.granularity))
        names.append(name)
        if name in EMULATED:
            notes = "emulated: no faster than BF16"
        if name == "reference" and device.type == "cuda":
            notes = f"{gemm} falls back: {'; '.join(f'{kernel}: {why}' for kernel, why in refused.items())}"
    return names, notes


def _table(plan: Plan) -> list[str]:
    rows = table_rows(plan)
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
    return [*lines, "", *footer(plan)]


def table_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return the titles and the rows of a plan's table; without a predicted gain there is no column for it."""
    rows = [("layer", "N x K", "recipe", "fprop / dgrad / wgrad", "gain", "why"), *_alike(plan.layers)]
    has_gain = any(layer.gain for layer in plan.layers)
    return rows if has_gain else [(*row[:4], row[5]) for row in rows]


def footer(plan: Plan) -> list[str]:
    """Return the lines below a plan's table: counts, weights in FP8, what is fused, options without effect."""
    weights = sum(layer.shape[0] * layer.shape[1] for layer in plan.layers)
    fp8_weights = sum(layer.shape[0] * layer.shape[1] for layer in plan.layers if layer.is_fp8)
    share = fp8_weights / weights if weights else 0.0
    layers = "linear layers" if all(layer.kind == "linear" for layer in plan.layers) else "layers"
    total = f"{plan.fp8_layers} of {len(plan.layers)} {layers} in FP8 ({share:.0%} of their weights)"
    return [
        f"{total} on {plan.device}",
        *_stored(plan),
        *_together(plan.structures),
        *plan.unapplied,
        *plan.notes,
    ]


def _stored(plan: Plan) -> list[str]:
    """Return a line on the weights that are stored in FP8, if there are any."""
    count = sum(layer.weight == "fp8" for layer in plan.layers)
    saves = f"{plan.saved_bytes / 2**20:,.1f} MiB less than now" if plan.saved_bytes else "as they are now"
    return [f"weights of {count} layers stored in FP8, {saves}"] if count else []


def _together(structures: tuple[FusionPattern, ...]) -> list[str]:
    """Return a line for each kind of structure, those that differ only by the numbers in their names as one."""
    groups: dict[tuple[str, str], list[str]] = {}
    for structure in structures:
        groups.setdefault((_pattern(structure.name), structure.what), []).append(structure.name)
    names = {key: _counted(key[0], found) or "the model itself" for key, found in groups.items()}
    return [f"{names[key]}: {key[1]}" for key in groups]


def _pattern(name: str) -> str:
    """Return a name with stars for the numbers in it."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _counted(pattern: str, names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{pattern} ({len(names)})"


def _alike(layers: tuple[LayerPlan, ...]) -> list[tuple[str, ...]]:
    """Return the rows of the table; layers that differ only by the numbers in their names share one, with a count."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for layer in layers:
        kind = "" if layer.kind == "linear" else f", {layer.kind}"
        shape, gain = "{} x {}{}".format(*layer.shape, kind), f"{layer.gain:.2f}" if layer.gain else "-"
        kernels = layer.kernels.split(" / ")
        precision = (f"3 x {kernels[0]}" if len({*kernels}) == 1 else layer.kernels) if layer.is_fp8 else "bf16"
        key = (_pattern(layer.name), shape, layer.recipe, precision, gain, layer.reason)
        groups.setdefault(key, []).append(layer.name)
    return [(_counted(key[0], names), *key[1:]) for key, names in groups.items()]
