"""`sample` as it is defined, its moments in FP64."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.sample import PHASE, SAMPLED, STATS, Looked, limits, sampled_rows


def sample(looked: Looked, row: Tensor) -> None:
    """See `octavo.kernels.sample.sample`."""
    found = torch.stack([*_stats(looked, row)])
    before = row[: len(STATS)]
    grows = torch.tensor([name in ("amax", "nonfinite") for name in STATS], device=row.device)
    found = torch.where(grows, torch.fmax(found, before), found)
    looks = row[PHASE] >= 0
    row[: len(STATS)] = torch.where(looks, found, before)
    read = looked.x.shape[1] * len(sampled_rows(looked.shape[0], row))
    row[SAMPLED] = torch.where(looks, float(read), row[SAMPLED])


def _stats(looked: Looked, row: Tensor) -> list[Tensor]:
    """Return the statistics in the order of `STATS`, FP32 and of no dimension."""
    total_rows, cols = looked.shape
    rows = sampled_rows(total_rows, row)
    x = (looked.x if looked.rows is not None else looked.x[rows]).float()
    read = x if looked.fold is None else x * looked.fold
    y = (read * (1 / scales_of(looked, rows))).abs()
    magnitude = x.abs()
    finite = magnitude < torch.inf
    zeroed, normal, largest = limits(looked.target.fmt)
    flushed = finite & (read != 0) & (y <= zeroed)
    subnormal = finite & (y > zeroed) & (y < normal)
    saturated = finite & (y > largest)
    broken = _share((~finite).sum(), x.numel())
    if looked.edges is not None:
        lost = (~torch.isfinite(looked.edges.float())).all(dim=1).sum()
        broken = torch.maximum(broken, _share(lost, total_rows * cols))
    shares = [_share(flag.sum(), x.numel()) for flag in (flushed, subnormal, saturated)]
    scale = looked.scale.max()
    return [_amax(looked, magnitude, finite, scale), scale, *shares, broken, *_moments(x, finite)]


def scales_of(looked: Looked, rows: Tensor) -> Tensor:
    """Return the scale of each sampled element, broadcastable to (len(rows), C)."""
    total_rows, cols = looked.shape
    height, width = looked.target.tile.tile(total_rows, cols)
    scale = looked.scale[rows // height]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(width, dim=1)[:, :cols]


def _amax(looked: Looked, magnitude: Tensor, finite: Tensor, scale: Tensor) -> Tensor:
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
    tile = looked.x[across[0].clamp(max=total_rows - 1)][:, across[1].clamp(max=cols - 1)].float().abs()
    return torch.maximum(largest, torch.where(inside & (tile < torch.inf), tile, 0.0).max())


def _share(found: Tensor, total: int) -> Tensor:
    return (found.double() / total).float()


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
