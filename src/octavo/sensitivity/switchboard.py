"""Single layers switched between FP8 and high precision, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from octavo.conversion.apply import convert, revert
from octavo.conversion.plan import LayerPlan
from octavo.conversion.policy import Policy
from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.nn.conv import Convolution
from octavo.recipes import Recipe, RecipeLike
from octavo.sensitivity.choices import Choice, choices

Layer = Linear | Convolution


def weight_of(layer: Layer) -> Tensor:
    """Return its weight, (N, K), or (N, C, *kernel)."""
    return cast(Tensor, layer.weight)


class Switchboard:
    """The layers of a converted model that may run in FP8, all in high precision until told otherwise."""

    layers: dict[str, Layer]
    """By full name, in the order of the model."""
    rows: dict[str, LayerPlan]
    offered: dict[str, dict[Choice, Recipe]]
    """What may be chosen for each."""

    def __init__(self, model: nn.Module, rows: Mapping[str, LayerPlan], recipes: Mapping[str, Recipe]) -> None:
        self.model = model
        self.rows = dict(rows)
        self.layers = {name: cast(Layer, model.get_submodule(name)) for name in rows}
        self.offered = {name: choices(recipes[name]) for name in rows}
        self.set({})

    def set(self, chosen: Mapping[str, Choice]) -> None:
        """Compute as chosen; layers that are not named, in high precision."""
        for name, layer in self.layers.items():
            choice = chosen.get(name, ())
            layer.enabled = bool(choice)
            if choice:
                layer.recipe = self.offered[name][choice]

    @contextmanager
    def using(self, chosen: Mapping[str, Choice]) -> Iterator[None]:
        """Compute as chosen inside the block, and all in high precision after it."""
        self.set(chosen)
        try:
            yield
        finally:
            self.set({})

    def all(self, gemm: str) -> dict[str, Choice]:
        """Return the choice of one GEMM alone, for every layer whose recipe allows it."""
        return {name: (gemm,) for name, offered in self.offered.items() if (gemm,) in offered}


@contextmanager
def switchboard(
    model: nn.Module, recipe: RecipeLike, policy: Policy | None, tokens: int, scales: str | None
) -> Iterator[Switchboard]:
    """Make every layer switchable inside the block: layers one by one, nothing computed together, in evaluation mode.

    A layer that is predicted to gain nothing is measured too. Afterwards the model is what it was.

    Raises:
        ConfigError: the model is converted already, or no layer of it would be in FP8.
    """
    if any(isinstance(module, Layer) for module in model.modules()):
        raise ConfigError("the model is converted already. Localise before octavo.convert, or after octavo.revert.")
    policy = _one_by_one(policy or Policy())
    modes = {module: module.training for module in model.modules()}
    plan = convert(model, recipe, policy=policy, tokens=tokens, scales=scales)
    try:
        rows = {row.name: row for row in plan.layers if row.is_fp8}
        if not rows:
            raise ConfigError(
                f"recipe '{plan.recipe.name}' puts no layer in FP8: there is nothing to localise. Name "
                "another, or a policy that keeps less."
            )
        model.eval()
        yield Switchboard(model, rows, plan.recipes)
    finally:
        revert(model)
        for module, training in modes.items():
            module.training = training


def _one_by_one(policy: Policy) -> Policy:
    kept: dict[str, Any] = {"activation_inputs": "bf16", "norm_inputs": "bf16", "attention_output": "bf16"}
    return replace(policy, fuse=False, min_gain=0.0, weights="as_they_are", requantise=(), **kept)
