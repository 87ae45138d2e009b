"""Ctrl-C and SIGTERM: the run saves a checkpoint after the step in progress, and stops; a second signal aborts it."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from octavo.errors import Interrupted

ONE = 1.0
"""Seconds within which signals count as one: a launcher forwards those that the terminal has sent to all ranks."""


class StopSignals:
    """SIGINT and SIGTERM as a request, while the block runs in the main thread.

    Raises:
        Interrupted: in the main thread, at the second signal.
    """

    def __init__(self, *, says: bool = True) -> None:
        self.asked = 0
        """The signal that has arrived; 0 for none."""
        self._says, self._since = says, 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked and time.monotonic() - self._since > ONE:
            raise Interrupted(number)
        if not self.asked:
            self.asked, self._since = number, time.monotonic()
            if self._says:  # not print, whose buffer may be in use
                os.write(2, b"\noctavo: saving a checkpoint after this step, then stopping; once more aborts.\n")
