"""`octavo.Monitor`: a run store for a custom training loop.

with octavo.Monitor(model, "runs/mine") as monitor:
    for batch in batches:
        loss = train_on(batch)
        monitor.step(loss=loss, lr=lr)
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo._util.config_reader import shown
from octavo._util.dist import is_first_rank
from octavo.errors import ConfigError, StoreError, UnsupportedError
from octavo.lab.guard import GuardConfig, GuardEvent, Observation
from octavo.lab.guard.rules import AlarmRules
from octavo.lab.monitor.measurements import AsyncScalars, telemetry_of
from octavo.lab.monitor.recorder import Recorder
from octavo.lab.monitor.store.writer import RunWriter, outcome_of
from octavo.lab.monitor.system import environment
from octavo.lab.monitor.trackers import parsed
from octavo.nn.telemetry import Telemetry

CHECKED = ("loss", "loss_fp8"), ("gradient_norm", "grad_norm"), ("lr", "learning_rate")
"""Names of the scalars that alarms check, the first one present of each; others are only stored."""


def check_mode(config: GuardConfig) -> None:
    """Check that guardrails are not asked to act.

    Raises:
        ConfigError: the mode is `act`.
    """
    if config.mode == "act":
        raise ConfigError(
            "octavo.Monitor: guardrails can only watch here. To act, use octavo.lab.guard.Loop or `octavo train`."
        )


_EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "model": ("a torch.nn.Module", lambda x: isinstance(x, nn.Module)),
    "config": ("a mapping", lambda x: x is None or isinstance(x, Mapping)),
    "plan": ("the plan that octavo.convert returned", lambda x: x is None or hasattr(x, "to_json")),
    "trackers": ("a list of names, such as ['wandb']", lambda x: not isinstance(x, str) and isinstance(x, Sequence)),
    "resume_from": ("a number of steps", lambda x: x is None or (type(x) is int and x >= 0)),
    "telemetry": ("an octavo.nn.telemetry.Telemetry, or None for none", lambda x: x in (None, "auto") or _measures(x)),
    "guard": ("an octavo.lab.guard.GuardConfig", lambda x: x is None or isinstance(x, GuardConfig)),
}
"""Argument of `Monitor` -> what it is, and whether a value is one."""


def _measures(source: Any) -> bool:
    return all(hasattr(source, name) for name in ("rows", "snapshot", "detach"))


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        expected, fits = _EXPECTED[name]
        if not fits(value):
            raise ConfigError(f"octavo.Monitor: {name}: expected {expected}, got {shown(value)}.")


class MonitorAlarms:
    """Checks the guardrails for each step once its scalars and tensors have arrived, in order.

    Args:
        config: limits. The mode `act` is not supported here.
        rows: row labels of the tensors; empty without telemetry.
        on_event: called with the event of each alarm.

    Raises:
        ConfigError: the mode is `act`.
    """

    def __init__(
        self, config: GuardConfig, rows: Sequence[tuple[Any, ...]], on_event: Callable[[GuardEvent], None]
    ) -> None:
        check_mode(config)
        self._config, self._on_event = config, on_event
        self._rules, self._rows = AlarmRules(config), rows
        self._scalars: dict[int, Mapping[str, float]] = {}
        self._tensors: dict[int, NDArray[np.float32]] = {}
        self._newest = 0 if rows else math.inf

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the scalars of a step."""
        self._scalars[step] = values
        self._check(self._newest)

    def tensors(self, step: int, values: NDArray[np.float32]) -> None:
        """Add the tensors of a step; none of earlier steps may follow."""
        self._newest = step
        self._tensors[step] = values
        self._check(step)

    def close(self) -> None:
        """Check the remaining steps."""
        self._check(math.inf)

    def _check(self, complete: float) -> None:
        """Check the steps up to `complete`, the last one whose tensors have arrived."""
        for step in sorted(step for step in self._scalars if step <= complete):
            scalars, values = self._scalars.pop(step), self._tensors.pop(step, None)
            if self._config.mode == "watch":
                named = [[scalars[name] for name in names if name in scalars] for names in CHECKED]
                loss, norm, lr = (given[0] if given else 0.0 for given in named)  # 0 breaks no rule
                seen = Observation(step, loss, norm, lr, values, self._rows)
                alarm = self._rules.check(seen)
                for each in ([] if alarm is None else [alarm]) + self._rules.over_budget(seen):
                    if (event := self._rules.report(each)) is not None:
                        self._on_event(event)
        if self._scalars:
            self._tensors = {step: values for step, values in self._tensors.items() if step >= min(self._scalars)}


class Monitor:
    """Writes `run.sqlite` in `directory` while a model trains. Does nothing on ranks other than 0.

    Ranks are those of the process group, or before its creation those that `torchrun` has started.

    No call waits for the GPU or the disk: tensors are copied asynchronously and written when they have arrived.

    Args:
        model: converted or not; without FP8 layers, everything but tensor telemetry is recorded.
        directory: directory of the run, created if missing.
        config: settings of the run as a nested mapping, stored for reference and for comparing runs.
        plan: return value of `octavo.convert`.
        trackers: `wandb`, `trackio`, `mlflow`; each receives a few aggregates per step, and as
            `mlflow:100` all statistics of tensors every 100 steps.
        resume_from: number of steps completed: continues the run in `directory`, deleting its records past them; 0
            replaces the run.
        telemetry: source of tensor statistics; by default `octavo.nn.telemetry.Telemetry(model, histograms_every=100)`
            on rank 0, None for none. For statistics over all ranks, create one with a `group` on all ranks.
        guard: limits beyond which an event is recorded: NaN, spikes of `loss` and `gradient_norm`, jumps of weights,
            saturated or flushed tensors. To let guardrails act, see `octavo.lab.guard.Loop`.

    Raises:
        StoreError: `directory` cannot be written, or contains a run and `resume_from` is not given.
        ConfigError: an argument of another type, an unknown tracker, or a `guard` in mode `act`.
    """

    def __init__(
        self,
        model: nn.Module,
        directory: str | Path,
        *,
        config: Mapping[str, Any] | None = None,
        plan: Any = None,
        trackers: Sequence[str] = (),
        resume_from: int | None = None,
        telemetry: Telemetry | str | None = "auto",
        guard: GuardConfig | None = None,
    ) -> None:
        self.done = resume_from or 0
        """Steps completed."""
        self._pending: deque[AsyncScalars] = deque()
        self._recorder: Recorder | None = None
        _check_arguments(
            {"model": model, "config": config, "plan": plan, "trackers": trackers, "resume_from": resume_from}
            | {"telemetry": telemetry, "guard": guard}
        )
        guard = guard or GuardConfig()
        check_mode(guard)  # before anything is measured, and before a file is written or replaced
        for tracker in trackers:
            parsed(tracker)
        self._source = None if isinstance(telemetry, str) else telemetry  # a group needs it on every rank
        if isinstance(telemetry, str) and is_first_rank():
            self._source = telemetry_of(model, histograms_every=100)
        if self._source is not None:
            self._source.done = self.done
        if not is_first_rank():
            return
        rows = () if self._source is None else self._source.rows
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        try:
            writer = RunWriter(directory, keep_until=resume_from or None, overwrite=resume_from == 0)
        except StoreError:
            if self._source is not None and isinstance(telemetry, str):
                self._source.detach()
            raise
        gpu = (device.index or 0) if device.type == "cuda" else None
        self._recorder = recorder = Recorder(writer, gpu=gpu, trackers=trackers, config=config or {})
        parameters = sum(parameter.numel() for parameter in model.parameters())
        recorder.document("env", {**environment(device), "parameters": parameters}, step=self.done)
        if plan is not None:
            recorder.document("plan", json.loads(plan.to_json()), step=self.done)
        if self._source is not None:
            recorder.tensors(rows)
        self._alarms = MonitorAlarms(guard, rows, recorder.guard_event)

    def step(self, step: int | None = None, /, **scalars: float | Tensor) -> None:
        """Record a step with its scalars: numbers, or tensors of one element on any device.

        Call it after the optimizer's step. `step` is the number of steps completed, by default one more than before.

        Raises:
            ConfigError: a tensor has more than one element, or `step` does not exceed the previous one.
        """
        number = self.done + 1 if step is None else step
        if number <= self.done:
            raise ConfigError(f"monitor.step({number}): step {self.done} is already recorded; steps must increase.")
        if self._recorder is None:
            self.done = number
            return
        self._pending.append(AsyncScalars(number, scalars))  # first: a step whose scalars it refuses is not counted
        self.done = number
        while self._pending and self._pending[0].has_arrived():
            self._write(self._recorder, self._pending.popleft())
        self._write_tensors(self._recorder)

    def event(self, text: str, *, rule: str = "user", **details: Any) -> None:
        """Record an event. `details`: level (`info`, `warning`, `error`), layer, role, value, limit, action."""
        if self._recorder is not None:
            self._recorder.event(self.done, rule, text, **details)

    def guard_event(self, event: GuardEvent) -> None:
        """Record an event of guardrails, and forget the steps that they rolled back: pass it to `Loop` as `on_event`.

        The model is then measured by the `Loop`: create this monitor with `telemetry=None`.
        """
        if event.back_to is not None and event.back_to < self.done:
            self.done = event.back_to
            self._pending.clear()
        if self._recorder is not None:
            self._recorder.guard_event(event)

    def close(self, error: BaseException | None = None) -> None:
        """Write pending data and the outcome of the run. Idempotent."""
        recorder, self._recorder = self._recorder, None
        try:
            if self._source is not None:
                self._source.wait()
            if recorder is not None:
                while self._pending:
                    self._write(recorder, self._pending.popleft())
                self._write_tensors(recorder)
                self._alarms.close()
        except BaseException as failure:  # of the device, or of another rank
            error = error or failure
            raise
        finally:
            if self._source is not None:
                self._source.detach()
            self._source = None
            if recorder is not None:
                recorder.close(*outcome_of(error))

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "Monitor: cannot be copied or pickled: it is the only writer of its directory. Make one for the other run."
        )

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def _write(self, recorder: Recorder, scalars: AsyncScalars) -> None:
        values = scalars.read()
        recorder.step(scalars.step, values)
        self._alarms.scalars(scalars.step, values)

    def _write_tensors(self, recorder: Recorder) -> None:
        while self._source is not None and (arrived := self._source.snapshot()) is not None:
            step, values = arrived
            recorder.step(step, None, values, self._source.histograms)
            self._alarms.tensors(step, values)
