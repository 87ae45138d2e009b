"""`octavo.Monitor`: a run store for a training loop of your own.

with octavo.Monitor(model, "runs/mine") as monitor:
    for batch in batches:
        loss = train_on(batch)
        monitor.step(loss=loss, lr=lr)
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.guard import Alarm, GuardConfig
from octavo.monitor.arriving import Arriving
from octavo.monitor.environment import environment
from octavo.monitor.recorder import Recorder
from octavo.monitor.rules import Rules
from octavo.monitor.source import Source, arrived, histograms_of, telemetry_of
from octavo.monitor.store.writer import outcome_of
from octavo.ranks import is_first_rank


class Monitor:
    """Writes `run.sqlite` in `directory` while a model trains. On ranks other than 0 it does nothing.

    Ranks are those of the process group; where there is none yet, those that `torchrun` has started.

    No call waits for the GPU or the disk: tensors are copied beside the training and written when they have arrived.

    Args:
        model: converted or not; without FP8 layers there is no telemetry of tensors, everything else is there.
        directory: of the run, made if it is not there.
        config: what decides the run, any nested mapping; for you, and for comparing runs.
        plan: what `octavo.convert` returned.
        trackers: `wandb`, `trackio`, `mlflow`; each is sent a few aggregates a step.
        resume_from: steps that were made before: the run in `directory` is continued, what it holds past them cut.
        overwrite: start over where there is a run already.
        telemetry: what measures the tensors; by default `octavo.nn.telemetry.Telemetry(model, histograms_every=100)`,
            None for nothing. By default the tensors of rank 0; one with a `group` is made on all ranks, and is of all.
        guard: limits of what is noted as an event: NaN, spikes of `loss` and `gradient_norm`, weights that jump,
            tensors that saturate or are flushed. To let guardrails act, see `octavo.guard.Loop`.

    Raises:
        StoreError: `directory` cannot be written, or holds a run and neither `resume_from` nor `overwrite` is given.
        ConfigError: there is no tracker of a name, or `guard` is to act.
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
        overwrite: bool = False,
        telemetry: Source | str | None = "auto",
        guard: GuardConfig | None = None,
    ) -> None:
        self.done = resume_from or 0
        """Steps made."""
        self._waiting: deque[Arriving] = deque()
        self._recorder: Recorder | None = None
        self._source: Source | None = None if isinstance(telemetry, str) else telemetry  # others too must keep it
        if not is_first_rank():
            return
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._recorder = Recorder(
            directory,
            keep_until=resume_from,
            overwrite=overwrite,
            gpu=(device.index or 0) if device.type == "cuda" else None,
            trackers=trackers,
            config=config or {},
        )
        self._describe(model, device, plan)
        if isinstance(telemetry, str):
            self._source = telemetry_of(model, histograms_every=100)
        if self._source is not None:
            self._source.done = self.done
            self._recorder.tensors(self._source.rows)
        rows = () if self._source is None else self._source.rows
        self._rules = Rules(guard or GuardConfig(), rows, self._alarmed)

    def step(self, step: int | None = None, /, **scalars: float | Tensor) -> None:
        """Note that a step was made, and what it measured: numbers, or tensors of one element on any device.

        Call it after the optimizer's step. `step` is the number of those made; by default one more than before.

        Raises:
            ConfigError: a tensor has more than one element, or `step` is not past the one before.
        """
        number = self.done + 1 if step is None else step
        if number <= self.done:
            raise ConfigError(f"monitor.step({number}): step {self.done} was noted before; steps grow.")
        self.done = number
        if self._recorder is None:
            return
        self._waiting.append(Arriving(number, scalars))
        self._write_arrived()
        self._write_tensors(self._recorder)

    def event(self, text: str, *, rule: str = "user", **details: Any) -> None:
        """Note that something happened. `details`: level (`info`, `warning`, `error`), layer, role, value, limit,
        action.
        """  # noqa: D205
        if self._recorder is not None:
            self._recorder.event(self.done, rule, text, **details)

    def close(self, error: BaseException | None = None) -> None:
        """Write what still waits, and how the run ended. A second call does nothing."""
        recorder = self._recorder
        if recorder is None:
            return
        while self._waiting:
            arriving = self._waiting.popleft()
            self._write(recorder, arriving)
        if self._source is not None:
            self._source.wait()
            self._write_tensors(recorder)
            self._source.detach()
        self._rules.close()
        self._recorder = None
        recorder.close(*outcome_of(error))

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def _write_arrived(self) -> None:
        while self._recorder is not None and self._waiting and self._waiting[0].has_arrived():
            self._write(self._recorder, self._waiting.popleft())

    def _write(self, recorder: Recorder, arriving: Arriving) -> None:
        values = arriving.read()
        recorder.step(arriving.step, values)
        self._rules.scalars(arriving.step, values)

    def _write_tensors(self, recorder: Recorder) -> None:
        for measured, values in arrived(self._source):
            recorder.step(measured, None, values, histograms_of(self._source))
            self._rules.tensors(measured, values)

    def _alarmed(self, alarm: Alarm) -> None:
        where = {"layer": alarm.layer or None, "role": alarm.role or None}
        level = "error" if alarm.rule == "nonfinite" else "warning"
        if self._recorder is not None:
            details = {"value": alarm.value, "limit": alarm.limit, "level": level, **where}
            self._recorder.event(alarm.step, alarm.rule, str(alarm), **details)

    def _describe(self, model: nn.Module, device: torch.device, plan: Any) -> None:
        if self._recorder is None:
            return
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._recorder.document("env", {**environment(device), "parameters": parameters}, step=self.done)
        if plan is not None:
            self._recorder.document("plan", json.loads(plan.to_json()), step=self.done)
