from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reporters import Listener
from rich.console import Console
from states import write_state

from octavo.errors import ConfigError, RunError
from octavo.lab.monitor.store import ROLES, RunReader
from octavo.lab.monitor.system import SystemProbe
from octavo.lab.train import train
from octavo.lab.train.config import RunConfig
from octavo.lab.train.console import ConsoleReporter
from octavo.lab.train.events import Evaluated, Saved
from octavo.lab.train.files import read_metrics

Configure = Callable[..., RunConfig]


def test_the_store_holds_what_the_metrics_hold(configure: Configure) -> None:
    config = configure(run={"steps": 6, "log_every": 2, "eval_every": 3})
    summary = train(config)
    run = RunReader(config.run.out)
    lines = read_metrics(config.run.out / "metrics.jsonl")
    expected: dict[str, dict[int, float]] = {}
    for line in lines:
        for key, value in line.items():
            if key != "step" and value is not None:
                expected.setdefault(key, {})[line["step"]] = value
    found = run.scalars()
    assert {
        key: dict(zip(s.first.tolist(), s.low.tolist(), strict=True)) for key, s in found.items() if key != "time"
    } == expected
    assert run.summary["heldout_loss_fp8"] == summary["heldout_loss_fp8"]
    assert run.config["run"]["recipe"] == "rotated" and run.plan["layers"]
    assert run.env["lanes"] == ["fp8", "bf16"] and run.env["versions"]["torch"]
    assert run.corpus["duplicate_documents"] == 0 and run.corpus["unigram_entropy"] > 0
    assert run.state() == "finished" and run.system()
    assert run.snapshot_steps().tolist() == [1, 2, 3, 4, 5, 6]
    assert run.heatmap("scale", "weight").values.min() > 0
    assert [event.rule for event in run.events()] == ["checkpoint"]


def test_a_resumed_run_appends_to_its_checkpoint(configure: Configure) -> None:
    config = configure(run={"steps": 6, "log_every": 1, "checkpoint_every": 3, "baseline": False})
    with pytest.raises(KeyboardInterrupt):
        train(config, reporters=[Listener(Saved, step=3)])
    assert RunReader(config.run.out).state() == "interrupted"
    train(config, resume=True)
    run = RunReader(config.run.out)
    assert run.scalar("loss_fp8").first.tolist() == [1, 2, 3, 4, 5, 6]
    assert run.snapshot_steps().tolist() == [1, 2, 3, 4, 5, 6]
    assert [(s.first_step, s.outcome) for s in run.sessions] == [(0, "interrupted"), (3, "finished")]
    train(config, overwrite=True)
    assert len(RunReader(config.run.out).sessions) == 1


@pytest.mark.parametrize(("every", "steps"), [(0, []), (2, [2, 3, 4])])
def test_how_often_tensors_are_looked_at(configure: Configure, every: int, steps: list[int]) -> None:
    config = configure(run={"steps": 5, "telemetry_every": every, "histograms_every": 3, "baseline": False})
    train(config)
    run = RunReader(config.run.out)
    assert run.env["world_size"] == 1
    assert run.snapshot_steps().tolist() == steps
    taken = [(step, run.tensors[index].role) for step, index, _, counts in run.histograms() if counts.sum() > 0]
    assert {step for step, _ in taken} == ({3} if every else set())
    assert {role for _, role in taken} == (set(ROLES) if every else set())
    if every:
        assert np.isfinite(run.series(run.tensors[0].layer, "input", "sqnr").low).tolist() == [False, True, False]


def test_steps_that_loss_scaling_skips_are_looked_at_too(configure: Configure) -> None:
    dynamic = {"loss_scale": "dynamic", "loss_scale_start": 2.0**126, "name": "muon"}
    config = configure(run={"steps": 6, "log_every": 1, "baseline": False}, optimizer=dynamic)
    summary = train(config)
    run = RunReader(config.run.out)
    assert summary["skipped_steps"]["fp8"] > 0
    assert run.snapshot_steps().tolist() == [1, 2, 3, 4, 5, 6]
    assert sum(event.level == "warning" for event in run.events(rule="overflow")) >= 1


def test_a_run_that_breaks_says_why(configure: Configure) -> None:
    config = configure(run={"steps": 50, "recipe": "bf16"}, optimizer={"lr": 1e30, "clip": 0.0})
    with pytest.raises(RunError):
        train(config)
    run = RunReader(config.run.out)
    assert run.state() == "failed" and "no longer finite" in run.sessions[0].text


def test_a_file_of_another_program_is_said_before_the_first_step(configure: Configure) -> None:
    config = configure(run={"steps": 2})
    Path(config.run.out).mkdir(parents=True)
    (Path(config.run.out) / "run.sqlite").write_text("mine" * 1000)
    with pytest.raises(ConfigError, match=r"run\.sqlite: is not of a run of octavo train"):
        train(config)


def test_the_tracker_of_a_run(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Tracker:
        def log(self, step: int, values: dict[str, float]) -> None:
            sent.append((step, values))

        def finish(self, outcome: str) -> None:
            sent.append(outcome)

    monkeypatch.setitem(
        __import__("octavo.lab.monitor.trackers", fromlist=["x"]).TRACKERS, "wandb", lambda *_: Tracker()
    )
    train(configure(run={"steps": 2, "log_every": 1, "tracker": "wandb", "baseline": False}))
    assert sent[-1] == "finished" and sent[0][0] == 1 and "loss_fp8" in sent[0][1]
    assert all(len(values) <= 20 for _, values in sent[:-1])


def test_the_energy_of_a_run_and_its_cost_are_in_the_summary(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counter = iter(range(0, 10**9, 1800))  # half a watt-hour between two readings
    monkeypatch.setattr(SystemProbe, "sample", lambda probe: {"gpu_energy_joules": float(next(counter))})
    changes = {"steps": 2, "price_per_kwh": 0.3, "baseline": False}
    summary = train(configure(run=changes), reporters=[ConsoleReporter(Console(width=120))])
    assert summary["energy_kwh"] >= 5e-4 and summary["energy_kwh"] % 5e-4 == pytest.approx(0, abs=1e-9)
    assert summary["energy_cost"] == pytest.approx(0.3 * summary["energy_kwh"])
    assert f"{summary['energy_kwh']:.4g} kWh of the GPUs" in capsys.readouterr().out
    monkeypatch.setattr(SystemProbe, "sample", lambda probe: {})
    without = train(configure(run=changes), overwrite=True)
    assert without["energy_kwh"] is None and without["energy_cost"] is None


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def records(config: RunConfig) -> tuple[list[Any], list[Any]]:
    """Return what a run wrote beside its checkpoints, without times."""
    timed = ("milliseconds", "tokens_per_second")
    lines = read_metrics(config.run.out / "metrics.jsonl")
    metrics = [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]
    return metrics, [(event.step, event.rule, event.text) for event in RunReader(config.run.out).events()]


def in_child(action: Callable[[], Any]) -> int:
    child = os.fork()
    if not child:
        action()
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("kind, count", [(Saved, 1), (Saved, 2), (Evaluated, 1), (Evaluated, 2)])
def test_records_of_a_run_killed_after_a_checkpoint_are_those_of_one_that_was_not(
    configure: Configure, tmp_path: Path, kind: type, count: int
) -> None:
    run = {"steps": 4, "log_every": 1, "eval_every": 2, "checkpoint_every": 2, "bf16_first_steps": 2, "baseline": False}
    whole = configure(run={**run, "out": str(tmp_path / "whole")})
    train(whole)
    config = configure(run=run)
    assert in_child(lambda: train(config, reporters=[Listener(kind, kill, count=count)])) == signal.SIGKILL
    train(config, resume=True)
    assert records(config) == records(whole)


def test_a_checkpoint_kept_before_records_were_counted_resumes(configure: Configure) -> None:
    config = configure(run={"steps": 4, "checkpoint_every": 2, "baseline": False})
    with pytest.raises(KeyboardInterrupt):
        train(config, reporters=[Listener(Saved)])
    file = config.run.out / "checkpoints/step-000002/state.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    del state["recorded"]
    write_state(file.parent, state)
    assert train(config, resume=True)["steps"] == 4
