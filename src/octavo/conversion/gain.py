"""The predicted gain of a layer: time of its three GEMMs in BF16 over their time in FP8 with the passes that quantise.

Rates are an H200's, dense, random normal data, slow accumulation. Passes run at the speed of a device copy, one for
each matrix that is quantised or transposed. It is a prediction for Hopper: `octavo
bench step` measures.
"""

from __future__ import annotations

from octavo.recipes import GEMMS, OPERANDS, Operand, Recipe, reused_from

_TFLOPS = {"bf16": 670.0, "tensor": 1190.0, "row": 1160.0, "block": 880.0}
_COPY_GB_PER_S = 4200.0


def predicted_gain(recipe: Recipe, out_features: int, in_features: int, tokens: int) -> float:
    """Return BF16 time / FP8 time of fprop, dgrad and wgrad, quantisation included.

    Args:
        out_features: N.
        in_features: K.
        tokens: M, the tokens of one forward.
    """
    flops = 2.0 * tokens * out_features * in_features
    bf16 = flops / (_TFLOPS["bf16"] * 1e12)
    operands = {name: (a, b) for name, a, b in recipe.gemms()}
    fp8 = sum(flops / (_rate(operands[name]) * 1e12) if name in operands else bf16 for name in GEMMS)
    sizes = {
        "input": tokens * in_features,
        "weight": out_features * in_features,
        "grad_output": tokens * out_features,
    }
    moved = sum(_bytes(recipe, gemm, role) * sizes[role] for gemm, role in _passes(recipe))
    return 3 * bf16 / (fp8 + moved / (_COPY_GB_PER_S * 1e9))


def _rate(operands: tuple[Operand, Operand]) -> float:
    granularities = {operand.granularity for operand in operands}
    if granularities <= {"tensor"}:
        return _TFLOPS["tensor"]
    return _TFLOPS["row"] if granularities <= {"row", "column", "tensor"} else _TFLOPS["block"]


def _passes(recipe: Recipe) -> list[tuple[str, str]]:
    return [(gemm, role) for gemm in GEMMS if recipe.gemm(gemm).is_fp8 for role in OPERANDS[gemm]]


def _bytes(recipe: Recipe, gemm: str, role: str) -> float:
    """Return bytes moved an element: a byte transpose moves two; a quantisation reads two, twice for an amax."""
    if reused_from(recipe, gemm, role):
        return 2.0
    operand = getattr(recipe.gemm(gemm), role)
    return 5.0 if operand.granularity == "tensor" else 3.0
