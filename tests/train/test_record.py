from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError, RunError
from octavo.monitor.store import ROLES, RunReader
from octavo.train import train
from octavo.train.config import RunConfig
from octavo.train.events import Event, Saved
from octavo.train.files import read_metrics

Configure = Callable[..., RunConfig]


class Interrupter:
    def report(self, event: Event) -> None:
        if isinstance(event, Saved) and event.step == 3:
            raise KeyboardInterrupt

    def close(self) -> None: ...


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
    assert run.config["run"]["recipe"] == "folded" and run.plan["layers"]
    assert run.env["lanes"] == ["fp8", "bf16"] and run.env["versions"]["torch"]
    assert run.corpus["duplicate_documents"] == 0 and run.corpus["unigram_entropy"] > 0
    assert run.state() == "finished" and run.system()
    assert run.snapshot_steps().tolist() == [1, 2, 3, 4, 5, 6]
    assert run.heatmap("scale", "weight").values.min() > 0
    assert [event.rule for event in run.events()] == ["checkpoint"]


def test_a_resumed_run_appends_to_its_checkpoint(configure: Configure) -> None:
    config = configure(run={"steps": 6, "log_every": 1, "checkpoint_every": 3})
    with pytest.raises(KeyboardInterrupt):
        train(config, reporters=[Interrupter()])
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
    config = configure(run={"steps": 5, "telemetry_every": every, "histograms_every": 3, "twin": False})
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
    config = configure(run={"steps": 6, "log_every": 1, "twin": False}, optimizer=dynamic)
    summary = train(config)
    run = RunReader(config.run.out)
    assert summary["skipped_steps"]["fp8"] > 0
    assert run.snapshot_steps().tolist() == [1, 2, 3, 4, 5, 6]
    assert len(run.events(rule="overflow")) >= 1


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

    monkeypatch.setitem(__import__("octavo.monitor.trackers", fromlist=["x"]).TRACKERS, "wandb", lambda *_: Tracker())
    train(configure(run={"steps": 2, "log_every": 1, "tracker": "wandb"}))
    assert sent[-1] == "finished" and sent[0][0] == 1 and "loss_fp8" in sent[0][1]
    assert all(len(values) <= 20 for _, values in sent[:-1])
