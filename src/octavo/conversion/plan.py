"""The plan: the precision of every layer with a GEMM, and why. Making one changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.conversion.autocast_mode import suspended
from octavo.conversion.choices import choices
from octavo.conversion.experts import find_experts
from octavo.conversion.fusion_patterns import FusionPattern, find_mlps, find_structures
from octavo.conversion.layer_plan import LayerPlan, Planner
from octavo.conversion.plan_text import notes_on, table
from octavo.conversion.policy import Policy
from octavo.conversion.unconverted import Unconverted, find_unconverted
from octavo.conversion.weights import Layer, plan_weights
from octavo.errors import ConfigError, did_you_mean
from octavo.kernels.devices import GPUS
from octavo.kernels.dispatch import planning_for
from octavo.nn.experts import FIRST, SECOND, ExpertRoles
from octavo.nn.fused import MLPRoles
from octavo.nn.linear import is_transposed
from octavo.nn.modules import full_name
from octavo.recipes import Recipe, RecipeLike, load


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
    policy: Policy = field(default_factory=Policy, repr=False)
    """The policy of this plan."""
    allow_reference: bool = False
    """Whether `convert` was asked to run reference kernels on a GPU."""
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
        structures = [asdict(structure) for structure in self.structures]
        said: dict[str, Any] = {"unapplied": self.unapplied, "notes": self.notes, "parameters": self.parameters}
        said["unconverted"] = [asdict(weight) for weight in self.unconverted]
        said["choices"] = [choice._asdict() for choice in choices(self)]
        return json.dumps({**body, "layers": layers, "structures": structures, **said}, indent=1)

    def __str__(self) -> str:
        return "\n".join(table(self))


@suspended()  # modules are recognised by running them
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
        device: where it will run; by default the model's device. GPUs of `octavo.kernels.devices.GPUS` need not be
            present.

    Raises:
        ConfigError: an argument of another type, an unknown recipe or device, no tokens, a pattern of a recipe that
            matches no linear layer and no convolution, one of the policy that matches no module, or weights in FP8 with
            a recipe that cannot compute with their codes.
        UnsupportedError: `device` is not present, so its kernels are unknown.
    """
    if str(device) in GPUS:
        with planning_for(str(device)):
            return replace(make_plan(model, recipe, policy=policy, tokens=tokens, device="cuda"), device=str(device))
    _check_arguments(model, policy, tokens)
    recipe, policy = load(recipe), policy or Policy()
    policy.check_patterns(model)
    layers, experts, mlps = layers_of(model), find_experts(model), find_mlps(model)
    names = [*layers, *(full_name(name, product) for name in experts for product in (FIRST, SECOND))]
    _check_patterns(recipe, policy, names)
    recipes = {name: recipe.for_layer(name) for name in names}
    where = _device_named(device) if device is not None else _device_of(model)
    planner = Planner(model=model, recipe=recipe, recipes=recipes, policy=policy, tokens=tokens, device=where)
    rows = plan_weights(model, layers, planner.layers(layers, mlps), recipes, policy.weights)
    expert_rows = list(planner.experts(experts))
    ordered = _in_order_of(model, [*rows, *expert_rows])
    read = {id(layer.weight) for layer in layers.values()}
    read |= {id(parameter) for name in experts for parameter in model.get_submodule(name).parameters()}
    plan = Plan(
        recipe=recipe,
        device=str(where),
        tokens=tokens,
        layers=ordered,
        recipes={row.name: recipes[row.name] for row in ordered if row.is_fp8},
        experts={row.module: experts[row.module].roles for row in expert_rows if row.is_fp8},
        policy=policy,
        unconverted=tuple(find_unconverted(model, read, policy.min_features)),
        parameters=sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),  # numel() is 0 under ZeRO-3
    )
    return _with_structures(plan, model, mlps)


def _check_arguments(model: object, policy: object, tokens: int) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if not isinstance(policy, Policy | None):
        raise ConfigError(f'policy: expected an octavo.Policy, such as Policy(weights="fp8"), got {policy!r}.')
    if tokens < 1:
        raise ConfigError(f"tokens = {tokens}: expected the number of tokens of one forward, at least 1.")


def _with_structures(plan: Plan, model: nn.Module, mlps: Mapping[str, MLPRoles]) -> Plan:
    """Return the plan with its fusion patterns, options without effect, and notes."""
    policy = plan.policy
    linears = {row.name: plan.recipes[row.name] for row in plan.layers if row.is_fp8 and row.kind == "linear"}
    keep_input = {row.name for row in plan.layers if row.keeps_input}
    if policy.fuse:
        structures, unapplied = find_structures(model, linears, mlps, policy, keep_input)
        plan = replace(plan, structures=tuple(structures), unapplied=tuple(unapplied))
    dtypes = {_weight(model, row).dtype for row in plan.layers if row.is_fp8}
    return replace(plan, notes=tuple(notes_on(plan, model, dtypes)))


def _in_order_of(model: nn.Module, rows: Sequence[LayerPlan]) -> tuple[LayerPlan, ...]:
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(rows, key=lambda row: order[row.module]))


def _weight(model: nn.Module, row: LayerPlan) -> Tensor:
    module = model.get_submodule(row.module)
    return next(module.parameters()) if row.is_experts else cast(Tensor, module.weight)


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Return each layer with a GEMM once, by its first name; a layer used in two places is one layer."""
    return {
        name: cast(nn.Linear, module)
        for name, module in model.named_modules()
        if isinstance(module, Layer) or is_transposed(module)
    }


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
