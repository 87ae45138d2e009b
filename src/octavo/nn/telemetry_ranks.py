"""Telemetry of several ranks as one: each measures its part of a step, and all come to the same values.

One all-gather of the buffers, some 64 bytes per tensor, is queued beside the training; every rank then combines what
the ranks that have a tensor measured of it, in the same order, so that the values are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.kernels.sample import SAMPLED, STATS, WIDTH
from octavo.nn.telemetry_rows import Row

_MAXIMA = [STATS.index(name) for name in ("amax", "scale", "nonfinite")]
_SHARES = [STATS.index(name) for name in ("flushed", "subnormal", "saturated")]
_MEAN, _VARIANCE, _KURTOSIS, _SQNR = (STATS.index(name) for name in ("mean", "variance", "kurtosis", "sqnr"))


class RankRows(NamedTuple):
    """What one rank watches."""

    places: dict[Row, int]
    """Where in its buffer each of its rows is."""
    height: int
    """Rows of its buffer."""
    coded: set[Row]
    """Those of inputs that come as codes."""
    not_watched: dict[str, str]
    """Layers that are not looked at, and why."""


class RankMerger:
    """What the ranks of a group watch: all of them the same layers of a model, or each stage of it some.

    Args:
        own: what this rank does. All ranks of the group call this, and are told what the others do.
        order: names of the model's layers in their order; those that it has not are last, rank by rank.
        device: of the buffer.
    """

    rows: tuple[Row, ...]
    """What is measured on any rank, in the order of the model."""
    coded: set[Row]
    """Those of inputs that come as codes, on any rank."""
    not_watched: dict[str, str]
    """Layers that are not looked at, and why, of all ranks."""

    def __init__(self, own: RankRows, group: dist.ProcessGroup, order: Sequence[str], device: torch.device) -> None:
        everyone: list[RankRows] = [own] * dist.get_world_size(group)
        dist.all_gather_object(everyone, own, group)
        places = {row: list[int]() for of_rank in everyone for row in of_rank.places}
        number = {name: at for at, name in enumerate(dict.fromkeys([*order, *(row.layer for row in places)]))}
        self.rows = tuple(sorted(places, key=lambda row: number[row.layer]))  # stable: roles stay in their order
        self.coded = set[Row]().union(*(of_rank.coded for of_rank in everyone))
        self.not_watched = {name: why for of_rank in everyone for name, why in of_rank.not_watched.items()}
        self._group = group
        self._height = 1 + max(of_rank.height for of_rank in everyone)  # the last row is nobody's, and NaN
        for rank, of_rank in enumerate(everyone):
            for row, place in of_rank.places.items():
                places[row].append(rank * self._height + place)
        most, nobodys = max(map(len, places.values()), default=0), self._height - 1
        table = [places[row] + [nobodys] * (most - len(places[row])) for row in self.rows]
        self._places = torch.tensor(table, dtype=torch.int64, device=device).reshape(len(table), most).t()

    def padded(self, values: Tensor) -> Tensor:
        """Return a copy of this rank's buffer, FP32 (its height, width), as high as any rank's, NaN below."""
        copy = values.new_full((self._height, values.shape[1]), torch.nan)
        copy[: len(values)] = values
        return copy

    def gather(self, padded: Tensor) -> Gathering:
        """Queue the all-gather of `padded`; all ranks of the group do."""
        return Gathering(padded, self._places, self._group)


class Gathering:
    """The rows of all ranks on their way to this one."""

    def __init__(self, buffer: Tensor, places: Tensor, group: dist.ProcessGroup) -> None:
        """Queue the all-gather of FP32 (height, width); all ranks of the group do.

        Args:
            places: int64 (ranks, tensors), where in the buffers of all, one below the other, each tensor is.
        """
        ranks = dist.get_world_size(group)
        self._places = places
        self._buffers = buffer.new_empty(ranks * len(buffer), buffer.shape[1])
        self._work = dist.all_gather_into_tensor(self._buffers, buffer, group, async_op=True)

    def has_arrived(self) -> bool:
        """Return whether `result` need not wait."""
        return self._work is None or bool(self._work.is_completed())

    def result(self) -> Tensor:
        """Return FP32 (tensors, width) of all ranks. On a GPU the current stream waits, and not the host."""
        if self._work is not None:
            self._work.wait()
        if self._buffers.is_cuda:
            self._buffers.record_stream(torch.cuda.current_stream(self._buffers.device))
        return combined(self._buffers[self._places])


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
