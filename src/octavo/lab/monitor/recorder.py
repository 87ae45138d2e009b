"""The recorder of a training run: the run store, system readings and trackers, all written in the background."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo._util.terminal import quantity
from octavo.kernels.sample import LOWEST
from octavo.lab.guard import GuardEvent
from octavo.lab.monitor.background import Background
from octavo.lab.monitor.store import STATS, RunWriter, TensorRow
from octavo.lab.monitor.store.writer import Outcome
from octavo.lab.monitor.system import SystemProbe
from octavo.lab.monitor.trackers import TrackerThread, aggregates, all_statistics, tracked_scalars

CAPACITY = 256
"""Steps that may be queued; further ones are dropped, counted and reported."""


class Recorder:
    """Records a run without blocking it.

    Args:
        writer: of the run's store; the recorder closes it.
        gpu: index of the CUDA device whose power and memory are measured; None on a CPU.
        system_every: seconds between two system readings.
        trackers: names in `TRACKERS`, to be sent aggregates, and with `:N` all statistics every N steps.
        config: stored as the document `config`, and sent to the trackers.

    Raises:
        ConfigError: an unknown tracker. Errors of the store are warnings, and the run continues.
    """

    def __init__(
        self,
        writer: RunWriter,
        *,
        gpu: int | None = None,
        system_every: float = 5.0,
        trackers: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._writer = writer
        self._probe = SystemProbe(gpu)
        self._rows: list[tuple[str, str]] = []
        self._newest: tuple[NDArray[np.float32], list[tuple[str, str]]] | None = None
        """The newest snapshot and its row labels, for the trackers."""
        self._step = writer.first_step
        self._first_failure = ""
        self._store = Background(
            "run store", capacity=CAPACITY, idle=self._sample, every=system_every, on_error=self._write_failed
        )
        if config is not None:
            self.document("config", config)
        if self._probe.missing and not writer.first_step:  # a run that goes on has the event
            self.event(self._step, "system", self._probe.missing)
        name = self._writer.path.parent.resolve().name
        self._trackers = [TrackerThread(kind, name, config or {}, on_failure=self._tracker_failed) for kind in trackers]
        self.sample()

    @property
    def dropped(self) -> int:
        """Number of steps not written because the queue was full."""
        return self._store.dropped

    def document(self, name: str, content: Mapping[str, Any], *, step: int = 0) -> None:
        """Write `config`, `env`, `plan`, `corpus` or `summary`."""
        self._store.submit(lambda: self._writer.write_document(name, content, step=step), may_drop=False)

    def tensors(self, rows: Sequence[TensorRow | tuple[Any, ...]]) -> None:
        """Set the row labels of the following snapshots."""

        def label() -> None:
            self._writer.set_tensors(rows)
            self._rows = [(row[0], row[1]) for row in rows]

        self._store.submit(label, may_drop=False)

    def step(
        self,
        step: int,
        scalars: Mapping[str, float] | None = None,
        snapshot: NDArray[np.float32] | None = None,
        histograms: NDArray[np.float32] | None = None,
    ) -> None:
        """Write the measurements of a step; histograms as of `Telemetry`. Arrays must not change afterwards."""
        self._step, now = max(self._step, step), time.time()
        values = dict(scalars or {})

        def write() -> None:
            self._writer.write_step(step, values, snapshot, t=now)
            if histograms is not None:
                self._writer.write_histograms(step, LOWEST, histograms)
            if self._trackers:
                self._track(step, values, snapshot)

        if not self._store.submit(write) and self.dropped == 1:
            missing = "the disk is too slow; steps are missing from the run store. Training is not slowed."
            warnings.warn(f"{self._writer.path}: {missing}", stacklevel=2)

    def event(self, step: int, rule: str, text: str, **details: Any) -> None:
        """Write an event; `details` as of `RunWriter.write_event`."""
        now = time.time()
        self._store.submit(lambda: self._writer.write_event(step, rule, text, **{"t": now, **details}), may_drop=False)

    def guard_event(self, event: GuardEvent) -> None:
        """Write an event of guardrails; if it rolled the run back, delete the measurements of the steps undone.

        Events of these steps stay, since they give the reason.
        """
        if (back_to := event.back_to) is not None:
            self._step = back_to
            self._store.submit(lambda: self._writer.cut(back_to, keep_events=True), may_drop=False)
        text = f"{event.cause}: {event.text}" if event.cause else event.text
        where = {"layer": event.layer or None, "role": event.role or None, "action": event.action or None}
        numbers = {"level": event.level, "value": event.value, "limit": event.limit}
        self.event(event.step, event.rule, text, **numbers, **where)

    def sample(self) -> None:
        """Take a reading of the machine now, in addition to the regular ones."""
        self._store.submit(self._sample, may_drop=False)

    def flush(self) -> int | None:
        """Wait until all that was recorded is committed; return the number of the last event, None if that failed."""
        newest: list[int] = []
        self._store.submit(lambda: newest.append(self._writer.newest_event()), may_drop=False)
        self._store.wait()
        return newest[0] if newest else None

    def close(self, outcome: Outcome = "finished", text: str = "") -> None:
        """Wait until everything is written, record dropped steps, and close the file. Idempotent."""
        self._store.wait()  # what has failed is known then; and the store thread forwards to the trackers
        for tracker in self._trackers:
            tracker.close(outcome)
        if self.dropped:
            lost = f"{quantity(self.dropped, 'step')} lost, not written: the disk was too slow"
            self.event(self._step, "store", lost, level="warning", value=self.dropped)
        failed = self._store.failed
        lost = f"{quantity(failed, 'write')} failed, so that measurements are missing; the first: {self._first_failure}"
        if failed:
            self.event(self._step, "store", lost, level="error", value=failed)
        self.sample()
        self._store.close(lambda: self._writer.close(outcome, text))
        if failed:
            warnings.warn(f"{self._writer.path}: {lost}", stacklevel=2)

    def _track(self, step: int, values: Mapping[str, float], snapshot: NDArray[np.float32] | None) -> None:
        """Send a step to the trackers, which need steps in order: the newest snapshot goes with the next scalars."""
        if snapshot is not None:
            self._newest = snapshot, self._rows
        if not values:
            return
        sent = tracked_scalars(values)
        if self._newest is not None:
            sent |= aggregates(self._newest[0], STATS)
        for tracker in self._trackers:
            if self._newest is not None and tracker.sends_tensors(step):
                tracker.log(step, sent | all_statistics(*self._newest, STATS))
            else:
                tracker.log(step, sent)

    def _write_failed(self, error: Exception) -> None:
        if not self._first_failure:
            self._first_failure = str(error)
            warnings.warn(
                f"run store: {error} Later measurements are still written; what is missing is recorded as an event.",
                stacklevel=2,
            )

    def _sample(self) -> None:
        self._writer.write_system(self._probe.sample())

    def _tracker_failed(self, text: str) -> None:
        warnings.warn(text, stacklevel=2)
        self.event(self._step, "tracker", text, level="warning")
