"""Carry out a plan on a user's model, in place, and undo it. Names, parameters, hooks and state_dict stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from octavo.conversion.autocast_mode import keep, suspended
from octavo.conversion.first_step import watch_first_step
from octavo.conversion.fusion_patterns import FusionPattern, reader_of
from octavo.conversion.plan import Plan
from octavo.conversion.planner import FAST_PATH, layers_of, make_plan
from octavo.conversion.policy import Policy
from octavo.conversion.refusals import refuse_reference, refuse_sharded, refuse_unapplied, refuse_wrapped
from octavo.conversion.weights import Layer, check_free, make_plain, store
from octavo.errors import NonFiniteError
from octavo.kernels.runtime.ledger import warn_once
from octavo.nn import GroupedLinear, calibration_file
from octavo.nn.adopted import is_taken
from octavo.nn.attention import ScaledDotProduct
from octavo.nn.conv import AnyConvolution, Conv1d, Conv2d, Convolution
from octavo.nn.experts import FIRST, SECOND, Experts
from octavo.nn.experts import adopt as adopt_experts
from octavo.nn.fp8_weights import values
from octavo.nn.fused import FusedMLP, MLPRoles, fuse
from octavo.nn.fused_activation import FusedActivation
from octavo.nn.fused_activation import adopt as adopt_activation
from octavo.nn.linear import LinearLayer, is_adopted
from octavo.nn.modules import full_name
from octavo.nn.multihead import MultiheadAttention
from octavo.nn.multihead import adopt as adopt_attention
from octavo.nn.norm import Norm, adopt
from octavo.nn.operands import LAYERS
from octavo.nn.residual import ResidualBlock
from octavo.nn.residual import adopt as adopt_residual
from octavo.nn.rotary_attention import RotaryAttention
from octavo.nn.rotary_attention import adopt as adopt_rotary
from octavo.nn.scaling_state import attach_scaling_state
from octavo.nn.shared import SharedInput
from octavo.nn.stacks import RecognisedStack
from octavo.nn.stacks import adopt as adopt_stack
from octavo.nn.switch import switched_off
from octavo.recipes import Recipe, RecipeLike, load
from octavo.tensor import FP8Tensor, is_distributed


def convert(
    model: nn.Module,
    recipe: RecipeLike | None = None,
    *,
    policy: Policy | None = None,
    tokens: int = 8192,
    strict: bool = False,
    allow_reference: bool = False,
    scales: str | Path | None = None,
    device: torch.device | str | None = None,
) -> Plan:
    """Make a model's linear layers, convolutions and experts compute in FP8, in place, and return the plan carried out.

    Call it before the optimizer or after it: the parameters are the same objects. With `Policy(weights="fp8")` call it
    before: the same objects then are FP8 tensors. A model that is already converted is converted again to `recipe`; a
    layer that the plan leaves in BF16 is turned back.

    Args:
        recipe: as `octavo.plan` takes it. None: `octavo.recipes.DEFAULT`, or `FALLBACK`, with a warning, where that is
            refused: weights in FP8, experts, and devices without an INT8 GEMM.
        strict: raise if the policy asks for activations in FP8 somewhere without effect (`Plan.unapplied`).
        allow_reference: on a GPU without FP8, or without a fast kernel for the recipe, run the reference kernels: the
            same codes, some hundred times slower than BF16.
        device: where the model will run; by default where it is.
        scales: a calibration file (`octavo.scales(model).save`), which `static` needs and `delayed` may start from.

    Raises:
        ConfigError: an unknown recipe, a pattern that matches no layer, a static scale that is missing, or a layer, MLP
            or norm that is recomputed or offloaded as a block of its own.
        NonFiniteError: a weight to be converted holds a NaN or an infinity; nothing has been changed.
        UnsupportedError: the device cannot run the recipe in FP8, and `allow_reference` is false; under `strict`, an
            option of the policy has no effect somewhere; or FSDP1 or `octavo.distributed.shard` has sharded the model.
    """
    plan = make_plan(model, recipe, policy=policy, tokens=tokens, device=device)
    plan = replace(plan, allow_reference=allow_reference)
    if not allow_reference:
        refuse_reference(plan)
    if strict:
        refuse_unapplied(plan)
    _warn(plan)
    layers = layers_of(model)
    refuse_sharded(model, layers)
    patterns = [pattern.name for pattern in plan.structures if pattern.kind not in ("shared", "attention")]
    changed = [row.module for row in plan.layers if row.is_fp8]
    refuse_wrapped(model, [*changed, *patterns, *_taken(model)])
    _check_finite(model, plan, layers)
    calibrated = None if scales is None else calibration_file.read(Path(scales))
    calibration_file.check(plan.recipes, calibrated)
    check_free([layers[row.name].weight for row in plan.layers if row.saves])
    _release(model)
    _carry_out(model, plan, layers)
    stored = attach_scaling_state({name: module for name, module in layers.items() if is_adopted(module)}, model)
    if stored is not None and calibrated is not None:
        stored.start_from(calibrated)
    watch_first_step(model, [layers[name] for name in plan.recipes if name in layers])
    return plan


def _warn(plan: Plan) -> None:
    """Log what a user should not miss who does not print the plan."""
    notes = (note for note in plan.notes if note == FAST_PATH or not plan.fp8_layers or plan.is_little)
    for note in filter(None, (plan.instead, *notes)):
        warn_once(f"octavo.convert: {note}")


def _carry_out(model: nn.Module, plan: Plan, layers: Mapping[str, Layer]) -> None:
    """Change the classes of layers, experts and patterns, and the storage of weights."""
    for name, recipe in plan.recipes.items():
        if name in layers:
            _adopt(layers[name], recipe)
            LAYERS.put(layers[name], name)
    for name, roles in plan.experts.items():
        first, second = (plan.recipes.get(full_name(name, product), load("bf16")) for product in (FIRST, SECOND))
        adopt_experts(model.get_submodule(name), roles, first, second, plan.policy.saved.activation_inputs)
    for name, arguments in plan.stacks.items():
        adopt_stack(model.get_submodule(name), arguments, plan.recipes[name])
    for row in plan.layers:
        if row.is_in_projection and row.is_fp8:
            adopt_attention(model.get_submodule(row.module), plan.recipes[row.name])
        if row.name not in layers:
            continue
        layer = layers[row.name]
        store(layer, row.weight, row.is_fp8)
        keep(layer, None if row.is_fp8 else row.reason)
        if isinstance(layer, LinearLayer):
            layer.keeps_input = row.keeps_input
    for pattern in plan.structures:
        _join(model.get_submodule(pattern.name), pattern, plan)


def _adopt(layer: Layer, recipe: Recipe) -> None:
    if isinstance(layer, AnyConvolution):
        (Conv1d if isinstance(layer, nn.Conv1d) else Conv2d).adopt(layer, recipe)
    else:
        LinearLayer.adopt(layer, recipe)


def _join(module: nn.Module, pattern: FusionPattern, plan: Plan) -> None:
    """Make the layers of a pattern compute together. Norms quantise for the plan's own recipe."""
    if pattern.kind == "norm":
        reader = plan.recipe.plan if pattern.has_reader else None
        targets = (None, None) if reader is None else (reader.x, reader.x_second)
        adopt(module, targets[0], pattern.saved, pattern.form, targets[1])
        return
    if pattern.kind == "rotary":
        adopt_rotary(module)
        return
    if pattern.kind == "residual":
        adopt_residual(module)
        return
    if pattern.kind == "activation":
        adopt_activation(module, MLPRoles(pattern.activation, pattern.layers[:-1], pattern.layers[-1]))
        return
    if pattern.kind == "attention":
        core = cast(ScaledDotProduct, module)
        core.keep_codes(plan.recipes[reader_of(pattern.name, core)])
        return
    layers = [cast(LinearLayer, module.get_submodule(name)) for name in pattern.layers]
    inner = layers[:-1] if pattern.kind == "mlp" else layers
    keeps_input = all(layer.keeps_input for layer in inner)
    group = SharedInput(inner)
    # Gate and up of an MLP are computed by it. If its own forward runs, they need only the scales that they share.
    shared = group if pattern.kind != "mlp" or group.lends_scales(inner[:1]) else None
    for layer in inner:
        layer.keeps_input, layer.shared = keeps_input, shared
    if pattern.kind == "mlp":
        roles = MLPRoles(pattern.activation, pattern.layers[:-1], pattern.layers[-1])
        fuse(module, roles, plan.policy.saved.activation_inputs)


def revert(model: nn.Module) -> int:
    """Turn every FP8 layer back into PyTorch's, in place; return how many there were.

    A weight that is stored in FP8 becomes a plain parameter with the values of its codes.

    Raises:
        ConfigError: such a weight is in use, by compiled code or by a graph that has not run backward; or such a layer
            is recomputed or offloaded as a block of its own.
    """
    refuse_wrapped(model, _taken(model))
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    ours = [m for m in linears if is_adopted(m) or not isinstance(m, LinearLayer)]
    check_free([m.weight for m in ours if isinstance(m.weight, FP8Tensor)])
    count = _release(model)
    for module in ours:
        make_plain(module)
    return count


def _release(model: nn.Module) -> int:
    """Turn every FP8 layer back into PyTorch's, and keep the storage of its weight; return how many there were."""
    count = 0
    for layer in layers_of(model).values():
        keep(layer, None)
        LAYERS.put(layer, None)
    for core in model.modules():
        if isinstance(core, ScaledDotProduct):
            core.keep_values()
    for module in _taken(model).values():
        count += 2 * isinstance(module, Experts)
        count += isinstance(module, LinearLayer | Convolution | RecognisedStack | MultiheadAttention)
        module.release()
    return count


_Fused = FusedMLP | FusedActivation | Norm | RotaryAttention | ResidualBlock
_Taken = _Fused | Experts | LinearLayer | Convolution | RecognisedStack | MultiheadAttention


def _taken(model: nn.Module) -> dict[str, _Taken]:
    """Return the modules whose class `convert` has changed, by their full names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _Taken) and is_taken(module)}


_OfKernels = FusedActivation | Norm | RotaryAttention | ResidualBlock | ScaledDotProduct
_Switchable = _OfKernels | LinearLayer | Convolution | GroupedLinear | MultiheadAttention


def _switchable(model: nn.Module) -> list[_Switchable]:
    return [module for module in model.modules() if isinstance(module, _Switchable)]


def enable(model: nn.Module, enabled: bool = True) -> list[_Switchable]:
    """Compute in FP8, or with False in the model's own precision; return the modules that this changed."""
    switched = [module for module in _switchable(model) if module.enabled != enabled]
    for module in switched:
        module.enabled = enabled
    return switched


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Compute in the model's own precision inside the block, as for an evaluation beside the FP8 one.

    Like `model.eval()`, this is a state of the model and not of a thread: whatever calls it meanwhile sees it, backward
    in autograd's threads included. To evaluate beside a thread that trains, evaluate a copy. Blocks of several threads
    may overlap; FP8 returns when the last one ends. A copy made inside the block is one of the model outside it.
    """
    with switched_off(_switchable(model)), suspended():
        yield


def _check_finite(model: nn.Module, plan: Plan, layers: Mapping[str, Layer]) -> None:
    for name in plan.recipes:
        if name in layers:
            _check_weight(full_name(name, "weight"), layers[name].weight)
    attentions = [row.module for row in plan.layers if row.is_in_projection and row.is_fp8]
    for name in (*plan.experts, *plan.stacks, *attentions):
        for parameter, weight in model.get_submodule(name).named_parameters():
            _check_weight(full_name(name, parameter), weight)


def _check_weight(name: str, weight: Tensor) -> None:
    weight = getattr(weight, "ds_tensor", weight)  # DeepSpeed's ZeRO-3 stores this rank's part there, in one row
    finite = torch.isfinite(torch.atleast_2d(values(weight.detach(), weight.dtype)).flatten(1))
    if weight.is_meta or bool(finite.all()):
        return
    if is_distributed(finite):
        finite = finite.full_tensor()  # type: ignore[attr-defined]
    places = torch.nonzero(~finite)
    (row, column), count = places[0].tolist(), len(places)
    raise NonFiniteError(
        f"{name} holds {count} value(s) that are NaN or infinite, the first at row {row}, column {column}. Load a good "
        "checkpoint, or find the step that produced them; nothing was converted."
    )
