"""The plan: for every layer with a GEMM what it will compute in, and why. Nothing is changed by making one."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from octavo.conversion.experts import FoundExperts, find_experts, no_grouped_kernel
from octavo.conversion.fusion_patterns import (
    FusionPattern,
    find_gates,
    find_mlps,
    find_structures,
    full_name,
    reader_of,
)
from octavo.conversion.gain import predicted_gain
from octavo.conversion.heads import find_heads
from octavo.conversion.mode import suspended
from octavo.conversion.policy import Policy
from octavo.conversion.unapplied import find_unapplied
from octavo.conversion.unconverted import Unconverted, active_share, find_unconverted
from octavo.conversion.weights import plan_weights
from octavo.errors import ConfigError, UnsupportedError, did_you_mean
from octavo.kernels.devices import GPUS
from octavo.kernels.dispatch import architecture, is_planning, on_gpu, planning_for, rates, triton_unsupported_reason
from octavo.kernels.explain import gemm_kernel
from octavo.kernels.gemm import EMULATED
from octavo.nn.attention import ScaledDotProduct
from octavo.nn.conv import AnyConvolution, unsupported_reason_recipe
from octavo.nn.experts import FIRST, SECOND, ExpertRoles, unfused_reason
from octavo.nn.functional import requantises_exactly
from octavo.nn.grouped import unsupported_reason as unsupported_reason_grouped
from octavo.nn.linear import is_transposed
from octavo.nn.operands import dtype_note
from octavo.recipes import GEMMS, Evidence, Recipe, RecipeLike, load


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPlan:
    """What one linear layer or convolution will do."""

    name: str
    kind: str = "linear"
    """`linear`, `stored as K x N` of a transposed one, the convolution and its kernel, as in `conv2d 3x3`, or the
    number of experts, as in `128 experts`."""
    shape: tuple[int, int]
    """(N, K) of its GEMM: output features, input features; of a convolution channels out, and in times kernel."""
    count: int = 1
    """Number of such matrices: experts."""
    active: float = 1.0
    """The share of them that one token is multiplied by: of experts, those that it is sent to."""
    recipe: str
    precision: str
    """fprop / dgrad / wgrad, each fp8 or bf16."""
    kernels: str
    """The kernel of each FP8 GEMM; `-` where there is none."""
    gain: float | None
    """Predicted BF16 time / FP8 time on this GPU; None if Octavo has no rates of it, and for layers in BF16."""
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
    def weights(self) -> int:
        """The number of its weights."""
        return self.count * math.prod(self.shape)

    @property
    def multiplied(self) -> float:
        """The number of weights that one token is multiplied by."""
        return self.active * self.weights

    @property
    def is_experts(self) -> bool:
        """Whether it is a product of a module of experts, and named below that."""
        return self.kind.endswith(" experts")

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
    experts: dict[str, ExpertRoles] = field(default_factory=dict)
    """Modules of experts that compute in FP8, by full name, and what their parameters are."""
    policy: Policy = field(default_factory=Policy, repr=False)
    """The policy that it was made with."""
    allow_reference: bool = False
    """Whether `convert` was asked to run reference kernels on a GPU."""
    unapplied: tuple[str, ...] = ()
    """Where the policy asks for activations in FP8 and they are not: a line each, with the reason."""
    notes: tuple[str, ...] = ()
    """What else a user may not expect: nothing or little in FP8, weights in FP16, or in FP32 on a GPU."""
    unconverted: tuple[Unconverted, ...] = ()
    """Weights that no layer reads which could be converted."""
    parameters: int = 0
    """The number of all parameters of the model."""

    @property
    def fp8_layers(self) -> int:
        """The count of layers that run in FP8."""
        return sum(layer.is_fp8 for layer in self.layers)

    @property
    def fp8_weights(self) -> int:
        """The number of weights of layers that run in FP8."""
        return sum(layer.weights for layer in self.layers if layer.is_fp8)

    @property
    def share(self) -> float:
        """The share of FP8 in the FLOPs that a token costs in products with weights; of a convolution, per pixel."""
        fp8 = sum(layer.multiplied for layer in self.layers if layer.is_fp8)
        others = sum(weight.multiplied for weight in self.unconverted)
        return fp8 / max(sum(layer.multiplied for layer in self.layers) + others, 1.0)

    @property
    def is_little(self) -> bool:
        """Whether less than half of these FLOPs is in FP8, as weights are left that no layer reads."""
        return bool(self.unconverted) and self.share < 0.5

    @property
    def fp8_shares(self) -> dict[str, float]:
        """Shares of the layers' products that are in FP8, with as many rows in every layer.

        `fp8_flops`, and where gains are predicted `fp8_time`: of the time of all products and their passes.
        """
        flops = {layer.name: layer.multiplied for layer in self.layers}
        total = sum(flops.values())
        if not total:
            return {}
        counted = sum(flops[layer.name] * layer.precision.split(" / ").count("fp8") / 3 for layer in self.layers)
        found = {"fp8_flops": counted / total}
        if any(layer.gain for layer in self.layers):
            fp8 = sum(flops[layer.name] / layer.gain for layer in self.layers if layer.gain)
            found["fp8_time"] = fp8 / (fp8 + sum(flops[layer.name] for layer in self.layers if not layer.gain))
        return found

    @property
    def saved_bytes(self) -> int:
        """The bytes of memory that weights in FP8 save, against now."""
        return sum(layer.saves for layer in self.layers)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        body = {"recipe": self.recipe.name, "device": self.device, "tokens": self.tokens}
        layers = [asdict(layer) for layer in self.layers]
        structures = [asdict(structure) for structure in self.structures]
        said: dict[str, Any] = {"unapplied": self.unapplied, "notes": self.notes, "parameters": self.parameters}
        said["unconverted"] = [asdict(weight) for weight in self.unconverted]
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
        device: where it will run; by default where the model is. Those of `octavo.kernels.devices.GPUS` need not be
            here.

    Raises:
        ConfigError: an unknown recipe, a pattern of a recipe that matches no linear layer and no convolution, one of
            the policy that matches no module, or weights in FP8
            with a recipe that cannot compute with their codes.
        UnsupportedError: `device` is not there to be asked what it can run.
    """
    if str(device) in GPUS:
        with planning_for(str(device)):
            return replace(make_plan(model, recipe, policy=policy, tokens=tokens, device="cuda"), device=str(device))
    recipe, policy = load(recipe), policy or Policy()
    policy.check_patterns(model)
    layers = list(layers_of(model).items())
    layers_by_name = dict(layers)
    device = torch.device(device) if device is not None else _device_of(model)
    experts = find_experts(model)
    names = [*layers_by_name, *(full_name(name, product) for name in experts for product in (FIRST, SECOND))]
    _check_patterns(recipe, policy, names)
    recipes = {name: _recipe_for(name, recipe) for name in names}
    mlps = find_mlps(model)
    in_mlps = find_gates(model) | {
        full_name(name, child) for name, roles in mlps.items() for child in (*roles.inner, roles.down)
    }
    blocks, heads = policy.blocks_to_keep(model), find_heads(model)
    kept = {
        name: next((why for block, why in blocks.items() if f"{name}.".startswith(f"{block}.")), None)
        or policy.reason_to_keep(name, layer, name in in_mlps, id(layer) in heads)
        for name, layer in layers
    }
    found = {name: _evidence_for(name, recipe) for name, _ in layers}
    rows = tuple(
        _plan_layer(name, layer, recipes[name], kept[name], found[name], policy, tokens, device)
        for name, layer in layers
    )
    rows = plan_weights(model, layers_by_name, rows, recipes, policy.weights)
    rows = _without_second_copies(model, rows, recipes, policy)
    ordered = {name: number for number, (name, _) in enumerate(model.named_modules())}
    expert_rows = [
        row for name, found_ in experts.items() for row in plan_experts(model, name, found_, recipes, policy, device)
    ]
    rows = tuple(sorted((*rows, *expert_rows), key=lambda row: ordered[_owner(row)]))
    chosen = {row.name: recipes[row.name] for row in rows if row.is_fp8}
    linears = {row.name: recipes[row.name] for row in rows if row.is_fp8 and row.kind == "linear"}
    keep_input = {row.name for row in rows if row.keeps_input}
    kept_in = policy.activation_inputs, policy.norm_inputs, policy.attention_output
    together = find_structures(model, linears, mlps, *kept_in, keep_input)
    structures = tuple(together) if policy.fuse and linears else ()
    unapplied = tuple(find_unapplied(model, policy, linears, mlps, structures, keep_input))
    known = {id(layer.weight) for _, layer in layers}
    known |= {id(parameter) for name in experts for parameter in model.get_submodule(name).parameters()}
    plan = Plan(
        recipe=recipe,
        device=str(device),
        tokens=tokens,
        layers=rows,
        recipes=chosen,
        structures=structures,
        experts={_owner(row): experts[_owner(row)].roles for row in expert_rows if row.is_fp8},
        policy=policy,
        unapplied=unapplied,
        unconverted=tuple(find_unconverted(model, known, policy.min_features)),
        parameters=sum(p.numel() for p in model.parameters()),
    )
    dtypes = {_weight(model, row).dtype for row in rows if row.is_fp8}
    return replace(plan, notes=tuple(_notes(plan, dtypes, device)))


def _owner(row: LayerPlan) -> str:
    """Return the full name of the module that a row is about: that of experts has two."""
    return row.name.rpartition(".")[0] if row.is_experts else row.name


def _weight(model: nn.Module, row: LayerPlan) -> Tensor:
    module = model.get_submodule(_owner(row))
    return next(module.parameters()) if row.is_experts else cast(Tensor, module.weight)


def plan_experts(
    model: nn.Module, name: str, found: FoundExperts, recipes: dict[str, Recipe], policy: Policy, device: torch.device
) -> Iterator[LayerPlan]:
    """Yield the rows of both products of a module of experts."""
    names = full_name(name, FIRST), full_name(name, SECOND)
    blocks = policy.blocks_to_keep(model)
    kept = next((why for block, why in blocks.items() if f"{name}.".startswith(f"{block}.")), None)
    kept = kept or policy.reason_to_keep_experts(name, model.get_submodule(name), found) or no_grouped_kernel(device)
    reasons = {each: kept or unsupported_reason_grouped(recipes[each]) for each in names}
    runs = all(reason is None and recipes[each].is_fp8 for each, reason in reasons.items())
    how = _how(found.roles, recipes[names[0]], recipes[names[1]]) if runs else ""
    for each, shape in zip(names, (found.first, found.second), strict=True):
        recipe, reason = recipes[each], reasons[each]
        if reason is None and not recipe.is_fp8:
            reason = "the recipe says bf16"
        if reason is not None:
            recipe = load("bf16")
        kernel = "grouped_gemm" if on_gpu(device) else "reference"
        yield LayerPlan(
            name=each,
            kind=f"{found.count} experts",
            shape=shape,
            count=found.count,
            active=active_share(model.get_submodule(name), found.count),
            recipe=recipe.name,
            precision=" / ".join(recipe.gemm(gemm).precision for gemm in GEMMS),
            kernels=" / ".join(kernel if recipe.gemm(gemm).is_fp8 else "-" for gemm in GEMMS),
            gain=None,
            reason=reason or how,
        )


def _how(roles: ExpertRoles, first: Recipe, second: Recipe) -> str:
    why = unfused_reason(roles, first, second)
    inner = "gate, up" if roles.is_gated else "up"
    return f"product by product: {why}" if why else f"fused: sort, {inner}, {roles.kind}, down, sum"


def _without_second_copies(
    model: nn.Module, rows: tuple[LayerPlan, ...], recipes: dict[str, Recipe], policy: Policy
) -> tuple[LayerPlan, ...]:
    """Let layers that read attention's output quantise it again in backward: attention keeps that tensor anyway."""
    if not policy.fuse or policy.attention_output == "fp8":
        return rows
    readers = {reader_of(name, core) for name, core in model.named_modules() if isinstance(core, ScaledDotProduct)}
    readers = {name for name in readers if name in recipes and requantises_exactly(recipes[name])}
    return tuple(replace(row, keeps_input=True) if row.is_fp8 and row.name in readers else row for row in rows)


def _notes(plan: Plan, dtypes: set[torch.dtype], device: torch.device) -> Iterator[str]:
    """Yield what a user may not expect. dtypes: of the weights in FP8 layers."""
    rows, recipe = plan.layers, plan.recipe
    if plan.is_little:
        largest = max(plan.unconverted, key=lambda weight: weight.multiplied)
        yield (
            f"Little will run in FP8: {plan.share:.0%} of the FLOPs of products with weights. The largest weight that "
            f"no layer reads is {largest.name}: {largest.reason}"
        )
    if reason := device_unsupported_reason(device):
        yield f"{architecture(device).name}: {reason}. `octavo.convert` refuses it unless allow_reference=True"
    elif on_gpu(device) and dtypes:
        known = rates(device)
        if known is None:
            yield "No gain is predicted: Octavo has no rates of this GPU. `octavo bench step` measures"
        elif known.derived:
            yield f"Gains are predicted from {known.derived}"
    if not dtypes and (recipe.is_fp8 or recipe.modules):
        reasons = Counter(row.reason for row in rows).most_common(1)
        alike = [f"{reason} ({count} of {len(rows)} layers)" for reason, count in reasons]
        yield f"Nothing will run in FP8: {''.join(alike) or 'the model has no linear layer and no convolution'}"
    if torch.is_autocast_enabled(device.type):
        return
    for dtype in (torch.float16, torch.float32):
        if dtype in dtypes and (note := dtype_note(dtype, device.type)) is not None:
            yield f"Weights are {dtype}. Without autocast {note}"


def refuse_unapplied(plan: Plan) -> None:
    """Raise where the policy asks for activations in FP8 that would not be.

    Raises:
        UnsupportedError: naming the first option that does nothing somewhere, and the reason.
    """
    if plan.unapplied and plan.policy.memory != "low":  # which asks for whatever the model has
        raise UnsupportedError(
            f"{plan.unapplied[0]}. Leave the option out, or convert with strict=False to go without it there."
        )


def device_unsupported_reason(device: torch.device) -> str | None:
    """Return why a device other than a CPU would run FP8 layers as the reference; None where `OCTAVO_TRITON=0` asks."""
    found = architecture(device)
    if is_planning():
        return found.refused or found.no_triton or None
    if device.type in ("cpu", "meta"):
        return None
    asked = os.environ.get("OCTAVO_TRITON") == "0"
    return found.refused or (None if asked else triton_unsupported_reason(device))


def refuse_reference(plan: Plan) -> None:
    """Raise where a GPU, or another accelerator, would run the reference kernels: some hundred times slower than BF16.

    Raises:
        UnsupportedError: naming the device, or the first layer whose recipe it has no kernel for, and the reason.
    """
    if plan.device in GPUS:
        with planning_for(plan.device):
            refuse_reference(replace(plan, device="cuda"))
        return
    device = torch.device(plan.device)
    if not plan.fp8_layers or device.type in ("cpu", "meta"):
        return
    instead = "allow_reference=True (--allow-reference) runs the reference kernels, slowly."
    if reason := device_unsupported_reason(device):
        raise UnsupportedError(
            f"{plan.device} ({architecture(device).name}) cannot train in FP8: {reason}. Train in BF16 (recipe 'bf16')"
            f" or on a CPU; {instead}"
        )
    for layer in plan.layers:
        if layer.is_fp8 and "reference" in layer.kernels:
            raise UnsupportedError(
                f"{layer.name}: recipe '{layer.recipe}' has no fast kernel on {plan.device} ({layer.reason}). "
                f"Choose another recipe; {instead}"
            )


def layers_of(model: nn.Module) -> dict[str, nn.Linear | AnyConvolution]:
    """Return each layer with a GEMM once, by its first name; a layer used in two places is one layer."""
    return {
        name: cast(nn.Linear, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | AnyConvolution) or is_transposed(module)
    }


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
    known = rates(device) if recipe.is_fp8 else None
    gain = predicted_gain(recipe, *shape, tokens, taps, rates=known) if known else None
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
    if is_transposed(layer):
        return "stored as K x N", (layer.weight.shape[1], layer.weight.shape[0]), 0
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
    groups: dict[tuple[str, str, str], list[str]] = {}
    for weight in plan.unconverted:
        key = _pattern(weight.name), " x ".join(map(str, weight.shape)), weight.reason
        groups.setdefault(key, []).append(weight.name)
    rows += [(_counted(key[0], names), key[1], "-", "not converted", "-", key[2]) for key, names in groups.items()]
    has_gain = any(layer.gain for layer in plan.layers)
    return rows if has_gain else [(*row[:4], row[5]) for row in rows]


def footer(plan: Plan) -> list[str]:
    """Return the lines below a plan's table: counts, weights in FP8, what is fused, options without effect."""
    weights = sum(layer.weights for layer in plan.layers)
    layers = "layers" if any("conv" in layer.kind for layer in plan.layers) else "linear layers"
    share = f"{plan.fp8_weights / max(weights, 1):.0%} of their weights"
    if plan.unconverted:
        share += f", {plan.share:.0%} of the FLOPs of products with weights"
    share += f", {plan.fp8_weights / max(plan.parameters, 1):.0%} of all parameters"
    return [
        f"{plan.fp8_layers} of {len(plan.layers)} {layers} in FP8 ({share}) on {plan.device}",
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
