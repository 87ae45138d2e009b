"""Ctrl-C and SIGTERM: the run saves a checkpoint after the step in progress, and stops; a second signal aborts it."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from octavo.errors import Interrupted

ONE = 1.0
"""Seconds within which signals count as one: a launcher forwards those that the terminal has sent to all ranks."""


class StopSignals:
    """SIGINT and SIGTERM as a request while `waits` is set and the block runs in the main thread.

    Raises:
        Interrupted: in the main thread, at the second signal, or at the first while `waits` is not set.
    """

    def __init__(self, *, says: bool = True) -> None:
        self.asked = 0
        """The signal that has arrived; 0 for none."""
        self.waits = False
        """Whether a signal waits for the end of the step in progress."""
        self._says, self._since = says, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.waits:
            if not callable(before := self._before[number]):
                raise Interrupted(number)
            before(number, frame)  # as a heartbeat's, which asks all ranks
        elif not self.asked:
            self.asked, self._since = number, time.monotonic()
            if self._says:  # not print, whose buffer may be in use
                os.write(2, b"\noctavo: saving a checkpoint after this step, then stopping; once more aborts.\n")
        elif time.monotonic() - self._since > ONE:
            raise Interrupted(number)
