"""Presets of recipes. To add one, add a function here and its name to `PRESETS`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from octavo.recipes.spec import Dgrad, FormatName, Fprop, Operand, Recipe, ScaleFrom, Wgrad


def folded() -> Recipe:
    """Row-wise scales, each tensor quantised once: the backward GEMMs reuse the codes of fprop, transposed."""
    row, folded = Operand(granularity="row"), Operand(granularity="column")
    return Recipe(
        name="folded",
        fprop=Fprop(input=row, weight=row),
        dgrad=Dgrad(grad_output=row, weight=folded),
        wgrad=Wgrad(grad_output=row, input=folded),
    )


def rotated() -> Recipe:
    """`folded` with fprop in rotated INT8: nine times less rounding error than E4M3 (arXiv 2512.03673, section 3).

    Inputs and weights are rotated along the summed index by Hadamard blocks and rounded to INT8 per row. Backward reads
    a second set of codes, those of `folded`.
    """
    recipe = folded()
    operand = Operand(format="int8", rotation=256, scaling="float32")
    return replace(recipe, name="rotated", fprop=Fprop(input=operand, weight=operand))


def rotated_fast() -> Recipe:
    """`rotated` with fast accumulation in dgrad: faster on Hopper; sums of INT8 codes are exact in either."""
    recipe = rotated()
    return replace(recipe, name="rotated_fast", dgrad=replace(recipe.dgrad, accumulate="fast"))


def folded_fast() -> Recipe:
    """`folded` with fast accumulation in fprop and dgrad: faster on Hopper; truncation biases sums toward zero."""
    recipe = folded()
    return replace(
        recipe,
        name="folded_fast",
        fprop=replace(recipe.fprop, accumulate="fast"),
        dgrad=replace(recipe.dgrad, accumulate="fast"),
    )


def rowwise() -> Recipe:
    """Row-wise scales along each GEMM's own rows: every tensor is quantised twice, once per contraction."""
    return Recipe(name="rowwise")


def rowwise_bf16_fprop() -> Recipe:
    """`rowwise` with fprop in BF16, the GEMM whose rounding was seen to raise the loss; both gradients in FP8."""
    return replace(rowwise(), name="rowwise_bf16_fprop", fprop=Fprop(precision="bf16"))


def rowwise_bf16_wgrad() -> Recipe:
    """`rowwise` with wgrad in BF16, like torchao's `rowwise_with_gw_hp`."""
    return replace(rowwise(), name="rowwise_bf16_wgrad", wgrad=Wgrad(precision="bf16"))


def tensorwise() -> Recipe:
    """Current scaling, one FP32 scale per tensor: E4M3 forward, E5M2 gradients, like torchao's `tensorwise`."""
    return _per_tensor("tensorwise")


def tensorwise_e4m3() -> Recipe:
    """`tensorwise` with E4M3 gradients: one more mantissa bit, less range."""
    return _per_tensor("tensorwise_e4m3", gradients="e4m3")


def delayed() -> Recipe:
    """Delayed scaling: inputs and gradients use the amax of the last 16 steps; saves a read, spikes saturate.

    Transformer Engine's DelayedScaling, except for weights, whose current amax costs nothing extra.
    """
    return _per_tensor("delayed", scale_from="delayed")


def just_in_time() -> Recipe:
    """`delayed`, but a tensor that would saturate is rescaled by its current amax."""
    return _per_tensor("just_in_time", scale_from="just_in_time")


def static() -> Recipe:
    """Static scales: inputs and gradients use those of a calibration file."""
    return _per_tensor("static", scale_from="static")


def _per_tensor(name: str, *, gradients: Literal["e4m3", "e5m2"] = "e5m2", scale_from: ScaleFrom = "current") -> Recipe:
    weight = Operand(granularity="tensor", scaling="float32")
    forward = replace(weight, scale_from=scale_from)
    gradient = replace(forward, format=gradients)
    return Recipe(
        name=name,
        fprop=Fprop(input=forward, weight=weight),
        dgrad=Dgrad(grad_output=gradient, weight=weight),
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


def served() -> Recipe:
    """`folded` with the codes and scales that vLLM and SGLang compute, so that training and serving round alike."""
    recipe = folded()
    row, column = (replace(each, scaling="engine") for each in (recipe.fprop.input, recipe.wgrad.input))
    return replace(
        recipe,
        name="served",
        fprop=Fprop(input=row, weight=row),
        dgrad=replace(recipe.dgrad, weight=column),
        wgrad=replace(recipe.wgrad, input=column),
    )


def served_block() -> Recipe:
    """`block` with FP32 scales forward, as engines make them without DeepGEMM; with it their scales are `block`'s."""
    recipe = block()
    tile, weight = replace(recipe.fprop.input, scaling="float32"), replace(recipe.fprop.weight, scaling="float32")
    return replace(
        recipe,
        name="served_block",
        fprop=Fprop(input=tile, weight=weight),
        dgrad=replace(recipe.dgrad, weight=weight),
    )


def mxfp8() -> Recipe:
    """1x32 tiles with E8M0 scales along each GEMM's own sum, E4M3 everywhere (OCP MX 1.0; arXiv 2506.08027)."""
    return replace(mx("e4m3", "e4m3"), name="mxfp8")


def mx(forward: FormatName, gradient: FormatName) -> Recipe:
    """Return a recipe of MX's 1x32 tiles in other formats: E5M2, or E2M3, E3M2 and E2M1, whose rounding is emulated.

    Codes of the last three take a byte each, like those of E4M3: they show the accuracy of a format, and save nothing.

    Args:
        forward: format of inputs and weights.
        gradient: format of output gradients.
    """
    tile, grad_output = (Operand(format=each, granularity="1x32") for each in (forward, gradient))
    return Recipe(
        name=f"mx_{forward}_{gradient}",
        fprop=Fprop(input=tile, weight=tile),
        dgrad=Dgrad(grad_output=grad_output, weight=tile),
        wgrad=Wgrad(grad_output=grad_output, input=tile),
    )


def bf16() -> Recipe:
    """No FP8: the layer stays as it is."""
    return Recipe(
        name="bf16",
        fprop=Fprop(precision="bf16"),
        dgrad=Dgrad(precision="bf16"),
        wgrad=Wgrad(precision="bf16"),
    )


PRESETS = {
    make.__name__: make
    for make in (
        folded,
        rotated,
        rotated_fast,
        folded_fast,
        rowwise,
        rowwise_bf16_fprop,
        rowwise_bf16_wgrad,
        tensorwise,
        tensorwise_e4m3,
        delayed,
        just_in_time,
        static,
        block,
        served,
        served_block,
        mxfp8,
        bf16,
    )
}
ALIASES = {
    "current": "tensorwise",
    "hybrid": "tensorwise",
    "per-tensor": "tensorwise",
    "e4m3": "tensorwise_e4m3",
    "blockwise": "block",
}
"""Names in guides to FP8 training -> preset: current per-tensor scales with E4M3 forward and E5M2 gradients
(Transformer Engine's HYBRID), E4M3 everywhere, DeepSeek-V3's blocks."""
