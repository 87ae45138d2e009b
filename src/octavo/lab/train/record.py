"""`StoreReporter`: writes the events of a run to `run.sqlite`."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from octavo._util import config_reader
from octavo.lab.guard.alarms import GuardEvent
from octavo.lab.monitor.recorder import Recorder
from octavo.lab.monitor.store import RunReader
from octavo.lab.monitor.store.writer import RunWriter, outcome_of
from octavo.lab.monitor.system import environment
from octavo.lab.train import events
from octavo.lab.train.config import RunConfig
from octavo.lab.train.parallel import Launch


class StoreReporter:
    """Writes a run to its store in a background thread.

    Raises:
        StoreError: the store cannot be opened. Later failures are warnings.
    """

    def __init__(self, config: RunConfig, device: torch.device, *, done: int, events: int | None = None) -> None:
        """Open the store of a run that has made `done` steps; later steps in it are dropped.

        Args:
            events: what `flush` returned when the checkpoint was written: later events are dropped, too.
        """
        run = config.run
        self._device = device
        self._has_finished = False
        self._path = Path(run.out) / "run.sqlite"
        self._is_removed = False
        tracker = f"{run.tracker}:{run.tracker_tensors}" if run.tracker_tensors else run.tracker
        self._recorder = Recorder(
            RunWriter(run.out, keep_until=done or None, keep_events=events, overwrite=not done),
            gpu=(device.index or 0) if device.type == "cuda" else None,
            trackers=() if run.tracker == "none" else (tracker,),
            config=config_reader.to_dict(config),
        )

    def report(self, event: events.Event) -> None:
        """Write one event."""
        if not self._is_removed and not self._path.exists() and self._path.parent.exists():
            self._is_removed = True
            warnings.warn(f"{self._path}: was removed during the run; metrics.jsonl has the rest of it.", stacklevel=2)
        match event:
            case events.Started():
                self._start(event)
            case events.Logged():
                self._recorder.step(event.step, _numbers(event.record()))
            case events.TensorsMeasured():
                self._recorder.step(event.step, None, event.values, event.histograms)
            case events.TensorsChanged():
                self._recorder.document("plan", json.loads(event.plan.to_json()), step=event.step)
                self._recorder.tensors(event.rows)
            case events.GroupsMeasured():
                self._recorder.step(event.step, event.values)
            case events.Evaluated():
                self._recorder.step(event.step, _numbers(event.record()))
            case events.Switched():
                text = f"the FP8 model switches to recipe '{event.recipe}'"
                self._recorder.event(event.step, "precision", text, action=event.recipe)
            case GuardEvent():
                self._guard_event(event)
            case events.Saved():
                self._recorder.event(event.step, "checkpoint", f"checkpoint {event.path.name}")
            case events.Finished():
                self._has_finished = True
                self._recorder.document("summary", event.summary, step=event.summary["steps"])

    def flush(self) -> int | None:
        """Wait until all that was reported is stored; return the number of the last event, None if that failed."""
        return self._recorder.flush()

    def energy_kwh(self) -> float | None:
        """Return the energy of the run's GPU until now; None where it is not measured."""
        self._recorder.sample()
        self.flush()
        if not self._path.exists():
            return None
        with RunReader(self._path) as run:
            return run.energy_kwh()

    def close(self, error: BaseException | None = None) -> None:
        """Write the outcome and close the store."""
        error = None if self._has_finished else error
        self._recorder.close(*(outcome_of(error) if error or self._has_finished else ("interrupted", "")))

    def _start(self, event: events.Started) -> None:
        about = {
            "changed": changed(event.config),
            "device": event.device,
            "lanes": event.models,
            "parameters": event.parameters,
            **_mesh(event.config),
        }
        self._recorder.document("env", {**environment(self._device), **about}, step=event.first_step)
        self._recorder.document("corpus", event.corpus, step=event.first_step)
        if event.plan is not None:
            self._recorder.document("plan", json.loads(event.plan.to_json()), step=event.first_step)
        if event.tensors:
            self._recorder.tensors(event.tensors)

    def _guard_event(self, event: GuardEvent) -> None:
        self._recorder.guard_event(event)
        if event.rule == "shadow" and event.value is not None:
            self._recorder.step(event.step, {"shadow_gap_percent": event.value})


def changed(config: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of the settings that differ from their defaults, those without a default included."""
    found = []
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found += changed(value, f"{name}.")
        elif field.default_factory is not dataclasses.MISSING:
            found += [name] if value != field.default_factory() else []
        elif value != field.default:
            found.append(name)
    return found


def _mesh(config: RunConfig) -> dict[str, Any]:
    """Return the shape of the mesh: data, shard, and tensor and pipeline if they are split."""
    ranks = Launch.read().ranks
    sizes = config.parallel.sizes(ranks).items()
    return {"mesh": {name: n for name, n in sizes if n > 1 or name in ("data", "shard")}} if ranks > 1 else {}


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in record.items() if key != "step" and value is not None}
