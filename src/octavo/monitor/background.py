"""A thread that does what takes time, so that training never waits: for the disk, for a tracker on the network."""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable

Action = Callable[[], object]
_STOP = object()


class Background:
    """Carries out actions one after another in a thread of its own.

    An action that fails is counted and handed to `on_error`; those after it are carried out all the same.

    Args:
        name: of the thread, and in what is said.
        capacity: actions that may wait. One that may be dropped is dropped when so many do.
        idle: called in the thread about every `every` seconds, also while actions wait.
        on_error: called in the thread with what an action raised; by default the first is said as a warning.
    """

    def __init__(
        self,
        name: str,
        *,
        capacity: int = 256,
        idle: Action | None = None,
        every: float = 5.0,
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        self.name = name
        self.dropped = 0
        """Actions that were not carried out because too many waited."""
        self.failed = 0
        """Actions that raised."""
        self._capacity = capacity
        self._on_error = on_error or self._warn_once
        self._idle, self._every = idle, every
        self._waiting: queue.SimpleQueue[Action | object] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, action: Action, *, may_drop: bool = True) -> bool:
        """Have an action carried out, and return at once. Returns whether it was taken; after `close` none is."""
        if self._thread is None:
            return False
        if may_drop and self._waiting.qsize() >= self._capacity:
            self.dropped += 1
            return False
        self._waiting.put(action)
        return True

    def wait(self, *, timeout: float = 60.0) -> None:
        """Wait until what was taken so far is done, at most so many seconds."""
        done = threading.Event()
        if self.submit(done.set, may_drop=False):
            done.wait(timeout)

    def close(self, *, timeout: float = 60.0) -> None:
        """Wait until all is done, at most so many seconds, and stop. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._waiting.put(_STOP)
        thread.join(timeout)
        if thread.is_alive():
            warnings.warn(f"{self.name}: not done after {timeout:.0f} s; what still waits is lost.", stacklevel=2)

    def _run(self) -> None:
        due = time.monotonic() + self._every
        while True:
            action = self._next(due)
            if action is _STOP:
                return
            if callable(action):
                self._carry_out(action)
            if self._idle is not None and time.monotonic() >= due:
                due = time.monotonic() + self._every
                self._carry_out(self._idle)

    def _next(self, due: float) -> Action | object | None:
        """Return what comes next, None where nothing has come until something else is due."""
        try:
            return self._waiting.get(timeout=None if self._idle is None else max(due - time.monotonic(), 0.0))
        except queue.Empty:
            return None

    def _carry_out(self, action: Action) -> None:
        try:
            action()
        except Exception as error:  # the run goes on whatever a disk or a network does
            self.failed += 1
            self._on_error(error)

    def _warn_once(self, error: Exception) -> None:
        if self.failed == 1:
            warnings.warn(f"{self.name}: {error} The run goes on without it.", stacklevel=2)
