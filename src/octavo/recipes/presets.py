"""The recipes that come with Octavo. To add one, add a function here and its name to `PRESETS`."""

from __future__ import annotations

from dataclasses import replace

from octavo.recipes.spec import Dgrad, Fprop, Operand, Recipe, Wgrad


def folded() -> Recipe:
    """Row-wise scales, each tensor quantised once: the backward GEMMs reuse the codes of fprop, transposed."""
    row, folded = Operand(granularity="row"), Operand(granularity="column")
    return Recipe(
        name="folded",
        fprop=Fprop(input=row, weight=row),
        dgrad=Dgrad(grad_output=row, weight=folded),
        wgrad=Wgrad(grad_output=row, input=folded),
    )


def folded_fast() -> Recipe:
    """`folded` with fast accumulation in fprop and dgrad: quicker on Hopper, at the price of sums that shrink."""
    recipe = folded()
    return replace(
        recipe,
        name="folded_fast",
        fprop=replace(recipe.fprop, accumulate="fast"),
        dgrad=replace(recipe.dgrad, accumulate="fast"),
    )


def rowwise() -> Recipe:
    """Row-wise scales along each GEMM's own rows: every tensor is quantised twice, once for each contraction."""
    return Recipe(name="rowwise")


def tensorwise() -> Recipe:
    """One FP32 scale a tensor, E4M3 forward and E5M2 gradients, as torchao's `tensorwise`."""
    forward = Operand(granularity="tensor", scaling="float32")
    gradient = Operand(granularity="tensor", scaling="float32", format="e5m2")
    return Recipe(
        name="tensorwise",
        fprop=Fprop(input=forward, weight=forward),
        dgrad=Dgrad(grad_output=gradient, weight=forward),
        wgrad=Wgrad(grad_output=gradient, input=forward),
    )


def block() -> Recipe:
    """1x128 tiles for activations and gradients, 128x128 for weights (DeepSeek-V3, arXiv 2412.19437, section 3.3)."""
    tile, weight = Operand(granularity="1x128"), Operand(granularity="128x128")
    return Recipe(
        name="block",
        fprop=Fprop(input=tile, weight=weight),
        dgrad=Dgrad(grad_output=tile, weight=weight),
        wgrad=Wgrad(grad_output=tile, input=tile),
    )


def bf16() -> Recipe:
    """No FP8: the layer stays as it is."""
    return Recipe(
        name="bf16",
        fprop=Fprop(precision="bf16"),
        dgrad=Dgrad(precision="bf16"),
        wgrad=Wgrad(precision="bf16"),
    )


PRESETS = {make.__name__: make for make in (folded, folded_fast, rowwise, tensorwise, block, bf16)}
