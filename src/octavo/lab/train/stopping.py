"""Ctrl-C and SIGTERM: the run saves a checkpoint after the step in progress, and stops; a second signal aborts it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from octavo.errors import Interrupted

if TYPE_CHECKING:
    from octavo.distributed.health.heartbeat import Heartbeat

ONE = 1.0
"""Seconds within which signals count as one: a launcher forwards those that the terminal has sent to all ranks."""


class StopSignals:
    """SIGINT and SIGTERM, handled in the main thread while the block runs.

    Args:
        prints: print to standard error that the run will stop.
        heartbeat: that of the ranks, which otherwise stops all of them at SIGTERM.

    Raises:
        Interrupted: at the first signal; inside `deferred` at the second.
    """

    def __init__(self, *, prints: bool = True, heartbeat: Heartbeat | None = None) -> None:
        self.asked = 0
        """The signal that has arrived inside `deferred`; 0 for none."""
        self.agreed = 0
        """The signal that all ranks stop for after this step; 0 for none."""
        self._prints, self._heartbeat = prints, heartbeat
        self._is_deferred, self._since = False, 0.0
        self._before: dict[int, Any] = {}

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a signal wait: the block reads `asked` between steps. After an exception signals still wait."""
        self._set_deferred(True)
        yield
        self._set_deferred(False)

    def _set_deferred(self, is_deferred: bool) -> None:
        self._is_deferred = is_deferred
        if self._heartbeat is not None:
            self._heartbeat.saves_on_signal = is_deferred

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_deferred:
            if not callable(before := self._before[number]):
                raise Interrupted(number)
            before(number, frame)  # as a heartbeat's, which asks all ranks
        elif not self.asked:
            self.asked, self._since = number, time.monotonic()
            if self._prints:  # not print, whose buffer may be in use
                os.write(2, b"\noctavo: saving a checkpoint after this step, then stopping; once more aborts.\n")
        elif time.monotonic() - self._since > ONE:
            raise Interrupted(number)
