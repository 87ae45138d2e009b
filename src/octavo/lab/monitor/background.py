"""A thread for slow actions, so that training never waits for a disk or a network."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
import warnings
from collections.abc import Callable

Action = Callable[[], object]


class Background:
    """Runs actions in order in its own thread.

    A failed action is counted and reported to `on_error`; later actions still run.

    Args:
        name: name of the thread, used in warnings.
        capacity: maximum number of queued actions; beyond it, actions that may be dropped are.
        idle: called in the thread about every `every` seconds, also while actions are queued.
        on_error: called in the thread with an action's exception; by default the first one is issued as a warning.
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
        """Number of actions dropped because the queue was full."""
        self.failed = 0
        """Number of actions that raised an exception."""
        self._capacity = capacity
        self._on_error = on_error or self._warn_once
        self._idle, self._every = idle, every
        self._queue: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._is_done = False
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, action: Action, *, may_drop: bool = True) -> bool:
        """Queue an action and return at once. Returns False if it was dropped, or after `close`."""
        if self._thread is None:
            return False
        if may_drop and self._queue.qsize() >= self._capacity:
            self.dropped += 1
            return False
        self._queue.put(action)
        return True

    def wait(self, *, timeout: float = 60.0) -> None:
        """Wait until the actions queued so far are done, at most `timeout` seconds."""
        done = threading.Event()
        if self.submit(done.set, may_drop=False):
            done.wait(timeout)

    def close(self, last: Action = lambda: None, *, timeout: float = 60.0) -> None:
        """Wait until all actions are done, at most `timeout` seconds, and stop. Idempotent.

        Args:
            last: a last action; nothing is called after it.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return

        def end() -> None:
            self._is_done = True
            last()

        self._queue.put(end)
        thread.join(timeout)
        if thread.is_alive():
            warnings.warn(f"{self.name}: not done after {timeout:.0f} s; the remaining actions are lost.", stacklevel=2)

    def _run(self) -> None:
        due = time.monotonic() + self._every
        while not self._is_done:
            with contextlib.suppress(queue.Empty):  # the idle call is due
                self._execute(self._queue.get(timeout=None if self._idle is None else max(due - time.monotonic(), 0.0)))
            if self._idle is not None and time.monotonic() >= due and not self._is_done:
                due = time.monotonic() + self._every
                self._execute(self._idle)

    def _execute(self, action: Action) -> None:
        try:
            action()
        except Exception as error:  # a disk or network error must not stop the run
            self.failed += 1
            try:
                self._on_error(error)
            except Exception:  # a warning, where warnings are errors: the actions that follow still run
                traceback.print_exc()

    def _warn_once(self, error: Exception) -> None:
        if self.failed == 1:
            warnings.warn(f"{self.name}: {error} What follows is still tried.", stacklevel=2)
