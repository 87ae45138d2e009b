"""`sample` as it is defined, its moments in FP64."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from octavo.kernels.sample import (
    BINS,
    DETAILED,
    LOWEST,
    PHASE,
    SAMPLED,
    STATS,
    WIDTH,
    SampleInput,
    count,
    limits,
    sampled_rows,
)

_ALWAYS = STATS[:-1]
"""What is written without bins, too: all but sqnr."""


def sample(looked: SampleInput, row: Tensor) -> None:
    """See `octavo.kernels.sample.sample`."""
    found = torch.stack([*_stats(looked, row)])
    before = row[: len(_ALWAYS)]
    found = torch.where(_grows(row.device), torch.fmax(found, before), found)
    looks = row[PHASE] >= 0
    row[: len(_ALWAYS)] = torch.where(looks, found, before)
    row[SAMPLED] = torch.where(looks, float(looked.x.shape[1] * count(looked.shape[0])), row[SAMPLED])
    if len(row) > WIDTH and (row.is_cuda or row[DETAILED] > 0):
        asks = looks & (row[DETAILED] > 0)
        for at, new in zip((slice(len(_ALWAYS), len(STATS)), slice(WIDTH, None)), detail(looked, row), strict=True):
            row[at] = torch.where(asks, new, row[at])


@cache
def _grows(device: torch.device) -> Tensor:
    """Return which statistics are the largest of all micro-batches, a flag each."""
    return torch.tensor([name in ("amax", "nonfinite") for name in _ALWAYS], device=device)


def _read(looked: SampleInput, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sample, FP32 (count(R), C), what is quantised of it, with its fold, and the scales, broadcastable."""
    rows = sampled_rows(looked.shape[0], row)
    scale = scales_of(looked, rows)
    x = (looked.x if looked.rows is not None else _rows_of(looked.x, rows)).float()
    x = x * scale if looked.is_coded else x
    return x, x if looked.fold is None else x * looked.fold, scale


def _stats(looked: SampleInput, row: Tensor) -> list[Tensor]:
    """Return the statistics in the order of `_ALWAYS`, FP32 and of no dimension."""
    total_rows, cols = looked.shape
    x, read, scale_of_each = _read(looked, row)
    y = (read * (1 / scale_of_each)).abs()
    magnitude = x.abs()
    finite = magnitude < torch.inf
    zeroed, normal, largest = limits(looked.target.fmt)
    flushed = finite & (read != 0) & (y <= zeroed)
    subnormal = finite & (y > zeroed) & (y < normal)
    saturated = finite & (y > largest)
    *shares, broken = _shares(torch.stack([flag.sum() for flag in (flushed, subnormal, saturated, ~finite)]), x.numel())
    if looked.edges is not None:
        lost = (~torch.isfinite(looked.edges.float())).all(dim=1).sum()
        broken = torch.maximum(broken, _shares(lost[None], total_rows * cols)[0])
    if looked.is_coded:
        shares[0], shares[2] = (share * torch.nan for share in shares[::2])
    scale = looked.scale.max()
    return [_amax(looked, magnitude, finite, scale), scale, *shares, broken, *_moments(x, finite)]


def detail(looked: SampleInput, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return sqnr in dB (1,), NaN where nothing was lost or nothing is known, and the bins (BINS,), FP32."""
    x, read, scale = _read(looked, row)
    y, fmt = read * (1 / scale), looked.target.fmt
    finite = (x.abs() < torch.inf) & (y.abs() < torch.inf)
    codes = y.clamp(-fmt.max, fmt.max).to(fmt.dtype).float()
    signal, noise = (torch.where(finite, part, 0.0).double() for part in (read, read - codes * scale))
    ratio = signal.square().sum() / noise.square().sum()
    sqnr = torch.where((ratio > 0) & (ratio < torch.inf), 10 * ratio.log10(), torch.nan).float()
    place = torch.where(y == 0, 0, (torch.frexp(y).exponent - 1 - LOWEST).clamp(0, BINS - 1))
    counted = (finite & (read != 0)).float()
    bins = torch.zeros(BINS, device=y.device).scatter_add_(0, place.flatten().long(), counted.flatten())
    return (sqnr * torch.nan if looked.is_coded else sqnr)[None], bins


def scales_of(looked: SampleInput, rows: Tensor) -> Tensor:
    """Return the scale of each sampled element, broadcastable to (len(rows), C)."""
    total_rows, cols = looked.shape
    height, width = looked.target.tile.tile(total_rows, cols)
    scale = looked.scale[rows // height]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(width, dim=1)[:, :cols]


def _amax(looked: SampleInput, magnitude: Tensor, finite: Tensor, scale: Tensor) -> Tensor:
    largest = torch.where(finite, magnitude, 0.0).max()
    if looked.bound:
        largest = torch.where(scale > 2.0**-126, torch.maximum(largest, scale * looked.bound), largest)
    total_rows, cols = looked.shape
    height, width = looked.target.tile.tile(total_rows, cols)
    if not looked.reads_tile:
        return largest
    at = looked.scale.flatten().argmax()  # the first of the largest
    top, left = at // looked.scale.shape[1] * height, at % looked.scale.shape[1] * width
    across = torch.arange(height, device=at.device) + top, torch.arange(width, device=at.device) + left
    inside = (across[0] < total_rows)[:, None] & (across[1] < cols)
    tile = _rows_of(looked.x, across[0].clamp(max=total_rows - 1)).float()[:, across[1].clamp(max=cols - 1)].abs()
    tile = tile * scale if looked.is_coded else tile
    return torch.maximum(largest, torch.where(inside & (tile < torch.inf), tile, 0.0).max())


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Return some rows of a matrix; PyTorch has no index of FP8 tensors."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows]


def _shares(found: Tensor, total: int) -> list[Tensor]:
    """Return what share of a total each count is, FP32."""
    return [*(found.double() / total).float()]


def _moments(x: Tensor, finite: Tensor) -> list[Tensor]:
    """Return mean, variance and kurtosis of what is finite. Powers are of x over a power of two: none leaves FP64."""
    kept = torch.where(finite, x, 0.0).double()
    number = finite.sum()
    mean = kept.sum() / number
    off = torch.where(finite, kept - mean, 0.0)
    square = off * off
    second = square.sum() / number
    fourth = (square * square).sum() / number
    return [mean.float(), second.float(), (fourth / (second * second)).float()]
