"""Trackers, and the aggregates they receive."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.lab.monitor.recorder import Recorder
from octavo.lab.monitor.store import STATS, RunWriter
from octavo.lab.monitor.trackers import AGGREGATES, TrackerThread, aggregates, all_statistics, flat, tracked_scalars

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
    for step in range(1000):
        tracker.log(step, {"loss": 1.0})  # who waited would wait forever
    assert tracker._thread.dropped >= 1000 - 65
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


def test_all_statistics_are_sent_every_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: Run([], **settings)))
    tracker = TrackerThread("wandb:100", "name", {}, on_failure=print)
    assert [step for step in range(1, 260, 7) if tracker.sends_tensors(step)] == [1, 106, 211]
    tracker.close("finished")
    values = np.array([[1.0, np.nan], [2.0, np.inf]], dtype=np.float32)
    found = all_statistics(values, [("layers.0.wq", "input"), ("lm_head", "weight")], ["amax", "sqnr"])
    assert found == {"tensors/layers.0.wq/input/amax": 1.0, "tensors/lm_head/weight/amax": 2.0}
    for wrong in ("wandb:", "wandb:0", "wandb:x"):
        with pytest.raises(ConfigError, match="positive number of steps"):
            TrackerThread(wrong, "name", {}, on_failure=print)


def recorded(directory: Path, kind: str) -> dict[str, float]:
    """Record two steps and close; return the statistics of tensors that a tracker must have by then."""
    recorder = Recorder(RunWriter(directory), trackers=[f"{kind}:2"], config={"run": {"lr": 0.1}})
    recorder.tensors([(f"layers.{layer}", role, "x", (1, 1)) for layer in range(60) for role in ("input", "weight")])
    values = np.arange(120 * len(STATS), dtype=np.float32).reshape(120, len(STATS))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a tracker that fails says so by a warning
        recorder.step(1, {"loss": 2.0}, values)
        recorder.step(2, {"loss": 1.0}, values)
        recorder.close()
    rows = [(f"layers.{layer}", role) for layer in range(60) for role in ("input", "weight")]
    found = all_statistics(values, rows, STATS)
    assert len(found) > 1000  # more than MLflow takes at once
    return found


def test_a_server_of_mlflow_has_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client and server: runs of several machines come together in one place."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", str(tmp_path)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen(command, env=environ, **quiet)  # type: ignore[call-overload]
    try:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        wait_for(f"http://127.0.0.1:{port}/health", server)
        expected = recorded(tmp_path / "one", "mlflow")
        recorded(tmp_path / "two", "mlflow")
        client = mlflow.MlflowClient()
        runs = client.search_runs([client.get_experiment_by_name("octavo").experiment_id])
        assert {(run.info.run_name, run.info.status) for run in runs} == {("one", "FINISHED"), ("two", "FINISHED")}
        assert runs[0].data.params == {"run.lr": "0.1"}
        metrics = runs[0].data.metrics
        assert metrics["loss"] == 1.0 and {key: metrics[key] for key in expected} == pytest.approx(expected)
        assert [m.step for m in client.get_metric_history(runs[0].info.run_id, "loss")] == [1, 2]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(2400):
        assert server.poll() is None
        try:
            urllib.request.urlopen(address, timeout=1)
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(address)


def test_trackio_has_every_tensor(tmp_path: Path) -> None:
    """The real package and its database, in a process of its own: it reads its folder when it is imported."""
    pytest.importorskip("trackio")
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_trackers, pathlib; "
    code += f"test_trackers.recorded(pathlib.Path({str(tmp_path / 'one')!r}), 'trackio')"
    environ = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=120, cwd=Path(__file__).parent)
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        found = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert [(name, step) for name, step, _ in found] == [("one", 1), ("one", 2)]
    metrics = json.loads(found[0][2])
    assert metrics["loss"] == 2.0 and sum(key.startswith("tensors/layers.") for key in metrics) > 1000
