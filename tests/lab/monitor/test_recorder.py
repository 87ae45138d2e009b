from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.lab.monitor import recorder as recorders
from octavo.lab.monitor.recorder import Recorder
from octavo.lab.monitor.store import STATS, RunReader, RunWriter


def test_everything_arrives(tmp_path: Path) -> None:
    recorder = Recorder(RunWriter(tmp_path / "run"), config={"a": 1}, system_every=0.02)
    recorder.tensors([("layer", "input", "e4m3")])
    for step in range(1, 51):
        bins = np.full((1, 64), step, dtype=np.float32) if step % 20 == 0 else None
        recorder.step(step, {"loss": 1 / step}, np.full((1, len(STATS)), step, dtype=np.float32), bins)
    recorder.event(50, "rule", "text", level="warning", value=1.0)
    recorder.document("summary", {"done": True}, step=50)
    time.sleep(0.1)
    recorder.close()
    recorder.close()
    run = RunReader(tmp_path / "run")
    assert run.scalar("loss").low.tolist() == [1 / step for step in range(1, 51)]
    assert run.snapshot_steps().tolist() == list(range(1, 51))
    found = run.histogram("layer", "input")
    assert found is not None and (found[0], found[1], found[2].tolist()) == (40, -40, [40] * 64)
    assert (run.config, run.summary, run.state()) == ({"a": 1}, {"done": True}, "finished")
    assert [event.text for event in run.events()] == ["text"]
    assert len(run.system()) >= 3 and recorder.dropped == 0


def test_a_slow_disk_holds_nobody_up_and_the_loss_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), RunWriter.write_step

    def slow(self: RunWriter, *arguments: Any, **keywords: Any) -> None:
        gate.wait()
        write(self, *arguments, **keywords)

    monkeypatch.setattr(RunWriter, "write_step", slow)
    recorder = Recorder(RunWriter(tmp_path))
    with pytest.warns(UserWarning, match="the disk is too slow"):
        for step in range(1, recorders.CAPACITY + 101):
            recorder.step(step, {"loss": 1.0})  # who waited would wait forever
    lost = recorder.dropped
    gate.set()
    recorder.close()
    run = RunReader(tmp_path)
    assert 98 <= lost <= 101 and len(run.scalar("loss")) == recorders.CAPACITY + 100 - lost
    (event,) = run.events(rule="store")
    assert event.value == lost and event.level == "warning" and "lost, not written: the disk was too slow" in event.text


def test_a_store_that_fails_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(RunWriter(tmp_path))
    recorder.tensors([("layer", "input")])
    with pytest.warns(UserWarning, match=r"run store: .* a snapshot has the shape \(1, 10\)"):
        recorder.step(1, {"loss": 1.0}, np.zeros((7, len(STATS)), dtype=np.float32))
        recorder.step(2, {"loss": 2.0}, np.zeros((1, len(STATS)), dtype=np.float32))
        recorder.close("failed", "why")
    run = RunReader(tmp_path)
    assert run.scalar("loss").first.tolist() == [2] and run.state() == "failed"
    (event,) = run.events(rule="store")
    assert event.level == "error" and event.text.startswith("1 write failed, so that measurements are missing")
    assert "a snapshot has the shape" in event.text and event.value == 1


def test_trackers_get_aggregates_with_the_next_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, dict[str, float]]] = []

    class Tracker:
        def log(self, step: int, values: dict[str, float]) -> None:
            sent.append((step, values))

        def finish(self, outcome: str) -> None:
            sent.append((-1, {}))

    monkeypatch.setattr("octavo.lab.monitor.trackers.TRACKERS", {"fake": lambda name, config: Tracker()})
    recorder = Recorder(RunWriter(tmp_path / "name"), trackers=["fake"])
    recorder.tensors([("layer", "input")])
    recorder.step(1, {"loss": 2.0, "other": 7.0})
    recorder.step(1, None, np.ones((1, len(STATS)), dtype=np.float32))
    recorder.step(2, {"loss": 1.0})
    recorder.close()
    assert sent[0] == (1, {"loss": 2.0})
    assert sent[1][0] == 2 and sent[1][1]["loss"] == 1.0 and sent[1][1]["fp8/amax_max"] == 1.0
    assert sent[2:] == [(-1, {})]


def test_a_tracker_that_fails_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, config: Any) -> Any:
        raise RuntimeError("no network")

    monkeypatch.setattr("octavo.lab.monitor.trackers.TRACKERS", {"fake": broken})
    with pytest.warns(UserWarning, match="fake is disabled"):
        recorder = Recorder(RunWriter(tmp_path), trackers=["fake"])
        recorder.step(1, {"loss": 1.0})
        recorder.close()
    run = RunReader(tmp_path)
    assert "no network" in run.events(rule="tracker")[0].text and len(run.scalar("loss")) == 1
