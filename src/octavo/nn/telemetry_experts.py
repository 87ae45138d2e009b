"""Sampled grouped GEMMs: fprop and dgrad of `octavo.nn.grouped` with telemetry.

As in `octavo.nn.telemetry_ops`, with a buffer of three rows: the tokens of all experts, the stack of their weights (E
N, K), the gradients. A NaN in the weight of an expert shows in the rows of its own tokens only, so the first and the
last of those are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.experts import weighted
from octavo.kernels.grouped import ExpertCodes, grouped_gemm
from octavo.kernels.runtime.operation import operation
from octavo.kernels.sample import SampleInput, sample, sampled_rows, sampling_off
from octavo.nn.telemetry_ops import (
    ROWS,
    GemmOptions,
    Source,
    ends_of,
    gradients,
    rotated,
    sample_input,
    sampled,
    sampled_values,
)
from octavo.numerics import Quantized


def _fake(a: Quantized, w: ExpertCodes, _ends: Tensor, options: GemmOptions, *_: object) -> Tensor:
    return a.codes.new_empty(a.codes.shape[0], w.codes.shape[1], dtype=options.dtype)


_TAGS = torch.Tag.cudagraph_unsafe, torch.Tag.needs_fixed_stride_order


@operation(fake=_fake, tags=_TAGS)
def sampled_grouped_fprop(
    x: Quantized, w: ExpertCodes, ends: Tensor, options: GemmOptions, tokens: Source, stack: Source,
    stats: Tensor, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return y (T, N), and sample the tokens (T, K) and the weights (E, N, K).

    Args:
        tokens: x itself, by `ROWS`, or the inputs of an activation.
        stats: the buffer, FP32 (3, WIDTH) or (3, WIDTH + BINS).
        weights: FP32 (T,), factors of the rows of y.
    """
    y, rows = grouped_gemm(x if weights is None else weighted(x, weights), w, ends, *options), stats.data
    if not sampling_off(rows[0]) and 0 not in x.codes.shape:
        sample_input(x, tokens, _ends_of_tokens(y, ends), rows[0])
        assert w.scale is not None
        _sample_weights(stack, w.scale, _ends_of_experts(y, ends), rows[1])
    return y


def _sample_weights(stack: Source, scale: Tensor, edges: Tensor, row: Tensor) -> None:
    """Sample the weights (E, N, K) of a stack, with the scales (E, N) and two results (E N, 2) of each."""
    matrix, scale, total = stack.tensors[0].detach().flatten(0, 1), scale.reshape(-1, 1), None
    if stack.target.rotation:
        total = len(matrix)
        matrix = rotated(matrix[sampled_rows(total, row)], stack.target)
    sample(SampleInput(matrix, scale, stack.target, None, edges, tied=True, rows=total), row)


@operation(fake=_fake, tags=_TAGS)
def sampled_grouped_dgrad(
    g: Quantized, w: ExpertCodes, ends: Tensor, options: GemmOptions, source: Source, stats: Tensor
) -> Tensor:
    """Return dx (T, K), and sample the gradients dy (T, N).

    Args:
        w: transposed, (E, K, N).
        source: dy; its fold, FP32 (E, N), holds the factors of each expert's tokens.
        stats: as for `sampled_grouped_fprop`.
    """
    dx, row = grouped_gemm(g, w, ends, *options), stats.data[2]
    if sampling_off(row) or 0 in g.codes.shape:
        return dx
    total, edges = len(g.codes), _ends_of_tokens(dx, ends)
    if source.fold is None:
        sample(SampleInput(source.tensors[0], g.scale, source.target, None, edges, tied=True), row)
    else:
        fold = source.fold[torch.searchsorted(ends, sampled_rows(total, row), right=True)]
        dy = _sampled_gradients(source, total, row)
        sample(SampleInput(dy, g.scale, source.target, fold, edges, rows=total), row)
    return dx


def _sampled_gradients(source: Source, total: int, row: Tensor) -> Tensor:
    """Return the sampled rows of a gradient of `total` rows: direct, by `ROWS`, or that of a weighted activation."""
    if not source.kind:
        return source.tensors[0][sampled_rows(total, row)]
    if source.kind == ROWS:
        return sampled_values(source, total, row)
    dh, weights, *inputs = sampled(source.tensors, total, row)
    return torch.cat(gradients([dh * weights[:, None].to(dh.dtype), *inputs], source.kind), dim=1)


def _ends_of_tokens(y: Tensor, ends: Tensor) -> Tensor:
    """Return the first and the last column of y (T, N), as (T, 2).

    Zeros for all tokens of an expert of which no element is finite: that is the doing of its weights, or of all of
    these tokens, which the sample shows.
    """
    both = ends_of(y)
    assert both is not None  # experts have features
    expert = torch.searchsorted(ends, torch.arange(len(y), dtype=ends.dtype, device=y.device), right=True)
    finite = both.isfinite().any(1).int()
    tells = finite.new_zeros(len(ends)).scatter_reduce(0, expert, finite, "amax") > 0
    return torch.where(tells[expert, None], both, 0)


def _ends_of_experts(y: Tensor, ends: Tensor) -> Tensor:
    """Return the first and the last row of y (T, N) of each expert, as (E N, 2).

    Zeros for an expert without tokens, and for one of which no element is finite: that is a token's doing, not that of
    its weights, or of all of them, which the sample shows.
    """
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    both = torch.stack([y[starts.clamp(max=len(y) - 1)], y[(ends - 1).clamp(min=0)]], dim=-1)
    tells = (ends > starts) & both.isfinite().flatten(1).any(1)
    return torch.where(tells[:, None, None], both, 0).flatten(0, 1)
