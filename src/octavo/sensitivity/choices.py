"""What may be chosen for a layer: which of its recipe's three products run in FP8, the others in high precision."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from octavo.errors import ConfigError
from octavo.recipes import GEMMS, Recipe, load

Choice = tuple[str, ...]
"""The GEMMs that run in FP8, in the order of `GEMMS`; () is all in high precision."""


def choices(recipe: Recipe) -> dict[Choice, Recipe]:
    """Return every choice that the recipe allows, as a recipe; the fewest GEMMs first, () always.

    Some go together: a `folded` dgrad or wgrad reads the codes of fprop, and cannot be in FP8 without it.
    """
    own = tuple(gemm for gemm in GEMMS if recipe.gemm(gemm).is_fp8)
    found: dict[Choice, Recipe] = {(): load("bf16"), own: replace(recipe, modules={})}
    for choice in (choice for count in range(1, len(own)) for choice in combinations(own, count)):
        wide = {gemm: replace(recipe.gemm(gemm), precision="bf16") for gemm in own if gemm not in choice}
        try:
            found[choice] = replace(found[own], name=f"{recipe.name} {'+'.join(choice)}", **wide)  # type: ignore[arg-type]
        except ConfigError:
            continue
    return {choice: found[choice] for choice in sorted(found, key=lambda choice: (len(choice), _order(choice)))}


def without(choice: Choice, gemm: str) -> Choice:
    """Return the choice with one GEMM less."""
    return tuple(each for each in choice if each != gemm)


def alone(gemm: str, offered: dict[Choice, Recipe]) -> tuple[Choice, Choice]:
    """Return the fewest GEMMs in FP8 that one can be added to, and those with it: what to measure it by.

    Raises:
        ConfigError: no choice has this GEMM in FP8 and stands without it.
    """
    for choice in offered:
        if gemm in choice and without(choice, gemm) in offered:
            return without(choice, gemm), choice
    raise ConfigError(f"{gemm} cannot be measured: no recipe has it in FP8 and stands without it.")


def _order(choice: Choice) -> list[int]:
    return [GEMMS.index(gemm) for gemm in choice]
