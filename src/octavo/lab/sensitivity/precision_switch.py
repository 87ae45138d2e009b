"""Switch single layers and GEMMs between FP8 and high precision, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import cast

from torch import nn

from octavo.conversion.apply import convert, revert
from octavo.conversion.layer_plan import LayerPlan
from octavo.conversion.policy import Policy, SavedFormats
from octavo.errors import ConfigError
from octavo.nn.conv import Convolution
from octavo.nn.experts import ExpertLinear
from octavo.nn.linear import LinearLayer
from octavo.recipes import GEMMS, Recipe, RecipeLike, load

Choice = tuple[str, ...]
"""The GEMMs that run in FP8, in the order of `GEMMS`; () is all in high precision."""


def choices(recipe: Recipe) -> dict[Choice, Recipe]:
    """Return every choice that the recipe allows, as a recipe; fewest GEMMs first, starting with ().

    Some depend on each other: a `folded` dgrad or wgrad reads the codes of fprop and needs it in FP8.
    """
    own = tuple(gemm for gemm in GEMMS if recipe.gemm(gemm).is_fp8)
    found: dict[Choice, Recipe] = {(): load("bf16"), own: replace(recipe, modules={})}
    for choice in (choice for count in range(1, len(own)) for choice in combinations(own, count)):
        wide = {gemm: replace(recipe.gemm(gemm), precision="bf16") for gemm in own if gemm not in choice}
        try:
            found[choice] = replace(found[own], name=f"{recipe.name} {'+'.join(choice)}", **wide)  # type: ignore[arg-type]
        except ConfigError:
            continue

    def in_order(choice: Choice) -> tuple[int, list[int]]:
        return len(choice), [GEMMS.index(gemm) for gemm in choice]

    return {choice: found[choice] for choice in sorted(found, key=in_order)}


def fullest(offered: Mapping[Choice, Recipe]) -> Choice:
    """Return the choice of all GEMMs that the recipe has in FP8."""
    return max(offered, key=len)


def alone(gemm: str, offered: Mapping[Choice, Recipe]) -> tuple[Choice, Choice]:
    """Return the smallest choice that a GEMM can be added to, and that choice with it: the pair to measure it by.

    Raises:
        ConfigError: no choice has this GEMM in FP8 and is valid without it.
    """
    for choice in offered:
        without = tuple(each for each in choice if each != gemm)
        if gemm in choice and without in offered:
            return without, choice
    raise ConfigError(f"{gemm} cannot be measured: no recipe has it in FP8 and is valid without it.")


Layer = LinearLayer | Convolution | ExpertLinear


class PrecisionSwitch:
    """The layers of a converted model that can run in FP8; outside `using`, all compute in high precision."""

    layers: dict[str, Layer]
    """By full name, in the order of the model."""
    rows: dict[str, LayerPlan]
    offered: dict[str, dict[Choice, Recipe]]
    """The choices of each layer, as `choices` returns them."""

    def __init__(self, model: nn.Module, rows: Mapping[str, LayerPlan], recipes: Mapping[str, Recipe]) -> None:
        self.model = model
        self.rows = dict(rows)
        self.layers = {name: cast(Layer, model.get_submodule(name)) for name in rows}
        self.offered = {name: choices(recipes[name]) for name in rows}
        for layer in self.layers.values():
            layer.enabled = False

    @contextmanager
    def using(self, chosen: Mapping[str, Choice]) -> Iterator[None]:
        """Apply choices inside the block; layers that are not named stay in high precision."""
        named = {name: choice for name, choice in chosen.items() if choice}
        try:
            for name, choice in named.items():
                self.layers[name].recipe, self.layers[name].enabled = self.offered[name][choice], True
            yield
        finally:
            for name in named:
                self.layers[name].enabled = False

    def only(self, gemm: str) -> dict[str, Choice]:
        """Return the choice of one GEMM alone, for every layer whose recipe allows it."""
        return {name: (gemm,) for name, offered in self.offered.items() if (gemm,) in offered}


@contextmanager
def switchable(
    model: nn.Module, recipe: RecipeLike, policy: Policy | None, tokens: int, scales: str | None
) -> Iterator[PrecisionSwitch]:
    """Make every layer switchable inside the block: layer by layer, without fusion, in evaluation mode.

    Layers with no predicted gain are included. The model is restored afterwards.

    Raises:
        ConfigError: the model is converted already, or no layer of it would be in FP8.
    """
    if any(isinstance(module, Layer) for module in model.modules()):
        raise ConfigError("the model is converted already. Localise before octavo.convert, or after octavo.revert.")
    policy = _one_by_one(policy or Policy())
    modes = {module: module.training for module in model.modules()}
    plan = convert(model, recipe, policy=policy, tokens=tokens, allow_reference=True, scales=scales)
    try:
        rows = {row.name: row for row in plan.layers if row.is_fp8}
        if not rows:
            raise ConfigError(
                f"recipe '{plan.recipe.name}' puts no layer in FP8: there is nothing to localise. Choose another"
                " recipe, or a policy that keeps fewer layers in BF16."
            )
        model.eval()
        yield PrecisionSwitch(model, rows, plan.recipes)
    finally:
        revert(model)
        for module, training in modes.items():
            module.training = training


def _one_by_one(policy: Policy) -> Policy:
    """Return a policy without what needs fusion, without limits, and without attention of PyTorch.

    The in-projection of an `nn.MultiheadAttention` is a part of its call, whose input and output cannot be observed.
    """

    def takes(name: str, module: nn.Module) -> bool:
        return not isinstance(module, nn.MultiheadAttention) and (policy.filter is None or policy.filter(name, module))

    plain = {"memory": "exact", **SavedFormats()._asdict()}
    return replace(policy, fuse=False, min_gain=0.0, weights="unchanged", requantise=(), filter=takes, **plain)
