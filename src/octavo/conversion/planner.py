"""Making a plan, which changes nothing in the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from octavo._util.terminal import quantity
from octavo.conversion.autocast_mode import suspended
from octavo.conversion.default_recipe import choose
from octavo.conversion.experts import find_experts
from octavo.conversion.fusion_patterns import find_patterns
from octavo.conversion.layer_plan import LayerPlan
from octavo.conversion.layer_planner import LayerPlanner
from octavo.conversion.mlps import find_mlps
from octavo.conversion.plan import Plan, commonest_reason
from octavo.conversion.policy import Policy
from octavo.conversion.refusals import device_unsupported_reason
from octavo.conversion.roles import find_roles
from octavo.conversion.stacks import find_stacks
from octavo.conversion.unconverted import find_unconverted
from octavo.conversion.weights import Layer, plan_weights
from octavo.errors import ConfigError, did_you_mean
from octavo.kernels.gemm.integer import unsupported_reason_device, untried_reason
from octavo.kernels.runtime.devices import GPUS
from octavo.kernels.runtime.dispatch import architecture, on_gpu, planning_for, rates
from octavo.nn.experts import FIRST, SECOND
from octavo.nn.fused import MLPRoles
from octavo.nn.linear import is_transposed
from octavo.nn.modules import full_name
from octavo.nn.multihead import IN_PROJECTION, unsupported_reason, widths_of
from octavo.nn.operands import autocast_dtype, dtype_note
from octavo.numerics import SMALLEST_ROTATION, is_rotatable
from octavo.recipes import FALLBACK, Recipe, RecipeLike


@suspended()  # modules are recognised by running them
def make_plan(
    model: nn.Module,
    recipe: RecipeLike | None = None,
    *,
    policy: Policy | None = None,
    tokens: int = 8192,
    device: torch.device | str | None = None,
) -> Plan:
    """Return what `convert` would do to a model.

    Args:
        model: any module; on the meta device too.
        recipe: a name, a file, a mapping or a Recipe; `modules` in it overrides it by name pattern. By default
            `octavo.recipes.DEFAULT`, or `FALLBACK` where that is refused (`Plan.instead` says why).
        policy: what stays in BF16; the default keeps heads, routers and small layers.
        tokens: tokens of one forward, for the predicted gain; of a convolution the output pixels.
        device: where it will run, by default the model's device; GPUs of `kernels.devices.GPUS` need not be present.

    Raises:
        ConfigError: an argument of another type, a lazy module that has not run, an unknown recipe or device, no
            tokens, a pattern of a recipe that matches no linear layer and no convolution, one of the policy that
            matches no module, or weights in FP8 with a recipe that cannot compute with their codes.
        UnsupportedError: `device` is not present, so its kernels are unknown.
    """
    if str(device) in GPUS:
        with planning_for(str(device)):
            return replace(make_plan(model, recipe, policy=policy, tokens=tokens, device="cuda"), device=str(device))
    _check_arguments(model, policy, tokens)
    policy = policy or Policy()
    policy.check_patterns(model)
    where = _device_named(device) if device is not None else _device_of(model)
    recipe, instead = choose(recipe, model, policy, where)
    layers, experts, stacks, mlps = layers_of(model), find_experts(model), find_stacks(model), find_mlps(model)
    attentions = find_attentions(model)
    names = [*layers, *attentions, *(full_name(n, product) for n in experts for product in (FIRST, SECOND)), *stacks]
    _check_patterns(recipe, policy, names)
    recipes, in_fp8 = _recipes_of(names, recipe, {**layers, **attentions}, where)
    roles = find_roles(model)
    planner = LayerPlanner(
        model=model, recipe=recipe, recipes=recipes, policy=policy, tokens=tokens, device=where, roles=roles,
        in_fp8=in_fp8,
    )  # fmt: skip
    others = [*planner.attentions(attentions), *planner.experts(experts), *planner.stacks(stacks)]
    rows = plan_weights(model, layers, planner.layers(layers, others), recipes, policy.weights)
    ordered, read = _in_order_of(model, [*rows, *others]), _weights_read(model, layers, {row.module for row in others})
    plan = Plan(
        recipe=recipe,
        device=str(where),
        tokens=tokens,
        layers=ordered,
        recipes={row.name: recipes[row.name] for row in ordered if row.is_fp8},
        experts={row.module: experts[row.module].roles for row in others if row.is_fp8 and row.is_experts},
        stacks={row.name: stacks[row.name].arguments for row in others if row.is_fp8 and row.name in stacks},
        policy=policy,
        instead=instead,
        refused=_refusal(where),
        unconverted=tuple(find_unconverted(model, read, policy.min_features, roles)),
        parameters=sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),  # numel() is 0 under ZeRO-3
    )
    return _with_patterns(plan, model, mlps)


def _recipes_of(
    names: Iterable[str], recipe: Recipe, layers: Mapping[str, Layer | nn.MultiheadAttention], device: torch.device
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Return the recipe of each layer by name, and why those that compute fprop in FP8 instead of INT8 do so."""
    recipes = {name: recipe.for_layer(name) for name in names}
    in_fp8 = {name: why for name in recipes if (why := _no_integer_fprop(recipes[name], layers.get(name), device))}
    return _with_fprop_in_fp8(recipes, in_fp8), in_fp8


def _weights_read(model: nn.Module, layers: Mapping[str, Layer], modules: Iterable[str]) -> set[int]:
    """Return the `id` of layers and their weights, and of further modules and all of their parameters.

    Of modules too: PEFT makes new parameters for an `nn.MultiheadAttention` whenever it lists the modules of a model.
    """
    others = [model.get_submodule(name) for name in modules]
    read = {id(layer) for layer in (*layers.values(), *others)} | {id(layer.weight) for layer in layers.values()}
    return read | {id(parameter) for module in others for parameter in module.parameters()}


def _refusal(device: torch.device) -> str:
    """Return why `convert` refuses a device; empty if it does not."""
    reason = device_unsupported_reason(device)
    if reason is None:
        return ""
    return f"{architecture(device).name}: {reason}. `octavo.convert` refuses it unless allow_reference=True"


def _no_integer_fprop(recipe: Recipe, layer: Layer | nn.MultiheadAttention | None, device: torch.device) -> str:
    """Return why a layer computes fprop by its recipe's codes in FP8; empty if it does not.

    Args:
        layer: None for experts, whose features are multiples of `SMALLEST_ROTATION` (`Policy.reason_to_keep_experts`).
    """
    if not recipe.has_integer_fprop or recipe.with_fprop_in_fp8() is None:
        return ""
    if layer is not None and not isinstance(layer, nn.Linear | nn.MultiheadAttention):
        return "fprop in FP8: only linear layers, attention and experts rotate their inputs"
    if layer is not None and recipe.fprop.input.rotation:
        widths = widths_of(layer) if isinstance(layer, nn.MultiheadAttention) else (layer.in_features,)
        if features := next((width for width in widths if not is_rotatable(width)), None):
            return f"fprop in FP8: no rotation by {SMALLEST_ROTATION} or more divides {features} features"
    reason = unsupported_reason_device(device, grouped=layer is None)
    return f"fprop in FP8: {reason}" if reason else ""


def _with_fprop_in_fp8(recipes: Mapping[str, Recipe], in_fp8: Mapping[str, str]) -> dict[str, Recipe]:
    """Return the recipes of layers, changed for those of `in_fp8`; one object per recipe, as groups compare them."""
    changed = {id(recipes[name]): recipes[name].with_fprop_in_fp8() for name in in_fp8}
    return {name: (changed[id(own)] or own) if name in in_fp8 else own for name, own in recipes.items()}


def _check_arguments(model: object, policy: object, tokens: object) -> None:
    if isinstance(model, str | Path):
        raise ConfigError(
            f"model: expected a torch.nn.Module, got {str(model)!r}. A model of Hugging Face is loaded by "
            "transformers' from_pretrained first; `octavo plan config.json` plans it from its configuration alone."
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if not isinstance(policy, Policy | None):
        raise ConfigError(f'policy: expected an octavo.Policy, such as Policy(weights="fp8"), got {policy!r}.')
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise ConfigError(
                f"{name} has no shape yet: its module is a {owner}, which finds it in its first forward. Run the model "
                "on one batch first, then convert it."
            )
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"tokens = {tokens!r}: expected the number of tokens of one forward, at least 1.")


def _with_patterns(plan: Plan, model: nn.Module, mlps: Mapping[str, MLPRoles]) -> Plan:
    """Return the plan with its fusion patterns, options without effect, and notes."""
    policy = plan.policy
    linears = {row.name: plan.recipes[row.name] for row in plan.layers if row.is_fp8 and row.kind == "linear"}
    keep_input = {row.name for row in plan.layers if row.keeps_input}
    if policy.fuse:
        patterns, unapplied = find_patterns(model, linears, mlps, policy, keep_input)
        plan = replace(plan, structures=tuple(patterns), unapplied=tuple(unapplied))
    weights = [_weight(model, row) for row in plan.layers if row.is_fp8]
    trained = {weight.dtype for weight in weights if weight.requires_grad and not weight.is_meta}
    rounds = [ROUNDS] if torch.bfloat16 in trained and policy.weights != "fp8" else []
    return replace(plan, notes=(*_notes_on(plan, model, {weight.dtype for weight in weights}), *rounds))


def _in_order_of(model: nn.Module, rows: Sequence[LayerPlan]) -> tuple[LayerPlan, ...]:
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(rows, key=lambda row: order[row.module]))


def _weight(model: nn.Module, row: LayerPlan) -> Tensor:
    module = model.get_submodule(row.module)
    return cast(Tensor, module.weight) if row.module == row.name else next(module.parameters())


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Return each layer with a GEMM once, by its first name; a layer used in two places is one layer."""
    return {
        name: cast(nn.Linear, module)
        for name, module in model.named_modules()
        if isinstance(module, Layer) or is_transposed(module)
    }


def find_attentions(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """Return each `nn.MultiheadAttention` that can be converted, by the name of its in-projection."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    return {full_name(name, IN_PROJECTION): m for name, m in found.items() if unsupported_reason(m) is None}


def _device_named(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as found:
        raise ConfigError(
            f"device = {device!r}: neither a device of PyTorch nor a GPU to plan for.{did_you_mean(str(device), GPUS)} "
            f"GPUs: {', '.join(GPUS)}."
        ) from found


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


FAST_PATH = (
    "nn.TransformerEncoderLayer computes its layers and its attention itself, in high precision, in model.eval() "
    "without gradients and without autocast: torch.backends.mha.set_fastpath_enabled(False) keeps such an evaluation "
    "in FP8"
)
"""A note that `convert` logs as a warning too."""


ROUNDS = (
    "Weights are torch.bfloat16: an optimizer without master weights, as PyTorch's own, rounds each update to BF16, "
    'and loses those below half a unit in the last place. octavo.optim with states="exact" keeps them'
)
"""A note on trained weights in BF16 that exist: those of a model on the meta device may be made in another dtype."""


def _notes_on(plan: Plan, model: nn.Module, dtypes: set[torch.dtype]) -> Iterator[str]:
    """Yield what a user may not expect. dtypes: those of the weights of FP8 layers."""
    if torch.backends.mha.get_fastpath_enabled() and any(_has_fast_path(m, n, plan) for n, m in model.named_modules()):
        yield FAST_PATH
    rows, recipe, device = plan.layers, plan.recipe, torch.device(plan.device)
    if plan.is_little and dtypes:
        largest = max(plan.unconverted, key=lambda weight: weight.multiplied)
        yield (
            f"Little will run in FP8: {plan.share:.0%} of the FLOPs of GEMMs with weights. The largest weight that "
            f"no layer reads is {largest.name}: {largest.reason}"
        )
    if on_gpu(device) and dtypes and not plan.refused:
        known = rates(device)
        if known is None:
            yield "No gain is predicted: Octavo has no rates of this GPU. `octavo bench step` measures"
        elif known.derived:
            yield f"Gains are predicted from {known.derived}"
        if any(row.kernels.startswith("int8") for row in rows) and (reason := untried_reason(device)):
            yield f"{reason}. Compare the first steps with recipe '{FALLBACK}'"
    if not dtypes and (recipe.is_fp8 or recipe.modules):
        yield f"Nothing will run in FP8: {commonest_reason(rows, plan.unconverted)}"
    if dtypes and plan.policy.fuse:
        yield from _unfused_norms(plan, model)
    if autocast_dtype(device.type) is not None:
        return
    for dtype in (torch.float16, torch.float32):
        if dtype in dtypes and (note := dtype_note(dtype, device.type)) is not None:
            yield f"Weights are {dtype}. Without autocast {note}"


def _unfused_norms(plan: Plan, model: nn.Module) -> Iterator[str]:
    """Yield a line per class of norms that stay as they are, although their width is that of an input in FP8."""
    fused = {pattern.name for pattern in plan.structures}
    widths = {row.shape[1] for row in plan.layers if row.is_fp8}
    kinds: Counter[str] = Counter()
    for name, module in model.named_modules():
        kind = type(module)
        shapes = [tuple(parameter.shape) for parameter in module._parameters.values() if parameter is not None]
        is_norm = "norm" in kind.__name__.lower() and not kind.__module__.startswith("torch.")
        if is_norm and name not in fused and shapes and {*shapes} <= {(width,) for width in widths}:
            kinds[kind.__name__] += 1
    for kind_name, count in kinds.items():
        yield f"{quantity(count, 'norm')} of class {kind_name} not fused: not recognised as an RMS norm or a layer norm"


def _has_fast_path(module: nn.Module, name: str, plan: Plan) -> bool:
    """Return whether a module reads the weights of its FP8 layers in evaluation instead of calling the layers."""
    if type(module).forward is not nn.TransformerEncoderLayer.forward:
        return False
    attention = module.self_attn
    is_eligible = isinstance(attention, nn.MultiheadAttention) and attention.batch_first
    is_eligible = is_eligible and bool(module.activation_relu_or_gelu)
    children = ("linear1", "linear2", f"self_attn.{IN_PROJECTION}")
    return is_eligible and any(full_name(name, child) in plan.recipes for child in children)
