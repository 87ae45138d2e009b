"""How often each magnitude occurs in a tensor: enough to say what any scale would do to it.

A magnitude is counted by the upper 16 bits of its FP32 form: BF16 values exactly, others rounded down by at most 0.8 %.
The counts lie on the tensor's device until they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_BINS = 2**15
_INFINITY = 0x7F80
"""The upper bits of an infinity; those of a NaN are above."""
_EDGES = (np.arange(_INFINITY + 1, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)
"""The smallest magnitude of each bin of finite ones, and infinity."""


class Spectrum:
    """The magnitudes of a tensor, over all batches that were added. Reading it waits for the device."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._amax: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Count the elements of a batch, of any shape and floating-point dtype."""
        magnitude = x.detach().float().abs().flatten()
        counts = torch.bincount(magnitude.view(torch.int32) >> 16, minlength=_BINS)
        self._counts = counts if self._counts is None else self._counts + counts
        if magnitude.numel():
            self._amax.append(torch.where(magnitude < torch.inf, magnitude, 0.0).max())
        self.__dict__.pop("_found", None)

    @classmethod
    def of(cls, several: Sequence[Spectrum]) -> Spectrum:
        """Return the magnitudes of several tensors as if they were one, the batches of one after those of another."""
        whole = cls()
        counts = [spectrum._counts for spectrum in several if spectrum._counts is not None]
        whole._counts = torch.stack(counts).sum(0) if counts else None
        whole._amax = [amax for spectrum in several for amax in spectrum._amax]
        return whole

    @property
    def batches(self) -> int:
        """How many batches were added that have elements."""
        return len(self._amax)

    @property
    def elements(self) -> int:
        """How many elements were counted."""
        return int(self._found.sum())

    @property
    def non_finite(self) -> int:
        """How many of them are NaN or infinite. They count for nothing else."""
        return int(self._found[_INFINITY:].sum())

    @property
    def zero(self) -> float:
        """The share that is zero (or below 2^-133, which no scale keeps)."""
        return self._share(int(self._found[0]))

    @property
    def amax(self) -> float:
        """The largest finite magnitude, exactly; 0 if there is none."""
        return float(max(self.batch_amax(), default=0.0))

    def batch_amax(self) -> list[float]:
        """Return the largest finite magnitude of each batch."""
        return [float(amax) for amax in self._amax]

    def above(self, magnitude: float) -> float:
        """Return the share of all elements that is finite and above a magnitude."""
        first = int(np.searchsorted(_EDGES, magnitude, side="right"))
        return self._share(int(self._found[first:_INFINITY].sum()))

    def below(self, magnitude: float, *, inclusive: bool = False) -> float:
        """Return the share of all elements that is not zero and below a magnitude, or at most that."""
        past = int(np.searchsorted(_EDGES, magnitude, side="right" if inclusive else "left"))
        return self._share(int(self._found[1:past].sum()))

    def percentile(self, percent: float) -> float:
        """Return the magnitude that so many percent of the finite elements that are not zero do not exceed.

        It is the upper end of a bin: at most 0.8 % more than the exact one, and never above `amax`.
        """
        upto = np.cumsum(self._found[1:_INFINITY])
        if not upto[-1]:
            return 0.0
        found = 1 + int(np.searchsorted(upto, percent / 100 * upto[-1], side="left"))
        return min(float(_EDGES[found + 1]), self.amax)

    def smallest(self, share: float) -> float | None:
        """Return the largest magnitude such that no more than a share of all elements is that small, and not zero.

        None: not so many elements differ from zero.
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
