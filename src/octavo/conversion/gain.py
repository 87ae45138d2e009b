"""The predicted gain of a layer: time of its three GEMMs in BF16 over their time in FP8 with the quantisation passes.

Rates are those of the GPU (`octavo.kernels.runtime.devices`): dense, random normal data; without rates there is no
prediction.
Passes run at the speed of a device copy, one per matrix that is quantised or transposed. Convolutions and batches have
many small kernels: the time that a host takes to launch them is the minimum, as measured with an H200. `octavo bench
step` measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from octavo.kernels.patches import makes_directly
from octavo.kernels.runtime.devices import Rates, mode_of
from octavo.recipes import GEMMS, OPERANDS, Operand, Recipe

_LARGE = 2048
"""A product of a batch runs at the rate of a single large one if two of M, N and K reach this."""
_AT_LEAST_US = {"linear": 0.0, "convolution": 2000.0, "batch": 2000.0}
"""Least time of an eager forward and backward in FP8, in microseconds: the host has to launch them."""
_LOOP_US = 150.0
"""The same per product of a batch without a batched kernel."""


def predicted_gain(
    recipe: Recipe, out_features: int, in_features: int, tokens: int, taps: int = 0, batch: int = 1, *, rates: Rates
) -> float:
    """Return BF16 time / FP8 time of fprop, dgrad and wgrad, quantisation included.

    Args:
        out_features: N.
        in_features: K; of a convolution C kh kw.
        tokens: M, the tokens of one forward; of a convolution the output pixels.
        taps: kh kw of a convolution, 0 for a linear layer. Its BF16 time is that of a GEMM of this size.
        batch: number of products of this size that are computed at once, neither operand a weight.
        rates: those of the GPU.
    """
    bf16 = _bf16_seconds(out_features, in_features, tokens, rates)
    return 3 * batch * bf16 / _seconds(recipe, (tokens, out_features, in_features), taps, batch, rates)


EXPERTS_FROM = 512
"""Least width and hidden width with predicted gains of experts: narrower ones have not been measured."""
_EXPERT_PASSES = 3.4, 2.1
"""Time of the passes over the rows of experts, compiled in BF16 and in the fused layer, as multiples of a copy of their
tensors: fitted to layers of 16,384 and 32,768 tokens (`octavo bench moe`)."""


def predicted_gain_of_experts(
    recipe: Recipe, first: tuple[int, int], second: tuple[int, int], experts: int, rows: float, *, rates: Rates
) -> float:
    """Return BF16 time / FP8 time of a fused layer of experts, forward and backward, all its passes included.

    Args:
        first: (N, D) of gate and up.
        second: (D, F) of down.
        experts: their number: all their weights are quantised.
        rows: tokens, each counted once per expert that it is sent to.
        rates: those of the GPU.
    """
    weights = math.prod(first) + math.prod(second)
    flops, copied = 6.0 * rows * weights, rows * (12.0 * first[1] + 8.0 * first[0]) / (rates.copy * 1e9)
    fast = rates.fast if recipe.fprop.accumulate == "fast" else 1.0
    bf16, fp8 = flops / (rates.bf16 * 1e12), flops / (rates.grouped * fast * 1e12)
    quantised = 5.0 * experts * weights / (rates.copy * 1e9)
    return (bf16 + _EXPERT_PASSES[0] * copied) / (fp8 + quantised + _EXPERT_PASSES[1] * copied)


def predicted_ms(
    recipe: Recipe, out_features: int, in_features: int, tokens: int, taps: int = 0, *, rates: Rates
) -> float:
    """Return the milliseconds of fprop, dgrad and wgrad of one layer, quantisation included.

    Args: as for `predicted_gain`. A recipe without FP8 gives the time in BF16.
    """
    return 1e3 * _seconds(recipe, (tokens, out_features, in_features), taps, 1, rates)


def _bf16_seconds(out_features: int, in_features: int, tokens: int, rates: Rates) -> float:
    """Return the seconds of one product in BF16."""
    return 2.0 * tokens * out_features * in_features / (rates.bf16 * 1e12)


def _seconds(recipe: Recipe, shape: tuple[int, int, int], taps: int, batch: int, rates: Rates) -> float:
    """Return the seconds of the three products (M, N, K) of a batch with quantisation, or of the host if longer."""
    tokens, out_features, in_features = shape
    flops = 2.0 * tokens * out_features * in_features
    bf16 = _bf16_seconds(out_features, in_features, tokens, rates)
    small = batch > 1 and sum(size >= _LARGE for size in (tokens, out_features, in_features)) < 2
    operands = {name: (a, b) for name, a, b in recipe.gemms()}
    fp8 = 0.0
    for name in GEMMS:
        fast = recipe.gemm(name).accumulate == "fast"
        fp8 += flops / (_rate(operands[name], small, fast, rates) * 1e12) if name in operands else bf16
    sizes = {
        "input": tokens * in_features,
        "weight": out_features * in_features,
        "grad_output": tokens * out_features,
    }
    moved = sum(_bytes(recipe, gemm, role, taps) * sizes[role] for gemm, role in _passes(recipe))
    if taps > 1 and recipe.dgrad.is_fp8:
        moved += 4 * sizes["input"]  # the gradient of the patches in BF16: written, and read by fold
    return max(batch * (fp8 + moved / (rates.copy * 1e9)), _at_least(recipe, taps, batch))


def _at_least(recipe: Recipe, taps: int, batch: int) -> float:
    """Return the least seconds of a forward and backward of any size."""
    if not recipe.is_fp8:
        return 0.0
    if batch > 1:
        looped = any(_is_tiled(operands) for _, *operands in recipe.gemms())
        return 1e-6 * (batch * _LOOP_US if looped else _AT_LEAST_US["batch"])
    return 1e-6 * _AT_LEAST_US["convolution" if taps else "linear"]


def _is_tiled(operands: Iterable[Operand]) -> bool:
    return not {operand.granularity for operand in operands} <= {"row", "column", "tensor"}


def _rate(operands: tuple[Operand, Operand], small_batched: bool, fast: bool, rates: Rates) -> float:
    if small_batched and not _is_tiled(operands):
        return rates.small_batched
    mode = mode_of([operand.granularity for operand in operands])
    if mode == "mx":
        return rates.bf16  # emulated on every GPU with rates
    return float(getattr(rates, mode)) * (rates.fast if fast and mode != "block" else 1.0)


def _passes(recipe: Recipe) -> list[tuple[str, str]]:
    return [(gemm, role) for gemm in GEMMS if recipe.gemm(gemm).is_fp8 for role in OPERANDS[gemm]]


def _bytes(recipe: Recipe, gemm: str, role: str, taps: int) -> float:
    """Return bytes moved per element: a byte transpose moves two; a quantisation reads two, twice for an amax."""
    operand = getattr(recipe.gemm(gemm), role)
    if taps > 1 and role == "input":
        return _patch_bytes(operand, taps, transposed=gemm == "wgrad")
    if taps == 1 and role == "input":  # both are made from the saved input
        return 5.0 if operand.granularity == "tensor" else 3.0
    if recipe.reuses(f"{gemm}.{role}"):
        return 2.0
    return 5.0 if operand.granularity == "tensor" and not operand.has_stored_scale else 3.0


def _patch_bytes(operand: Operand, taps: int, *, transposed: bool) -> float:
    """Return bytes moved per element of the unfolded matrix, a pixel read for its amax and for its patches."""
    if makes_directly(operand.granularity, transposed=transposed):
        return (2 if operand.is_folded else 4) / taps + 1  # folded: with the scales of fprop, no amax
    return 2 / taps + 2 + 3
