"""Telemetry of several ranks as one: each measures its part of a step, and all get the same values.

One all-gather of the buffers, some 64 bytes per tensor, is queued beside training. Every rank then combines the
measurements of a tensor in the same order, so that values are bitwise equal.
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
    """Rows that one rank measures."""

    places: dict[Row, int]
    """Index of each row in what it sends."""
    height: int
    """Number of rows that it sends."""
    coded: set[Row]
    """Rows of inputs that arrive as codes."""
    not_watched: dict[str, str]
    """Layers that are not measured, and why."""


class RankMerger:
    """Rows that the ranks of a group measure: all of them the same layers of a model, or each those of its stage.

    Args:
        own: rows of this rank. All ranks of the group create a merger, and exchange their rows.
        order: names of the model's layers in order; other layers come last, rank by rank.
        device: device of the buffer.
    """

    rows: tuple[Row, ...]
    """Rows measured on any rank, in the order of the model."""
    coded: set[Row]
    """Rows of inputs that arrive as codes on any rank."""
    not_watched: dict[str, str]
    """Layers of all ranks that are not measured, and why."""

    def __init__(self, own: RankRows, group: dist.ProcessGroup, order: Sequence[str], device: torch.device) -> None:
        everyone: list[RankRows] = [own] * dist.get_world_size(group)
        dist.all_gather_object(everyone, own, group)
        places = {row: list[int]() for of_rank in everyone for row in of_rank.places}
        number = {name: at for at, name in enumerate(dict.fromkeys([*order, *(row.layer for row in places)]))}
        self.rows = tuple(sorted(places, key=lambda row: number[row.layer]))  # stable: roles stay in their order
        self.coded = set[Row]().union(*(of_rank.coded for of_rank in everyone))
        self.not_watched = {name: why for of_rank in everyone for name, why in of_rank.not_watched.items()}
        self._group = group
        self._height = 1 + max(of_rank.height for of_rank in everyone)  # the last row belongs to no rank, and is NaN
        for rank, of_rank in enumerate(everyone):
            for row, place in of_rank.places.items():
                places[row].append(rank * self._height + place)
        most, nobodys = max(map(len, places.values()), default=0), self._height - 1
        table = [places[row] + [nobodys] * (most - len(places[row])) for row in self.rows]
        self._places = torch.tensor(table, dtype=torch.int64, device=device).reshape(len(table), most).t()

    def padded(self, values: Tensor) -> Tensor:
        """Return a copy of this rank's buffer, FP32 (its height, width), padded with NaN to the largest height."""
        copy = values.new_full((self._height, values.shape[1]), torch.nan)
        copy[: len(values)] = values
        return copy

    def gather(self, padded: Tensor) -> Gathering:
        """Queue the all-gather of `padded`; all ranks of the group must call it."""
        return Gathering(padded, self._places, self._group)


class Gathering:
    """Rows of all ranks in transit to this one."""

    def __init__(self, buffer: Tensor, places: Tensor, group: dist.ProcessGroup) -> None:
        """Queue the all-gather of FP32 (height, width); all ranks of the group must call it.

        Args:
            places: int64 (ranks, tensors), index of each tensor in the concatenated buffers.
        """
        ranks = dist.get_world_size(group)
        self._places = places
        self._buffers = buffer.new_empty(ranks * len(buffer), buffer.shape[1])
        self._work = dist.all_gather_into_tensor(self._buffers, buffer, group, async_op=True)

    def has_arrived(self) -> bool:
        """Return whether `result` returns without waiting."""
        return self._work is None or bool(self._work.is_completed())

    def result(self) -> Tensor:
        """Return FP32 (tensors, width) of all ranks. On a GPU the current stream waits, not the host."""
        if self._work is not None:
            self._work.wait()
        if self._buffers.is_cuda:
            self._buffers.record_stream(torch.cuda.current_stream(self._buffers.device))
        return combined(self._buffers[self._places])


def combined(parts: Tensor) -> Tensor:
    """Return the statistics of tensors over all ranks, FP32 (tensors, width).

    amax, scale and nonfinite are the largest; shares are means, weighted by elements; mean and variance are those of
    all elements, and so is kurtosis except for differences between the means of ranks; the noise of sqnr is the mean
    over the ranks with any; bins and sampled elements add up. NaN stays if no rank measured a tensor.

    Args:
        parts: FP32 (ranks, tensors, width).
    """
    values = parts.double()
    measured = ~values[..., 0].isnan()
    weight = torch.where(measured, values[..., SAMPLED], 0.0)
    weight = weight / weight.sum(dim=0)  # NaN if no rank measured it

    def mean(x: Tensor) -> Tensor:
        return (torch.where(measured, x, 0.0) * weight).sum(dim=0)

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
    result[:, SAMPLED] = torch.where(measured, values[..., SAMPLED], 0.0).sum(dim=0)
    bins = values[..., WIDTH:]
    result[:, WIDTH:] = torch.where(bins.isnan().all(dim=0), torch.nan, bins.nansum(dim=0))
    return result.float()


def _largest(x: Tensor) -> Tensor:
    """Return the largest value over the ranks, ignoring NaN."""
    found = torch.where(x.isnan(), -torch.inf, x).amax(dim=0)
    return torch.where(found > -torch.inf, found, torch.nan)
