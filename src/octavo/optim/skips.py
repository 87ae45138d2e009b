"""Steps skipped for gradients that are not finite: said once, and an error after too many in a row."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from octavo.errors import NonFiniteError
from octavo.kernels.runtime.transfers import AsyncHostCopy

NAMED = 3
"""Largest number of parameters that a message names."""


class SkipWatch:
    """Follows an optimizer's count of skipped steps; never waits for the device, so a GPU's count comes steps later."""

    def __init__(self, skipped: int = 0) -> None:
        self.in_a_row = 0
        """Number of steps skipped in a row, up to the last whose count has arrived."""
        self._total = skipped
        self._coming: deque[AsyncHostCopy] = deque()
        self._has_warned = False

    def after_step(
        self, skipped: Tensor, limit: int | None, is_routine: bool, broken: Callable[[], Iterable[str]]
    ) -> None:
        """Read the counts that have arrived, after a step.

        Args:
            skipped: int32 (1,), number of skipped steps, on the device.
            limit: largest number of skipped steps in a row, exclusive; None for no limit.
            is_routine: a `GradScaler` looks for overflows, and lowers its scale after a skipped step: no warning.
            broken: returns the names of the parameters whose gradients are not finite; may wait for the device.

        Raises:
            NonFiniteError: `limit` steps in a row were skipped.
        """
        if skipped.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        now = skipped.clone()  # the count goes on
        if type(now) is not Tensor or now.is_meta:
            return  # a forecast of memory, without values
        self._coming.append(AsyncHostCopy(now))
        while self._coming and self._coming[0].has_arrived():
            total = int(self._coming.popleft().result())
            self.in_a_row = self.in_a_row + 1 if total > self._total else 0
            self._total = total
            if limit is not None and self.in_a_row >= limit:
                raise NonFiniteError(
                    f"optimizer: {limit} steps in a row were skipped (max_skips={limit}), as gradients"
                    f"{_of(broken())} are not finite. The weights are those before. Look for the operation that makes"
                    " NaN or infinity, with torch.autograd.set_detect_anomaly(True), or lower the learning rate."
                )
            if self.in_a_row and not is_routine and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"optimizer: a step was skipped, as gradients{_of(broken())} are not finite; the weights stay as"
                    " they are. This is said once: optimizer.skipped counts such steps, optimizer.skipped_in_a_row the"
                    " last ones, and max_skips=n raises after n in a row.",
                    stacklevel=4,  # the line that calls `step`, which PyTorch wraps
                )


def _of(names: Iterable[str]) -> str:
    quoted = [f"'{name}'" for name in names]
    more = f" and {len(quoted) - NAMED} more" if len(quoted) > NAMED else ""
    return f" of {', '.join(quoted[:NAMED])}{more}" if quoted else ""
