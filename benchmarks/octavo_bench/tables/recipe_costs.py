"""The tables of what recipes compute with and what that costs, made from the recipes themselves."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from octavo import recipes
from octavo.recipes import Recipe
from octavo.recipes.costs import Pass, Shape, held_bytes, kept_bytes, operand_names, operand_of, passes
from octavo_bench.tables.markdown import table

SHAPE = Shape(8192, 4096, 4096)
"""The layer that scales are counted for."""
_SCALES = {"power_of_two": "a power of two", "float32": "FP32"}
_HEADER = ("operand", "format", "granularity", "scale", "made", "read", "written")
_SUMMARY = ("recipe", "input", "gradient", "weight, each use", "weight, each value", "kept", "held")


def summary_table() -> str:
    """Return a line a recipe: bytes read and written per element of each matrix, kept and held."""
    return table(_SUMMARY, [_summary(name, recipes.load(name)) for name in recipes.names()])


def operand_tables() -> str:
    """Return a table a recipe: each operand of each GEMM, how it is made and what that costs. Equal ones are one."""
    alike: dict[str, list[str]] = {}
    for name in recipes.names():
        alike.setdefault(_operand_table(recipes.load(name)), []).append(name)
    return "\n\n".join(f"**{', '.join(f'`{name}`' for name in names)}**\n\n{text}" for text, names in alike.items())


def _summary(name: str, recipe: Recipe) -> tuple[str, ...]:
    made = passes(recipe, SHAPE)
    uses = {
        "input": [one for one in made if one.matrix == "input"],
        "grad_output": [one for one in made if one.matrix == "grad_output"],
        "weight": [one for one in made if one.matrix == "weight" and one.when != "optimizer step"],
    }
    moved = (_bytes(sum(one.read + sum(one.written) for one in ones), matrix) for matrix, ones in uses.items())
    once = [one for one in made if one.when == "optimizer step"]
    step = _bytes(sum(one.read + sum(one.written) for one in once), "weight")
    return (
        f"`{name}`",
        *moved,
        step,
        _bytes(kept_bytes(recipe, SHAPE), "input"),
        _bytes(held_bytes(recipe, SHAPE), "weight"),
    )


def _operand_table(recipe: Recipe) -> str:
    return table(_HEADER, list(_operand_rows(recipe)))


def _operand_rows(recipe: Recipe) -> Iterator[tuple[str, ...]]:
    made_in = {name: one for one in passes(recipe, SHAPE) for name in one.made}
    for name in operand_names():
        gemm, matrix = name.split(".")
        one = made_in.get(name)
        if recipe.gemm(gemm).is_fp8:
            operand = operand_of(recipe, name)
            scale = [_SCALES[operand.scaling], *([operand.scale_from.replace("_", " ")] if operand.keeps_scale else [])]
            stochastic = ", stochastic" if operand.rounding == "stochastic" else ""
            what = (operand.format.upper() + stochastic, operand.granularity, ", ".join(scale))
        else:
            what = ("BF16", "", "")
        if one is None:
            yield (f"`{name}`", *what, "as it is", "", "")
            continue
        place = one.made.index(name)
        read = _bytes(one.read, matrix) if place == 0 else ""
        yield (f"`{name}`", *what, _made(recipe, name, one), read, _bytes(one.written[place], matrix))


def _made(recipe: Recipe, name: str, one: Pass) -> str:
    """Say how an operand is made, and when."""
    if one.how == "cast":
        return f"cast in {one.when}"
    if one.how == "transpose":
        folded = "; its scales go into grad_output" if operand_of(recipe, name).is_folded else ""
        return f"codes of fprop, transposed in {one.when}{folded}"
    partner = {"dgrad.grad_output": "dgrad.weight", "wgrad.grad_output": "wgrad.input"}.get(name)
    times = "" if partner is None else _folded_in(recipe, partner)
    if one.made[0] != name:
        return f"quantised in the same read{times}"
    return f"quantised {'once a value' if one.when == 'optimizer step' else f'in {one.when}'}{times}"


def _folded_in(recipe: Recipe, partner: str) -> str:
    return f", times the scales of {partner.split('.')[1]}" if operand_of(recipe, partner).is_folded else ""


def _bytes(count: int, matrix: str) -> str:
    """Return bytes by the elements of a matrix of the layer."""
    return f"{count / prod(SHAPE.of(matrix)):.2f}"
