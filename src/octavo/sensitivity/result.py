"""What localisation found, layer by layer, and what it chose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.recipes import GEMMS, Evidence, Recipe
from octavo.sensitivity.choices import Choice
from octavo.sensitivity.loss import Change
from octavo.sensitivity.precision_map import precision_map, to_toml


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """One layer: what each of its products costs in FP8 alone, and what each choice saves."""

    name: str
    shape: tuple[int, int]
    """(N, K) of its GEMM."""
    recipes: Mapping[Choice, Recipe]
    """What may be chosen, () first: the GEMMs in FP8, and how."""
    change: Change
    """Of the loss, with fprop in FP8. dgrad and wgrad leave the loss of these weights as it is."""
    cosines: Mapping[str, float]
    """GEMM -> the cosine of the model's gradient with it in FP8 and without."""
    ms: Mapping[Choice, float]
    """Choice -> milliseconds of forward and backward."""
    costs: Mapping[str, float]
    """GEMM -> what it counts against the budget, nats a token."""
    chosen: Choice

    def cost(self, choice: Choice) -> float:
        """Return what a choice counts against the budget, nats a token."""
        return sum(self.costs[gemm] for gemm in choice)

    def saved(self, choice: Choice) -> float:
        """Return the milliseconds a step that a choice saves against high precision."""
        return self.ms[()] - self.ms[choice]

    @property
    def all(self) -> Choice:
        """The choice of every GEMM that the recipe has in FP8."""
        return max(self.recipes, key=len)

    @property
    def reason(self) -> str:
        """Why this was chosen, in few words that many layers share."""
        if self.chosen == self.all:
            return "within the loss budget"
        if max(self.saved(choice) for choice in self.recipes) <= self.saved(self.chosen):
            return "FP8 saves no time" if not self.chosen else "more FP8 saves no time"
        return "FP8 is over the loss budget" if not self.chosen else "more FP8 is over the loss budget"

    @property
    def evidence(self) -> Evidence:
        """What a precision map says of this layer."""
        return Evidence(
            reason=self.reason,
            loss_change=_rounded(self.change.mean),
            loss_error=_rounded(self.change.error),
            turned={gemm: _rounded(1 - self.cosines[gemm]) for gemm in GEMMS if gemm in self.cosines},
            ms_saved=_rounded(self.saved(self.chosen)),
            ms_offered=_rounded(self.saved(self.all)),
        )


def _rounded(value: float) -> float:
    """Return three significant digits: what is beyond them would differ each time."""
    return float(f"{value:.3g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Localisation:
    """The sensitivities of a model, and the precision map that fits the budget. `print` shows it as a table."""

    recipe: Recipe
    loss: float
    """In high precision, nats a token."""
    budget: float
    """Nats a token that the map may cost."""
    progress: float
    """Nats that the loss is taken to fall while tokens grow e-fold."""
    layers: tuple[Sensitivity, ...]
    timing: str
    """`measured` or `predicted`."""
    device: str
    batches: int
    """What was looked at."""

    @property
    def cost(self) -> float:
        """What the map counts against the budget, nats a token."""
        return sum(layer.cost(layer.chosen) for layer in self.layers)

    @property
    def loss_change(self) -> float:
        """The change of the loss that is predicted for the map at these weights, nats a token."""
        return sum(layer.change.mean for layer in self.layers if "fprop" in layer.chosen)

    @property
    def saved(self) -> float:
        """Milliseconds a step that the map saves."""
        return sum(layer.saved(layer.chosen) for layer in self.layers)

    @property
    def offered(self) -> float:
        """Milliseconds a step that the recipe saves where every layer runs by it."""
        return sum(layer.saved(layer.all) for layer in self.layers)

    @property
    def map(self) -> Recipe:
        """The precision map: a recipe with one for each layer, and the evidence."""
        return precision_map(
            self.recipe,
            {layer.name: layer.recipes[layer.chosen] for layer in self.layers},
            {layer.name: layer.evidence for layer in self.layers},
        )

    def save(self, path: str | Path) -> Path:
        """Write the map as a TOML file that `octavo.convert` and `octavo train --recipe` take.

        Raises:
            ConfigError: the file cannot be written, or its name does not end in .toml.
        """
        return to_toml(self.map, Path(path))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a layer and GEMM."""
        return [row for layer in self.layers for row in _rows(layer)]

    def to_json(self) -> str:
        """Return everything as JSON."""
        names = ("loss", "budget", "progress", "cost", "loss_change", "saved", "offered", "timing", "device", "batches")
        body = {name: getattr(self, name) for name in names}
        return json.dumps({"recipe": self.recipe.name, **body, "rows": self.rows()}, indent=1)

    def __str__(self) -> str:
        from octavo.sensitivity.text import table

        return "\n".join(table(self))


def _rows(layer: Sensitivity) -> list[dict[str, Any]]:
    quiet = Change(0.0, 0.0, 0.0)
    return [
        {
            "layer": layer.name,
            "gemm": gemm,
            "shape": list(layer.shape),
            "loss_change": (change := layer.change if gemm == "fprop" else quiet).mean,
            "loss_error": change.error,
            "second_order": change.second_order,
            "cosine": layer.cosines[gemm],
            "cost": layer.costs[gemm],
            "ms_saved": saved_by(layer, gemm),
            "chosen": gemm in layer.chosen,
            "reason": layer.reason,
        }
        for gemm in GEMMS
        if gemm in layer.all
    ]


def saved_by(layer: Sensitivity, gemm: str) -> float:
    """Return the milliseconds that a GEMM saves last: all in FP8 against all but this one, and what needs this one."""
    others = [choice for choice in layer.recipes if gemm not in choice]
    return layer.saved(layer.all) - layer.saved(max(others, key=len))
