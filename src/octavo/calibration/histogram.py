"""Histogram of a tensor's magnitudes, from which the effect of any scale can be read.

Bins are the upper 16 bits of the FP32 magnitude: exact for BF16 values, otherwise rounded down by at most 0.8 %.
Counts stay on the tensor's device until they are read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FEWEST = 4
"""Batches from which their largest magnitudes have a spread."""
_BINS = 2**15
_INFINITY = 0x7F80
"""The upper bits of an infinity; those of a NaN are larger."""
_EDGES = (np.arange(_INFINITY + 1, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
"""The smallest magnitude of each finite bin, and infinity."""


class MagnitudeHistogram:
    """The magnitudes of a tensor over all added batches. Reading it waits for the device."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._amax: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Add the elements of a batch, of any shape and floating-point dtype."""
        magnitude = x.detach().float().abs().flatten()
        counts = torch.bincount(magnitude.view(torch.int32) >> 16, minlength=_BINS)
        self._counts = counts if self._counts is None else self._counts + counts
        if magnitude.numel():
            self._amax.append(torch.where(magnitude < torch.inf, magnitude, 0.0).max())
        self.__dict__.pop("_found", None)

    @classmethod
    def of(cls, several: Sequence[MagnitudeHistogram]) -> MagnitudeHistogram:
        """Return the sum of the histograms of several tensors."""
        whole = cls()
        counts = [histogram._counts for histogram in several if histogram._counts is not None]
        whole._counts = torch.stack(counts).sum(0) if counts else None
        batches = itertools.zip_longest(*(histogram._amax for histogram in several))
        whole._amax = [torch.stack([amax for amax in batch if amax is not None]).max() for batch in batches]
        return whole

    @property
    def batches(self) -> int:
        """Number of non-empty batches."""
        return len(self._amax)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(self._found.sum())

    @property
    def non_finite(self) -> int:
        """Number of NaN or infinite elements, which count for nothing else."""
        return int(self._found[_INFINITY:].sum())

    @property
    def zero(self) -> float:
        """Share of zeros (or below 2^-133, which no scale represents)."""
        return self._share(int(self._found[0]))

    @property
    def amax(self) -> float:
        """The exact largest finite magnitude; 0 if there is none."""
        return float(max(self.batch_amax(), default=0.0))

    def batch_amax(self) -> list[float]:
        """Return the largest finite magnitude of each batch."""
        return [float(amax) for amax in self._amax]

    def extrapolated(self, batches: float) -> float:
        """Return the median of the largest magnitude of so many batches, at least `amax`.

        Maxima of batches follow a Gumbel distribution in log2, whose largest of n is the same, moved by its width times
        log n (Fisher and Tippett, 1928); mean and width are those of the batches seen. Fewer than 4 have no width. It
        is exact for tails by a power law, and up to a bit too large for lighter ones, such as a normal distribution's.
        """
        found = [amax for amax in self.batch_amax() if amax > 0]
        if len(found) < FEWEST:
            return self.amax
        logs = np.log2(found)
        width = float(logs.std(ddof=1)) * math.sqrt(6) / math.pi
        median = float(logs.mean()) + width * (math.log(batches) - math.log(math.log(2)) - float(np.euler_gamma))
        return max(self.amax, math.exp2(min(median, 127.0)))

    def above(self, magnitude: float) -> float:
        """Return the share of elements that are finite and above `magnitude`."""
        first = int(np.searchsorted(_EDGES, magnitude, side="right"))
        return self._share(int(self._found[first:_INFINITY].sum()))

    def below(self, magnitude: float, *, inclusive: bool = False) -> float:
        """Return the share of elements that are not zero and below `magnitude`, or at most that if `inclusive`."""
        past = int(np.searchsorted(_EDGES, magnitude, side="right" if inclusive else "left"))
        return self._share(int(self._found[1:past].sum()))

    def percentile(self, percent: float) -> float:
        """Return a percentile of the magnitudes of finite, non-zero elements.

        It is the upper end of a bin: at most 0.8 % above the exact one, and never above `amax`.
        """
        upto = np.cumsum(self._found[1:_INFINITY])
        if not upto[-1]:
            return 0.0
        found = 1 + int(np.searchsorted(upto, percent / 100 * upto[-1], side="left"))
        return min(float(_EDGES[found + 1]), self.amax)

    def smallest(self, share: float) -> float | None:
        """Return the largest magnitude below which at most `share` of all elements are non-zero.

        None: fewer elements differ from zero.
        """
        upto = np.cumsum(self._found[1:_INFINITY])
        found = 1 + int(np.searchsorted(upto, share * self.elements, side="right"))
        return float(_EDGES[found - 1]) if found < _INFINITY else None

    def _share(self, count: int) -> float:
        return count / max(self.elements, 1)

    @cached_property
    def _found(self) -> NDArray[np.int64]:
        if self._counts is None:
            return np.zeros(_BINS, dtype=np.int64)
        found: NDArray[np.int64] = self._counts.cpu().numpy()
        return found
