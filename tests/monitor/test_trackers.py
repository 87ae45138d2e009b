"""Trackers, and the aggregates they receive."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.monitor.store import STATS
from octavo.monitor.trackers import AGGREGATES, TrackerThread, aggregates, flat, tracked_scalars

CONFIG = {"run": {"lr": 1e-3, "out": "x" * 600}, "model": {}}


class Run:
    """The run object of Weights & Biases and of trackio."""

    def __init__(self, calls: list[Any], **settings: Any) -> None:
        self.calls = calls
        calls.append(("init", settings))

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("log", step, values))

    def finish(self) -> None:
        self.calls.append(("finish",))


def fake_mlflow(calls: list[Any]) -> SimpleNamespace:
    def create_run(experiment: str, run_name: str) -> SimpleNamespace:
        calls.append(("init", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="id"))

    client = SimpleNamespace(
        get_experiment_by_name=lambda name: None,
        create_experiment=lambda name: f"number of {name}",
        create_run=create_run,
        log_batch=lambda run, **what: calls.append(("batch", run, what)),
        set_terminated=lambda run, status: calls.append(("finish", run, status)),
    )
    entities = SimpleNamespace(Param=lambda *p: p, Metric=lambda key, value, t, step: (key, value, step))
    return SimpleNamespace(MlflowClient=lambda: client, entities=entities)


def send(kind: str, said: list[str]) -> None:
    tracker = TrackerThread(kind, "name", CONFIG, on_failure=said.append)
    tracker.log(1, {"loss": 2.0})
    tracker.log(2, {})
    tracker.log(3, {"loss": 1.0})
    tracker.close("interrupted")


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_run_objects(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, kind, SimpleNamespace(init=lambda **settings: Run(calls, **settings)))
    send(kind, said := [])
    settings = calls[0][1]
    assert (settings["project"], settings["name"], settings["config"]) == ("octavo", "name", CONFIG)
    assert calls[1:] == [("log", 1, {"loss": 2.0}), ("log", 3, {"loss": 1.0}), ("finish",)]
    assert said == []


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "mlflow", fake_mlflow(calls))
    send("mlflow", said := [])
    assert calls == [
        ("init", "number of octavo", "name"),
        ("batch", "id", {"params": [("run.lr", "0.001"), ("run.out", "x" * 500), ("model", "{}")]}),
        ("batch", "id", {"metrics": [("loss", 2.0, 1)]}),
        ("batch", "id", {"metrics": [("loss", 1.0, 3)]}),
        ("finish", "id", "KILLED"),
    ]
    assert said == []


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_one_that_is_missing_or_fails_is_said_once_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    send("wandb", said := [])
    assert len(said) == 1 and "pip install wandb" in said[0]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=raising(RuntimeError("no network"))))
    send("wandb", said := [])
    assert len(said) == 1 and "RuntimeError: no network" in said[0]

    calls: list[Any] = []
    run = Run(calls)
    run.log = raising(OSError("gone"))  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    send("wandb", said := [])
    assert len(said) == 1 and "gone" in said[0]


def test_one_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: gate.wait() and Run([])))
    tracker = TrackerThread("wandb", "name", {}, on_failure=lambda text: None)
    start = time.perf_counter()
    for step in range(1000):
        tracker.log(step, {"loss": 1.0})
    assert time.perf_counter() - start < 0.5
    assert tracker.dropped >= 1000 - 65
    gate.set()
    tracker.close("finished")


def test_an_unknown_tracker() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'wandb'"):
        TrackerThread("wandbb", "name", {}, on_failure=print)


def test_what_is_tracked_scalars() -> None:
    scalars = {"loss_fp8": 1.0, "milliseconds_fp8": 5.0, "lr": 0.1, "time": 1e9, "heldout_loss_bf16": 2.0, "tokens": 3}
    assert tracked_scalars(scalars) == {"loss_fp8": 1.0, "lr": 0.1, "heldout_loss_bf16": 2.0}
    assert flat(CONFIG) == {"run.lr": 1e-3, "run.out": "x" * 600, "model": {}}


def test_aggregates_of_a_snapshot() -> None:
    values = np.zeros((3, len(STATS)), dtype=np.float32)
    values[:, STATS.index("amax")] = [1.0, 4.0, np.nan]
    values[:, STATS.index("scale")] = [0.25, 8.0, np.nan]
    values[:, STATS.index("flushed")] = [0.5, 0.125, np.nan]
    values[:, STATS.index("nonfinite")] = [0.0, 1e-3, np.nan]
    values[:, STATS.index("sqnr")] = [31.0, 24.0, np.nan]
    found = aggregates(values, STATS)
    assert found == {
        "fp8/flushed_max": 0.5,
        "fp8/subnormal_max": 0.0,
        "fp8/saturated_max": 0.0,
        "fp8/nonfinite_tensors": 1.0,
        "fp8/amax_max": 4.0,
        "fp8/scale_log2_min": -2.0,
        "fp8/scale_log2_max": 3.0,
        "fp8/kurtosis_max": 0.0,
        "fp8/sqnr_min": 24.0,
        "fp8/tensors": 2.0,
    }
    assert list(found) == list(AGGREGATES) and len(found) <= 12


def test_what_was_not_measured_is_left_out() -> None:
    nothing = np.full((2, len(STATS)), np.nan, dtype=np.float32)
    assert aggregates(nothing, STATS) == {"fp8/nonfinite_tensors": 0.0, "fp8/tensors": 0.0}
    assert aggregates(nothing[:0], STATS) == {"fp8/nonfinite_tensors": 0.0, "fp8/tensors": 0.0}
