"""Telemetry of several ranks as one: each measures its part of a step, and all come to the same values.

One all-gather of the buffer, some 64 bytes a tensor, is queued beside the training; every rank then combines what all
of them measured, in the same order, so that the values are equal to the bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.kernels.sample import SAMPLED, STATS, WIDTH

_MAXIMA = [STATS.index(name) for name in ("amax", "scale", "nonfinite")]
_SHARES = [STATS.index(name) for name in ("flushed", "subnormal", "saturated")]
_MEAN, _VARIANCE, _KURTOSIS, _SQNR = (STATS.index(name) for name in ("mean", "variance", "kurtosis", "sqnr"))


class Gathering:
    """The rows of all ranks on their way to this one."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup) -> None:
        """Queue the all-gather of FP32 (tensors, width); all ranks of the group do."""
        ranks = dist.get_world_size(group)
        self._parts = rows.new_empty(ranks, *rows.shape)
        self._work = dist.all_gather_into_tensor(self._parts.flatten(0, 1), rows, group, async_op=True)

    def has_arrived(self) -> bool:
        """Return whether `result` need not wait."""
        return self._work is None or bool(self._work.is_completed())

    def result(self) -> Tensor:
        """Return the rows of all ranks as one. On a GPU the current stream waits, and not the host."""
        if self._work is not None:
            self._work.wait()
        if self._parts.is_cuda:
            self._parts.record_stream(torch.cuda.current_stream(self._parts.device))
        return combined(self._parts)


def combined(parts: Tensor) -> Tensor:
    """Return what the rows of several ranks say of their tensors together, FP32 (tensors, width).

    amax, scale and nonfinite are the largest; shares are means, weighted by elements; mean and variance are those of
    all elements, and kurtosis is too but for what the means of ranks differ; the noise of sqnr is the mean over the
    ranks where there is any; bins and sampled elements add up. Where no rank has looked, NaN stays.

    Args:
        parts: FP32 (ranks, tensors, width).
    """
    values = parts.double()
    looked = ~values[..., 0].isnan()
    weight = torch.where(looked, values[..., SAMPLED], 0.0)
    weight = weight / weight.sum(dim=0)  # NaN where nobody looked

    def mean(x: Tensor) -> Tensor:
        return (torch.where(looked, x, 0.0) * weight).sum(dim=0)

    result = parts[0].double()
    for column in _MAXIMA:
        result[:, column] = _largest(values[..., column])
    for column in _SHARES:
        result[:, column] = mean(values[..., column])
    means, variances = values[..., _MEAN], values[..., _VARIANCE]
    centre = mean(means)
    second = mean(variances + (means - centre).square())
    fourth = mean(torch.where(variances > 0, values[..., _KURTOSIS] * variances.square(), 0.0))
    result[:, _MEAN], result[:, _VARIANCE], result[:, _KURTOSIS] = centre, second, fourth / second.square()
    result[:, _SQNR] = -10 * (10 ** (-values[..., _SQNR] / 10)).nanmean(dim=0).log10()
    result[:, SAMPLED] = torch.where(looked, values[..., SAMPLED], 0.0).sum(dim=0)
    bins = values[..., WIDTH:]
    result[:, WIDTH:] = torch.where(bins.isnan().all(dim=0), torch.nan, bins.nansum(dim=0))
    return result.float()


def _largest(x: Tensor) -> Tensor:
    """Return the largest over the ranks that is not NaN."""
    found = torch.where(x.isnan(), -torch.inf, x).amax(dim=0)
    return torch.where(found > -torch.inf, found, torch.nan)
