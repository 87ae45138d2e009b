"""Weights & Biases, trackio and MLflow: each receives a few aggregates per step, and on request a series per tensor.

Their pages and loggers slow down with thousands of series: `mlflow:100` sends those every 100 steps only. Packages are
imported on request. A missing package or a failing tracker causes a warning, and the run continues without it.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError, did_you_mean
from octavo.lab.monitor.background import Background
from octavo.lab.monitor.store.reader import flat

AGGREGATES = {
    "fp8/flushed_max": "largest share of elements flushed to zero, of any tensor",
    "fp8/subnormal_max": "largest share of subnormal codes",
    "fp8/saturated_max": "largest share of saturated elements",
    "fp8/nonfinite_tensors": "number of tensors with a NaN or an infinity",
    "fp8/amax_max": "largest magnitude",
    "fp8/scale_log2_min": "log2 of the smallest scale",
    "fp8/scale_log2_max": "log2 of the largest scale",
    "fp8/kurtosis_max": "largest kurtosis",
    "fp8/sqnr_min": "lowest signal-to-quantisation-noise ratio in dB, in steps with histograms",
    "fp8/tensors": "number of tensors measured",
}
"""Aggregates of a snapshot, with their meaning."""
SCALARS = ("loss", "gap_percent", "gradient_norm", "lr", "tokens_per_second", "heldout_loss", "loss_scale")
"""Prefixes of the scalars sent to trackers."""


def aggregates(values: NDArray[np.float32], stats: Sequence[str]) -> dict[str, float]:
    """Return the aggregates of a snapshot (tensors, statistics) that have measurements."""
    columns = {name: values[:, index] for index, name in enumerate(stats)}
    scales = columns["scale"][columns["scale"] > 0]
    found = {f"fp8/{name}_max": _largest(columns[name]) for name in ("flushed", "subnormal", "saturated", "amax")}
    found["fp8/kurtosis_max"] = _largest(columns["kurtosis"])
    found["fp8/sqnr_min"] = -_largest(-columns["sqnr"]) if "sqnr" in columns else math.nan
    found["fp8/nonfinite_tensors"] = float((columns["nonfinite"] > 0).sum())
    found["fp8/scale_log2_min"] = math.log2(scales.min()) if len(scales) else math.nan
    found["fp8/scale_log2_max"] = math.log2(scales.max()) if len(scales) else math.nan
    found["fp8/tensors"] = float((~np.isnan(columns["amax"])).sum())
    return {key: found[key] for key in AGGREGATES if math.isfinite(found[key])}


def all_statistics(
    values: NDArray[np.float32], rows: Sequence[tuple[str, str]], stats: Sequence[str]
) -> dict[str, float]:
    """Return every finite statistic of a snapshot (tensors, statistics) by `tensors/LAYER/ROLE/STATISTIC`."""
    places = np.argwhere(np.isfinite(values)).tolist()
    return {f"tensors/{'/'.join(rows[row])}/{stats[column]}": float(values[row, column]) for row, column in places}


def _largest(column: NDArray[np.float32]) -> float:
    return float(np.fmax.reduce(column)) if len(column) else math.nan


PROJECT = "octavo"
"""Project of the runs (MLflow: experiment)."""


class Tracker(Protocol):
    """Destination of aggregates."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the numbers of a step."""

    def finish(self, outcome: str) -> None:
        """Report the outcome and close the run."""


class _RunObject:
    """Run object of Weights & Biases or trackio: `log(values, step=)` and `finish`, thread-safe."""

    def __init__(self, package: str, name: str, config: Mapping[str, Any], **options: Any) -> None:
        self._run = import_module(package).init(project=PROJECT, name=name, config=dict(config), **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, outcome: str) -> None:
        self._run.finish()


class _MlFlow:
    """MLflow by its client, which unlike the module's functions is independent of the thread."""

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
        for begin in range(0, len(metrics), 1000):  # the server's limit
            self._client.log_batch(self._id, metrics=metrics[begin : begin + 1000])

    def finish(self, outcome: str) -> None:
        self._client.set_terminated(self._id, {"finished": "FINISHED", "interrupted": "KILLED"}.get(outcome, "FAILED"))


TRACKERS: dict[str, Callable[[str, Mapping[str, Any]], Tracker]] = {
    "wandb": partial(_RunObject, "wandb"),
    "trackio": partial(_RunObject, "trackio", resume="allow", embed=False, auto_log_gpu=False),
    "mlflow": _MlFlow,
}
"""Functions that open a run, from its name and configuration. To add a tracker, add a line."""


def parsed(tracker: str) -> tuple[str, int]:
    """Return the key in `TRACKERS` and the steps between statistics of tensors, 0 for none, of `KEY` or `KEY:N`.

    Raises:
        ConfigError: an unknown tracker, or a number of steps that is not positive.
    """
    kind, colon, every = tracker.partition(":")
    if colon and not (every.isdigit() and int(every)):
        raise ConfigError(f"tracker '{tracker}': after the colon is a positive number of steps.")
    if kind not in TRACKERS:
        near = did_you_mean(kind, TRACKERS)
        raise ConfigError(f"unknown tracker '{kind}'.{near} Known: {', '.join(TRACKERS)}.")
    return kind, int(every or 0)


class TrackerThread:
    """A tracker in its own thread, so that a hanging or failing one neither slows nor stops the run.

    Args:
        kind: a key of `TRACKERS`; with `:N`, all statistics of tensors are sent every N steps.
        on_failure: called in that thread with a message if the tracker is missing or fails.

    Raises:
        ConfigError: an unknown tracker, or a number of steps that is not positive.
    """

    def __init__(self, kind: str, name: str, config: Mapping[str, Any], *, on_failure: Callable[[str], None]) -> None:
        self.kind, self._every = parsed(kind)
        self._due = 0
        self._on_failure = on_failure
        self._tracker: Tracker | None = None
        self._thread = Background(f"tracker {kind}", capacity=64, on_error=self._give_up)
        self._thread.submit(lambda: self._open(name, config), may_drop=False)

    def sends_tensors(self, step: int) -> bool:
        """Return True, and count it, if all statistics of tensors are to be sent with this step."""
        is_due = self._every > 0 and step >= self._due
        self._due = step + self._every if is_due else self._due
        return is_due

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers of a step."""
        if values:
            self._thread.submit(lambda: self._with(lambda tracker: tracker.log(step, values)))

    def close(self, outcome: str) -> None:
        """Wait until queued steps are sent, at most a minute."""
        with contextlib.redirect_stdout(sys.stderr):
            self._thread.submit(lambda: self._with(lambda tracker: tracker.finish(outcome)), may_drop=False)
            self._thread.close()

    def _open(self, name: str, config: Mapping[str, Any]) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # stdout may carry JSON
            self._tracker = TRACKERS[self.kind](name, config)

    def _with(self, action: Callable[[Tracker], None]) -> None:
        if self._tracker is not None:
            action(self._tracker)

    def _give_up(self, error: Exception) -> None:
        """Disable a tracker that failed: it would fail at every step."""
        self._tracker = None
        remedy = f"pip install {self.kind}" if isinstance(error, ImportError) else "the run store has all data"
        self._on_failure(f"{self.kind} is disabled ({type(error).__name__}: {error}); {remedy}.")


def tracked_scalars(scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the scalars sent to trackers."""
    return {key: float(value) for key, value in scalars.items() if key.startswith(SCALARS)}
