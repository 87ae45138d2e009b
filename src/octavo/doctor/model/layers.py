"""Which layers are in FP8, and by which recipe: what every other check of a model is about."""

from __future__ import annotations

from collections import Counter

from torch import nn

from octavo.doctor.check import Finding, check, ok, warning
from octavo.doctor.subjects import Trial


@check(
    "layers",
    symptom="FP8 takes the same time and memory as BF16",
    remedy="octavo plan says of every layer why it stays in BF16: --min-gain 0 converts those that gain nothing too.",
)
def layers(trial: Trial) -> Finding:
    """Count the layers with products, and those in FP8 by recipe."""
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d
    total = sum(isinstance(module, kinds) for module in trial.model.modules())
    recipes = Counter(layer.recipe.name for layer in trial.layers.values())
    weights = {str(layer.weight.dtype)[6:] for layer in trial.layers.values()}
    seen = f"{recipes.total()} of {total} layers are in FP8"
    if not recipes:
        return warning(seen, layers=total)
    told = ", ".join(f"{count} by {name}" if len(recipes) > 1 else name for name, count in recipes.items())
    parameters = sum(p.numel() for p in trial.model.parameters())
    seen = f"{seen} ({told}), weights of {' and '.join(sorted(weights))}, {parameters / 1e6:,.2f} M parameters"
    return ok(seen, layers=total, fp8=recipes.total(), parameters=parameters, recipes=dict(recipes))
