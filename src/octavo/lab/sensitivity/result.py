"""Results of localisation: sensitivities, the precision map (a recipe file) and its evidence, a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo._util import config_reader
from octavo._util.files import write_text
from octavo._util.terminal import columns
from octavo.errors import ConfigError
from octavo.lab.sensitivity.loss import UNCHANGED, Change
from octavo.lab.sensitivity.precision_switch import Choice, fullest
from octavo.recipes import Evidence, Recipe, brief, load


def to_toml(recipe: Recipe, path: Path) -> Path:
    """Write a recipe as a TOML file and return its path. Reading it returns an equal recipe.

    Raises:
        ConfigError: the file cannot be written, or its name does not end in .toml.
    """
    if path.suffix != ".toml":
        raise ConfigError(f"{path}: a precision map is a .toml file.")
    write_text(path, "\n".join(_lines(recipe)) + "\n", ConfigError, mkdir=True)
    return path


def _lines(recipe: Recipe) -> Iterator[str]:
    top = brief(replace(recipe, modules={}, evidence={}))
    for key, value in top.items() if isinstance(top, Mapping) else [("base", top)]:
        yield f"{key} = {_value(value)}"
    yield "\n[modules]"
    for pattern, other in recipe.modules.items():
        yield f"{_value(pattern)} = {_value(brief(other))}"
    yield "\n[evidence]"
    for pattern, found in recipe.evidence.items():
        yield f"{_value(pattern)} = {_value(config_reader.to_dict(found))}"


def _value(value: Any) -> str:
    """Return a value as one line of TOML, which has no null: None is the default of the keys that take it."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_value(each)}' for key, each in value.items() if each is not None)} }}"
    return json.dumps(value, ensure_ascii=False)


_HEADER = ("layer", "N x K", "GEMM", "loss change", "", "1 - cosine", "costs", "ms saved", "chosen")
_RIGHT = (3, 5, 6, 7)


def table(found: Localisation) -> Iterator[str]:
    """Yield the lines of a table; each layer is named in its first row."""
    rows = [_HEADER, *(_cells(row, row["gemm"] == found.layers[0].all[0]) for row in found.rows())]
    yield from (*columns(rows, _RIGHT), "")
    yield from _totals(found)


def _cells(row: Mapping[str, Any], is_first: bool) -> tuple[str, ...]:
    forward = row["gemm"] == "fprop"
    return (
        row["layer"] if is_first else "",
        "{} x {}".format(*row["shape"]) if is_first else "",
        row["gemm"],
        f"{row['loss_change']:+.1e}" if forward else "",
        f"± {row['loss_error']:.0e}" if forward and row["loss_error"] is not None else "",
        f"{1 - row['cosine']:.1e}",
        f"{row['cost']:.1e}",
        f"{row['ms_saved']:.2g}",
        "fp8" if row["chosen"] else "bf16",
    )


def _totals(found: Localisation) -> Iterator[str]:
    gemms = [gemm for layer in found.layers for gemm in layer.all]
    chosen = sum(len(layer.chosen) for layer in found.layers)
    yield f"{chosen} of {len(gemms)} GEMMs in FP8 by recipe {found.recipe.name}"
    share = 100 * found.cost / found.loss if found.loss else 0.0
    yield (
        f"costs {found.cost:.2e} of {found.budget:.2e} nats per token ({share:.3g} % of"
        f" {found.loss:.4f}); loss change of these weights {found.loss_change:+.2e}"
    )
    where = f"measured on {found.device}" if found.timing == "measured" else "predicted for an H200, not measured"
    if found.offered > 0:
        yield f"saves {found.saved:.3g} of {found.offered:.3g} ms of linear layers per forward and backward, {where}"
    else:
        yield f"saves no time: no GEMM of this model is faster in FP8, {where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """One layer: the cost of each of its GEMMs in FP8, and the gain of each choice."""

    name: str
    shape: tuple[int, int]
    """(N, K) of its GEMM."""
    recipes: Mapping[Choice, Recipe]
    """The recipe per choice, () first."""
    change: Change
    """Change of the loss with fprop in FP8; dgrad and wgrad do not affect the loss of these weights."""
    cosines: Mapping[str, float]
    """GEMM -> cosine between the model's gradients with it in FP8 and without."""
    ms: Mapping[Choice, float]
    """Choice -> milliseconds of forward and backward; empty if the layer was not called."""
    costs: Mapping[str, float]
    """GEMM -> cost against the budget, nats per token."""
    chosen: Choice

    def cost(self, choice: Choice) -> float:
        """Return the cost of a choice against the budget, nats per token."""
        return sum(self.costs[gemm] for gemm in choice)

    def saved(self, choice: Choice) -> float:
        """Return the milliseconds per step that a choice saves over high precision."""
        return self.ms[()] - self.ms[choice] if self.ms else 0.0

    def saved_by(self, gemm: str) -> float:
        """Return the marginal milliseconds of a GEMM: all in FP8 against all without it and those that need it."""
        without = {choice: recipe for choice, recipe in self.recipes.items() if gemm not in choice}
        return self.saved(self.all) - self.saved(fullest(without))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per GEMM that the recipe has in FP8."""
        return [
            {
                "layer": self.name,
                "gemm": gemm,
                "shape": list(self.shape),
                "loss_change": (change := self.change if gemm == "fprop" else UNCHANGED).mean,
                "loss_error": change.error,
                "second_order": change.second_order,
                "cosine": self.cosines[gemm],
                "cost": self.costs[gemm],
                "ms_saved": self.saved_by(gemm),
                "chosen": gemm in self.chosen,
                "reason": self.reason,
            }
            for gemm in self.all
        ]

    @property
    def all(self) -> Choice:
        """The choice of all GEMMs that the recipe has in FP8."""
        return fullest(self.recipes)

    @property
    def reason(self) -> str:
        """Reason for the choice, one of a few fixed texts."""
        if not self.ms:
            return "not called in the batches that layers are switched on"
        if self.chosen == self.all:
            return "within the loss budget"
        if max(self.saved(choice) for choice in self.recipes) <= self.saved(self.chosen):
            return "FP8 saves no time" if not self.chosen else "more FP8 saves no time"
        return "FP8 is over the loss budget" if not self.chosen else "more FP8 is over the loss budget"

    @property
    def evidence(self) -> Evidence:
        """The evidence of this layer in a precision map."""
        return Evidence(
            reason=self.reason,
            loss_change=_rounded(self.change.mean),
            loss_error=None if self.change.error is None else _rounded(self.change.error),
            turned={gemm: _rounded(1 - self.cosines[gemm]) for gemm in self.all},
            ms_saved=_rounded(self.saved(self.chosen)),
            ms_offered=_rounded(self.saved(self.all)),
        )


def _rounded(value: float) -> float:
    """Return three significant digits; further ones vary between runs."""
    return float(f"{value:.3g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Localisation:
    """The sensitivities of a model, and the precision map that fits the budget. `print` shows a table."""

    recipe: Recipe
    loss: float
    """Loss in high precision, nats per token."""
    budget: float
    """Budget of the map, nats per token."""
    progress: float
    """Assumed decrease of the loss while tokens grow e-fold, nats."""
    layers: tuple[Sensitivity, ...]
    timing: str
    """`measured` or `predicted`."""
    device: str
    batches: int
    """Number of batches."""
    unmeasured: tuple[str, ...] = ()
    """In-projections of `nn.MultiheadAttention`, which the map leaves in BF16."""

    @property
    def cost(self) -> float:
        """Cost of the map against the budget, nats per token."""
        return sum(layer.cost(layer.chosen) for layer in self.layers)

    @property
    def loss_change(self) -> float:
        """Predicted change of the loss by the map, at these weights, nats per token."""
        return sum(layer.change.mean for layer in self.layers if "fprop" in layer.chosen)

    @property
    def saved(self) -> float:
        """Milliseconds per step that the map saves."""
        return sum(layer.saved(layer.chosen) for layer in self.layers)

    @property
    def offered(self) -> float:
        """Milliseconds per step that the recipe saves in all layers."""
        return sum(layer.saved(layer.all) for layer in self.layers)

    @property
    def map(self) -> Recipe:
        """The precision map: the recipe with an entry and evidence per localised layer."""
        return replace(
            self.recipe,
            name=f"{self.recipe.name}, localised",
            modules={
                **dict.fromkeys(self.unmeasured, load("bf16")),
                **{layer.name: layer.recipes[layer.chosen] for layer in self.layers},
            },
            evidence={layer.name: layer.evidence for layer in self.layers},
        )

    def save(self, path: str | Path) -> Path:
        """Write the map as a TOML file that `octavo.convert` and `octavo train --recipe` take.

        Raises:
            ConfigError: the file cannot be written, or its name does not end in .toml.
        """
        return to_toml(self.map, Path(path))

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per layer and GEMM."""
        return [row for layer in self.layers for row in layer.rows()]

    def to_json(self) -> str:
        """Return everything as JSON."""
        names = ("loss", "budget", "progress", "cost", "loss_change", "saved", "offered", "timing", "device", "batches")
        body = {name: getattr(self, name) for name in names}
        return json.dumps({"recipe": self.recipe.name, **body, "rows": self.rows()}, indent=1)

    def __str__(self) -> str:
        return "\n".join(table(self))
