"""A monitor of a custom loop, and its alarms."""

from __future__ import annotations

import copy
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import octavo
from octavo.errors import ConfigError, StoreError, UnsupportedError
from octavo.lab.guard import GuardConfig, GuardEvent
from octavo.lab.monitor.monitor import Monitor, MonitorAlarms
from octavo.lab.monitor.store import STATS, RunReader
from octavo.nn.telemetry import Telemetry


class FakeTelemetry:
    """Measurements that arrive two steps late."""

    rows = (("layer", "input", "e4m3"),)

    def __init__(self) -> None:
        self.done = -1
        self.taken = 0
        self.made = 0
        self.delay = 2
        self.detached = False

    histograms = None

    def snapshot(self) -> tuple[int, np.ndarray] | None:
        if self.taken >= self.made - self.delay:
            return None
        self.taken += 1
        values = np.zeros((1, len(STATS)), dtype=np.float32)
        values[:, STATS.index("amax")] = self.taken
        return self.taken, values

    def wait(self) -> None:
        self.delay = 0

    def detach(self) -> None:
        self.detached = True


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    source = FakeTelemetry()
    with octavo.Monitor(model, tmp_path / "run", config={"lr": 0.1}, telemetry=source) as monitor:
        for step in range(1, 11):
            source.made = step
            monitor.step(loss=torch.tensor(float(step), requires_grad=True), lr=0.1)
            assert source.taken == max(step - 2, 0)
        monitor.event("half time", layer="layer", level="warning")
    run = RunReader(tmp_path / "run")
    assert run.scalar("loss").low.tolist() == list(range(1, 11))
    assert run.scalar("lr").low.tolist() == [0.1] * 10
    assert run.snapshot_steps().tolist() == list(range(1, 11)) and source.detached and source.done == 0
    assert (run.config, run.env["parameters"], run.state()) == ({"lr": 0.1}, 20, "finished")
    assert [(event.step, event.rule, event.layer, event.text) for event in run.events()] == [
        (10, "user", "layer", "half time")
    ]


def test_the_tensors_of_a_converted_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    octavo.convert(model, "folded")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Monitor(model, tmp_path) as monitor:
        for _ in range(3):
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            monitor.step()
    run = RunReader(tmp_path)
    assert run.snapshot_steps().tolist() == [1, 2, 3]
    weight = run.series("0", "weight", "amax").low
    assert weight[0] == pytest.approx(1 / 8, rel=0.1)  # nn.Linear draws from up to 1 / sqrt(64)
    assert [(row.layer, row.role) for row in run.tensors if not row.role.startswith("grad")] == [
        ("0", "input"), ("0", "weight"), ("2", "input"), ("2", "weight"),
    ]  # fmt: skip
    with Monitor(model, tmp_path, resume_from=2) as monitor:  # the first one has let go of the layers
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        monitor.step()
    assert RunReader(tmp_path).snapshot_steps().tolist() == [1, 2, 3]


def test_the_statistics_are_those_of_the_kernels() -> None:
    from octavo.nn.telemetry import STATS as MEASURED

    assert tuple(MEASURED) == STATS


def test_what_breaks_a_rule_is_an_event_of_its_step(tmp_path: Path) -> None:
    source = FakeTelemetry()
    with octavo.Monitor(nn.Linear(4, 4), tmp_path / "run", telemetry=source) as monitor:
        for step in range(1, 21):
            source.made = step
            monitor.step(loss=50.0 if step == 15 else 2.0, gradient_norm=torch.nan if step == 18 else 1.0)
    found = [(event.step, event.rule, event.level) for event in RunReader(tmp_path / "run").events()]
    assert found == [(15, "loss spike", "warning"), (18, "nonfinite", "error")]


def test_the_plan_is_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    plan = octavo.convert(model, "block")
    with Monitor(model, tmp_path, plan=plan, telemetry=None) as monitor:
        monitor.step(loss=1.0)
    assert [layer["name"] for layer in RunReader(tmp_path).plan["layers"]] == ["0", "2"]


def test_resuming_and_starting_over(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Monitor(model, tmp_path, telemetry=None) as monitor:
        for step in range(5):
            monitor.step(loss=step)
    with pytest.raises(StoreError, match="contains a run already"):
        Monitor(model, tmp_path, telemetry=None)
    with Monitor(model, tmp_path, telemetry=None, resume_from=3) as monitor:
        monitor.step(loss=100)
    assert RunReader(tmp_path).scalar("loss").low.tolist() == [0, 1, 2, 100]
    with Monitor(model, tmp_path, telemetry=None, resume_from=0) as monitor:
        monitor.step(10, loss=7)
    assert RunReader(tmp_path).scalar("loss").first.tolist() == [10]


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Monitor(nn.Linear(2, 2), tmp_path, telemetry=None) as monitor:
        monitor.step(loss=1.0)
        raise ZeroDivisionError("by zero")
    run = RunReader(tmp_path)
    assert run.state() == "failed" and run.sessions[0].text == "ZeroDivisionError: by zero"
    assert len(run.scalar("loss")) == 1


def test_it_is_not_copied(tmp_path: Path) -> None:
    with Monitor(nn.Linear(2, 2), tmp_path / "run") as monitor, pytest.raises(UnsupportedError, match="only writer"):
        copy.deepcopy(monitor)


def test_what_cannot_be_noted(tmp_path: Path) -> None:
    with Monitor(nn.Linear(2, 2), tmp_path, telemetry=None) as monitor:
        with pytest.raises(ConfigError, match="'loss' has 3 elements"):
            monitor.step(loss=torch.zeros(3))
        assert monitor.done == 0
        monitor.step(5, loss=1.0)
        with pytest.raises(ConfigError, match="step 5 is already recorded"):
            monitor.step(5, loss=1.0)


@pytest.mark.parametrize(
    "wrong", [{"guard": GuardConfig(mode="act")}, {"trackers": ["wandbb"]}], ids=["act", "tracker"]
)
def test_what_is_refused_leaves_no_trace(tmp_path: Path, wrong: dict[str, Any]) -> None:
    layer = octavo.nn.Linear(16, 16)
    with pytest.raises(ConfigError):
        Monitor(layer, tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists() and layer.stats_slot is None
    assert "run store" not in {thread.name for thread in threading.enumerate()}


def test_a_directory_that_has_a_run_leaves_the_model_unmeasured(tmp_path: Path) -> None:
    Monitor(nn.Linear(2, 2), tmp_path, telemetry=None).close()
    layer = octavo.nn.Linear(16, 16)
    with pytest.raises(StoreError, match="contains a run already"):
        Monitor(layer, tmp_path)
    assert layer.stats_slot is None


def test_a_model_that_is_measured_already_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    with Monitor(nn.Linear(2, 2), tmp_path, telemetry=None) as monitor:
        monitor.step(loss=1.0)
    layer = octavo.nn.Linear(16, 16)
    with Telemetry(layer), pytest.raises(ConfigError, match="watches"):
        Monitor(layer, tmp_path, resume_from=0)
    assert RunReader(tmp_path).last_step == 1


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.lab.monitor.monitor.is_first_rank", lambda: False)
    with Monitor(nn.Linear(2, 2), tmp_path / "run") as monitor:
        monitor.step(loss=1.0)
        monitor.event("nothing")
    assert not (tmp_path / "run").exists() and monitor.done == 1


def test_telemetry_of_other_ranks_has_the_number_of_the_first_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.lab.monitor.monitor.is_first_rank", lambda: False)
    source = FakeTelemetry()
    with Monitor(nn.Linear(2, 2), tmp_path / "run", telemetry=source, resume_from=7):
        assert source.done == 7
    assert source.detached


def test_a_close_that_fails_closes_the_run(tmp_path: Path) -> None:
    class Broken(FakeTelemetry):
        def snapshot(self) -> tuple[int, np.ndarray] | None:
            raise RuntimeError("a rank is gone")

    source = Broken()
    monitor = Monitor(nn.Linear(2, 2), tmp_path, telemetry=source)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        monitor.close()
    run = RunReader(tmp_path)
    assert run.state() == "failed" and run.sessions[0].text == "RuntimeError: a rank is gone"
    assert source.detached
    monitor.close()


@pytest.mark.gpu
def test_scalars_come_from_the_gpu_without_waiting(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, device="cuda")
    with Monitor(model, tmp_path, telemetry=None) as monitor:
        torch.cuda.synchronize()
        with torch.cuda.device(0):
            torch.cuda.set_sync_debug_mode("error")
            try:
                for step in range(1, 21):
                    monitor.step(loss=torch.ones((), device="cuda") * step, lr=0.1)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert RunReader(tmp_path).scalar("loss").low.tolist() == list(range(1, 21))


ROWS = [("a", "input"), ("a", "weight")]


def tensors(**of_weight: float) -> np.ndarray:
    values = np.zeros((2, len(STATS)), dtype=np.float32)
    values[:, STATS.index("amax")] = 1.0
    for name, value in of_weight.items():
        values[1, STATS.index(name)] = value
    return values


def rules(said: list[GuardEvent], rows: list[tuple[str, str]] = ROWS, **config: float) -> MonitorAlarms:
    return MonitorAlarms(GuardConfig(**config), rows, said.append)  # type: ignore[arg-type]


@pytest.mark.parametrize("tensors_first", [True, False])
def test_a_step_is_judged_when_all_of_it_is_there(tensors_first: bool) -> None:
    said: list[GuardEvent] = []
    made = rules(said)
    for step, amax in ((1, 1.0), (2, 9.0)):
        calls = [lambda s=step, a=amax: made.tensors(s, tensors(amax=a)), lambda s=step: made.scalars(s, {"loss": 2.0})]
        for call in calls if tensors_first else calls[::-1]:
            assert said == []
            call()
    assert [(event.step, event.rule, event.layer) for event in said] == [(2, "weight jump", "a")]


def test_steps_that_telemetry_passes_over_are_judged_by_their_scalars() -> None:
    said: list[GuardEvent] = []
    made = rules(said)
    for step in range(1, 16):
        made.scalars(step, {"loss_fp8": float("nan") if step == 14 else 2.0})
        if step % 5 == 0:
            made.tensors(step, tensors())
    assert [event.step for event in said] == [14]


def test_without_telemetry_nothing_is_waited_for() -> None:
    said: list[GuardEvent] = []
    made = rules(said, rows=[])
    made.scalars(1, {"loss": float("inf")})
    assert len(said) == 1


def test_what_is_left_is_judged_at_the_end() -> None:
    said: list[GuardEvent] = []
    made = rules(said)
    made.scalars(1, {"grad_norm": float("nan")})
    assert said == []
    made.close()
    assert len(said) == 1


def test_a_level_that_lasts_is_told_once() -> None:
    said: list[GuardEvent] = []
    made = rules(said, rows=[])
    for step in range(1, 400):
        made.scalars(step, {"loss": (2.0 if step < 100 else 6.0) + 0.01 * (step % 7)})
    assert [(event.step, event.rule) for event in said] == [(100, "loss spike")]


def test_a_budget_is_told_once_in_a_quiet_time() -> None:
    said: list[GuardEvent] = []
    made = rules(said, patience=2, quiet=10)
    for step in range(1, 16):
        made.scalars(step, {"loss": 2.0})
        made.tensors(step, tensors(saturated=0.5))
    assert [(event.step, event.rule) for event in said] == [(2, "saturated"), (12, "saturated")]
    assert said[0].text == "saturated of a weight (0.5, limit 0.001), for 2 steps"


def test_off_is_off_and_act_is_refused() -> None:
    said: list[GuardEvent] = []
    MonitorAlarms(GuardConfig(mode="off"), [], said.append).scalars(1, {"loss": float("nan")})
    assert said == []
    with pytest.raises(ConfigError, match=r"To act, use octavo\.lab\.guard\.Loop"):
        MonitorAlarms(GuardConfig(mode="act"), [], said.append)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("telemetry", "yes"), ("telemetry", True), ("trackers", "wandb"), ("config", [1]), ("plan", "folded"),
        ("resume_from", "3"), ("resume_from", True), ("resume_from", -1), ("guard", "watch"),
    ],
)  # fmt: skip
def test_arguments_of_another_type_are_refused(tmp_path: Path, argument: str, value: Any) -> None:
    message = rf"octavo.Monitor: {argument}: expected .*, got {re.escape(repr(value))}"
    with pytest.raises(ConfigError, match=message):
        Monitor(nn.Linear(4, 4), tmp_path / "run", **{argument: value})
    with pytest.raises(ConfigError, match=r"octavo.Monitor: model: expected a torch.nn.Module"):
        Monitor([1], tmp_path / "run")  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
