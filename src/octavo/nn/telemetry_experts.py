"""The GEMMs of experts that telemetry looks at: fprop and dgrad of `octavo.nn.grouped`.

As `octavo.nn.telemetry_ops` has it, with a page of three rows: one for the tokens of all experts, one for the stack of
their weights (E N, K), one for the gradients. A NaN in the weight of an expert shows in the rows of its own tokens
only, so the first and the last of those are what is looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import QuantSpec
from octavo.kernels.grouped import grouped_gemm
from octavo.kernels.operator import define
from octavo.kernels.quant_spec import parse_spec
from octavo.kernels.sample import SampleInput, rests, sample_soon, sampled_rows
from octavo.nn.telemetry_ops import ends_of
from octavo.numerics import PER_ROW, Quantized

Weights = tuple[Tensor, Tensor]
"""Codes (E, R, C) and scales (E, R) of the weights as a grouped GEMM reads them."""


def fprop(
    x8: Quantized, weight: Tensor, w: Weights, ends: Tensor, target: QuantSpec, dtype: torch.dtype, accumulate: str,
    x: Tensor, looked: QuantSpec, page: Tensor,
) -> Tensor:  # fmt: skip
    """Return y (T, N), and look at the tokens x (T, K) and the weights (E, N, K), which were quantised to `target`.

    Args:
        looked: what x was quantised to.
        page: FP32 (3, WIDTH) or (3, WIDTH + BINS).
    """
    y: Tensor = torch.ops.octavo.sampled_grouped_fprop(
        *x8[:2], weight, *w, ends, str(target), dtype, accumulate, x, str(looked), page
    )
    return y


def dgrad(
    g: Quantized, w: Weights, ends: Tensor, dtype: torch.dtype, accumulate: str, dy: Tensor, looked: QuantSpec,
    fold: Tensor | None, page: Tensor,
) -> Tensor:  # fmt: skip
    """Return dx (T, K), and look at the gradients dy (T, N).

    Args:
        w: transposed, (E, K, N).
        looked: what dy was quantised to.
        fold: FP32 (E, N), what the gradients of each expert's tokens were multiplied by.
        page: as for `fprop`.
    """
    dx: Tensor = torch.ops.octavo.sampled_grouped_dgrad(
        *g[:2], *w, ends, dtype, accumulate, dy, str(looked), fold, page
    )
    return dx


def _fprop(
    x: Tensor, x_scale: Tensor, weight: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor, target: str,
    dtype: torch.dtype, accumulate: str, tokens: Tensor, looked: str, page: Tensor,
) -> Tensor:  # fmt: skip
    y = grouped_gemm(Quantized(x, x_scale, PER_ROW), w, w_scale, ends, dtype, accumulate)
    rows, operand, goal = page.data, parse_spec(looked), parse_spec(target)
    if rests(rows[0]) or 0 in x.shape or operand is None or goal is None:
        return y
    sample_soon(SampleInput(tokens, x_scale, operand, None, ends_of(y), tied=True), rows[0])
    stack = weight.detach().flatten(0, 1)
    sample_soon(SampleInput(stack, w_scale.reshape(-1, 1), goal, None, _ends_of_experts(y, ends), tied=True), rows[1])
    return y


def _dgrad(
    g: Tensor, g_scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor, dtype: torch.dtype, accumulate: str,
    dy: Tensor, looked: str, fold: Tensor | None, page: Tensor,
) -> Tensor:  # fmt: skip
    dx = grouped_gemm(Quantized(g, g_scale, PER_ROW), w, w_scale, ends, dtype, accumulate)
    row, operand = page.data[2], parse_spec(looked)
    if rests(row) or 0 in g.shape or operand is None:
        return dx
    if fold is None:
        sample_soon(SampleInput(dy, g_scale, operand, None, ends_of(dx), tied=True), row)
        return dx
    rows = sampled_rows(len(dy), row)
    fold = fold[torch.searchsorted(ends, rows, right=True)]
    sample_soon(SampleInput(dy[rows], g_scale, operand, fold, ends_of(dx), rows=len(dy)), row)
    return dx


def _ends_of_experts(y: Tensor, ends: Tensor) -> Tensor:
    """Return the first and the last row of y (T, N) of each expert, as (E N, 2); zeros where it has no token."""
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    both = torch.stack([y[starts.clamp(max=len(y) - 1)], y[(ends - 1).clamp(min=0)]], dim=-1)
    return torch.where((ends > starts)[:, None, None], both, 0).flatten(0, 1)


define(
    "sampled_grouped_fprop(Tensor x, Tensor x_scale, Tensor weight, Tensor w, Tensor w_scale, Tensor ends, str target, "
    "ScalarType dtype, str accumulate, Tensor tokens, str looked, Tensor page) -> Tensor",
    _fprop,
    lambda x, x_scale, weight, w, w_scale, ends, target, dtype, *_: x.new_empty(x.shape[0], w.shape[1], dtype=dtype),
    torch.Tag.cudagraph_unsafe,
    torch.Tag.needs_fixed_stride_order,
)
define(
    "sampled_grouped_dgrad(Tensor g, Tensor g_scale, Tensor w, Tensor w_scale, Tensor ends, ScalarType dtype, "
    "str accumulate, Tensor dy, str looked, Tensor? fold, Tensor page) -> Tensor",
    _dgrad,
    lambda g, g_scale, w, w_scale, ends, dtype, *_: g.new_empty(g.shape[0], w.shape[1], dtype=dtype),
    torch.Tag.cudagraph_unsafe,
    torch.Tag.needs_fixed_stride_order,
)
