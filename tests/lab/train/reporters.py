"""A reporter that keeps the events of a run, and may act at one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.lab.train.events import Event


def interrupt() -> None:
    raise KeyboardInterrupt


class Listener:
    """Keeps events; does `action` at the event of a kind that is the `count`-th, or that of a step."""

    def __init__(
        self, kind: type | None = None, action: Callable[[], object] = interrupt, *, step: int = 0, count: int = 1
    ) -> None:
        self.events: list[Event] = []
        self.closed = 0
        self._kind, self._action, self._step, self._count = kind, action, step, count

    def report(self, event: Event) -> None:
        self.events.append(event)
        if self._kind is None or not isinstance(event, self._kind):
            return
        found = self.of(self._kind)
        if event.step == self._step if self._step else len(found) == self._count:  # type: ignore[union-attr]
            self._action()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def close(self, error: BaseException | None = None) -> None:
        self.closed += 1
