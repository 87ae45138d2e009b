"""Weights & Biases, trackio and MLflow: each is sent a few aggregates a step, never a series a tensor.

Their pages and their loggers slow down with thousands of series; those are in the run store. Each package is imported
when it is asked for. One that is missing or fails is said, and the run goes on without it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from octavo.errors import ConfigError, did_you_mean
from octavo.monitor.aggregates import SCALARS
from octavo.monitor.background import Background

PROJECT = "octavo"
"""Project (MLflow: experiment) that runs are filed under."""


class Tracker(Protocol):
    """Where aggregates go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""
        ...

    def finish(self, outcome: str) -> None:
        """Say how the run ended, and close it."""
        ...


class _RunObject:
    """Weights & Biases and trackio: a run object with `log(values, step=)` and `finish`, usable in any thread."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, outcome: str) -> None:
        self._run.finish()


class _MlFlow:
    """MLflow by its client, whose calls do not depend on the thread as those of the module do."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self._mlflow = mlflow
        self._client = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(PROJECT)
        number = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
        self._id = self._client.create_run(number, run_name=name).info.run_id
        params = [mlflow.entities.Param(key, str(value)[:500]) for key, value in flat(config).items()]
        for begin in range(0, len(params), 100):
            self._client.log_batch(self._id, params=params[begin : begin + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        metrics = [self._mlflow.entities.Metric(key, value, now, step) for key, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, outcome: str) -> None:
        self._client.set_terminated(self._id, {"finished": "FINISHED", "interrupted": "KILLED"}.get(outcome, "FAILED"))


def _wandb(name: str, config: Mapping[str, Any]) -> Tracker:
    import wandb

    return _RunObject(wandb.init(project=PROJECT, name=name, config=dict(config)))


def _trackio(name: str, config: Mapping[str, Any]) -> Tracker:
    import trackio

    return _RunObject(
        trackio.init(project=PROJECT, name=name, config=dict(config), resume="allow", embed=False, auto_log_gpu=False)
    )


TRACKERS: dict[str, Callable[[str, Mapping[str, Any]], Tracker]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "mlflow": _MlFlow,
}
"""By name: what opens a run there, from its name and its configuration. A new one is a line here."""


class TrackerThread:
    """A tracker in a thread of its own: one that hangs or fails neither slows the run down nor stops it.

    Args:
        kind: a key of `TRACKERS`.
        say: called, in that thread, with a sentence for people when the tracker is missing or fails.

    Raises:
        ConfigError: there is no tracker of this name.
    """

    def __init__(self, kind: str, name: str, config: Mapping[str, Any], *, say: Callable[[str], None]) -> None:
        if kind not in TRACKERS:
            near = did_you_mean(kind, TRACKERS)
            raise ConfigError(f"there is no tracker '{kind}'.{near} Trackers: {', '.join(TRACKERS)}.")
        self.kind = kind
        self._say = say
        self._tracker: Tracker | None = None
        self._thread = Background(f"tracker {kind}", capacity=64, on_error=self._give_up)
        self._thread.submit(lambda: self._open(name, config), may_drop=False)

    @property
    def dropped(self) -> int:
        """Steps that were not sent because too many waited."""
        return self._thread.dropped

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Have the numbers of a step sent."""
        if values:
            self._thread.submit(lambda: self._with(lambda tracker: tracker.log(step, values)))

    def close(self, outcome: str) -> None:
        """Wait until what was taken is sent, at most a minute."""
        with contextlib.redirect_stdout(sys.stderr):
            self._thread.submit(lambda: self._with(lambda tracker: tracker.finish(outcome)), may_drop=False)
            self._thread.close()

    def _open(self, name: str, config: Mapping[str, Any]) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # stdout may be for JSON
            self._tracker = TRACKERS[self.kind](name, config)

    def _with(self, action: Callable[[Tracker], None]) -> None:
        if self._tracker is not None:
            action(self._tracker)

    def _give_up(self, error: Exception) -> None:
        """One that failed is not tried again: it would fail at every step."""
        self._tracker = None
        remedy = f"pip install {self.kind}" if isinstance(error, ImportError) else "the run store has everything"
        self._say(f"{self.kind} is sent nothing from here on ({type(error).__name__}: {error}); {remedy}.")


def worth_sending(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the scalars that a tracker is sent."""
    return {key: float(value) for key, value in scalars.items() if key.startswith(SCALARS)}


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping, keys with dots."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found
