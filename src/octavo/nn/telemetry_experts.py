"""The GEMMs of experts that telemetry samples: fprop and dgrad of `octavo.nn.grouped`.

As `octavo.nn.telemetry_ops` has it, with a page of three rows: one for the tokens of all experts, one for the stack of
their weights (E N, K), one for the gradients. A NaN in the weight of an expert shows in the rows of its own tokens
only, so the first and the last of those are what is looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.grouped import grouped_gemm
from octavo.kernels.operator import call, define_packed
from octavo.kernels.sample import SampleInput, sample, sampled_rows, sampling_off
from octavo.nn.telemetry_ops import Source, ends_of
from octavo.numerics import Quantized

Weights = tuple[Tensor, Tensor]
"""Codes (E, R, C) and scales (E, R) of the weights as a grouped GEMM reads them."""
Product = tuple[torch.dtype, str]
"""Dtype of the result and `accumulate`."""


def fprop(
    x: Quantized, w: Weights, ends: Tensor, product: Product, tokens: Source, stack: Source, page: Tensor
) -> Tensor:
    """Return y (T, N), and sample the tokens (T, K) and the weights (E, N, K).

    Args:
        page: FP32 (3, WIDTH) or (3, WIDTH + BINS).
    """
    y: Tensor = call("sampled_grouped_fprop", _fprop, (x, w, ends, product, tokens, stack, page), [True])[0]
    return y


def dgrad(g: Quantized, w: Weights, ends: Tensor, product: Product, source: Source, page: Tensor) -> Tensor:
    """Return dx (T, K), and sample the gradients dy (T, N).

    Args:
        w: transposed, (E, K, N).
        source: dy; its fold, FP32 (E, N), is what the gradients of each expert's tokens were multiplied by.
        page: as for `fprop`.
    """
    dx: Tensor = call("sampled_grouped_dgrad", _dgrad, (g, w, ends, product, source, page), [True])[0]
    return dx


def _fprop(
    x: Quantized, w: Weights, ends: Tensor, product: Product, tokens: Source, stack: Source, page: Tensor
) -> list[Tensor]:
    y, rows = grouped_gemm(x, *w, ends, *product), page.data
    if not sampling_off(rows[0]) and 0 not in x.codes.shape:
        tokens, stack = Source(*tokens), Source(*stack)
        sample(SampleInput(tokens.tensors[0], x.scale, tokens.target, None, ends_of(y), tied=True), rows[0])
        weights, scale = stack.tensors[0].detach().flatten(0, 1), w[1].reshape(-1, 1)
        sample(SampleInput(weights, scale, stack.target, None, _ends_of_experts(y, ends), tied=True), rows[1])
    return [y]


def _dgrad(g: Quantized, w: Weights, ends: Tensor, product: Product, source: Source, page: Tensor) -> list[Tensor]:
    dx, row = grouped_gemm(g, *w, ends, *product), page.data[2]
    if sampling_off(row) or 0 in g.codes.shape:
        return [dx]
    source = Source(*source)
    dy = source.tensors[0]
    if source.fold is None:
        sample(SampleInput(dy, g.scale, source.target, None, ends_of(dx), tied=True), row)
    else:
        rows = sampled_rows(len(dy), row)
        fold = source.fold[torch.searchsorted(ends, rows, right=True)]
        sample(SampleInput(dy[rows], g.scale, source.target, fold, ends_of(dx), rows=len(dy)), row)
    return [dx]


def _ends_of_experts(y: Tensor, ends: Tensor) -> Tensor:
    """Return the first and the last row of y (T, N) of each expert, as (E N, 2); zeros where it has no token."""
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    both = torch.stack([y[starts.clamp(max=len(y) - 1)], y[(ends - 1).clamp(min=0)]], dim=-1)
    return torch.where((ends > starts)[:, None, None], both, 0).flatten(0, 1)


def _shape(a: Quantized, w: Weights, ends: Tensor, product: Product, *_: object) -> list[Tensor]:
    return [a.codes.new_empty(a.codes.shape[0], w[0].shape[1], dtype=product[0])]


for _name, _run in (("sampled_grouped_fprop", _fprop), ("sampled_grouped_dgrad", _dgrad)):
    define_packed(_name, _run, _shape, torch.Tag.cudagraph_unsafe, torch.Tag.needs_fixed_stride_order)
