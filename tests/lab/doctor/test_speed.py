"""Layers in FP8, fallbacks, shapes, launch-bound steps (by a clock of the test), and host syncs."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.conversion.gain import predicted_gain
from octavo.kernels.runtime import ledger
from octavo.kernels.runtime.devices import H200
from octavo.lab.doctor import speed
from octavo.lab.doctor.check import run_check
from octavo.lab.doctor.speed import (
    TRACE,
    Timing,
    fallback,
    launches,
    layers,
    measure,
    recorded_syncs,
    syncs,
)
from octavo.lab.doctor.subjects import Trial
from octavo.lab.train.timing import Kernel
from octavo.recipes import load

Try = Callable[..., Trial]


def test_what_is_in_fp8_is_counted_by_recipe(attempt: Try) -> None:
    trial = attempt(recipe="block")
    octavo.convert(trial.model, {"name": "mine", "base": "block", "modules": {"third": "bf16"}})
    finding = run_check(layers, trial).finding
    assert finding.verdict == "ok", finding
    assert (finding.numbers["layers"], finding.numbers["fp8"]) == (3, 2)
    assert finding.seen.startswith("2 of 3 layers are in FP8 (mine), weights of float32, 0.02 M parameters")


def test_a_model_in_bf16_is_a_warning_that_leads_to_the_plan(attempt: Try) -> None:
    trial = attempt()
    octavo.revert(trial.model)
    result = run_check(layers, trial)
    assert result.finding.verdict == "warning" and result.finding.seen == "0 of 3 layers are in FP8", result.finding
    assert "octavo plan" in result.remedy


Try = Callable[..., Trial]


def test_the_products_of_a_step_are_counted(attempt: Try) -> None:
    finding = run_check(fallback, attempt()).finding
    assert finding.verdict == "ok", finding
    assert sum(finding.numbers["products"].values()) == 8  # the first layer has no dgrad


def test_a_forced_reference_is_a_failure_with_its_reason(attempt: Try) -> None:
    def slow(y: object) -> object:
        ledger.fall_back("norm ran as reference: OCTAVO_TRITON=0 switches Triton kernels off")
        return y.square().mean()  # type: ignore[attr-defined]

    result = run_check(fallback, attempt(loss=slow))
    assert result.finding.verdict == "failure" and "OCTAVO_TRITON=0" in result.finding.seen, result.finding
    assert "keep the layer in BF16" in result.remedy


def test_a_layer_that_is_read_and_not_called_is_named() -> None:
    model, x = nn.ModuleDict({"read": nn.Linear(64, 64), "called": nn.Linear(64, 64)}), torch.randn(8, 64)
    octavo.convert(model)

    def loss() -> Tensor:
        return model["called"](nn.functional.linear(x, model["read"].weight)).square().mean()  # type: ignore[arg-type]

    finding = run_check(fallback, Trial(model, loss, lambda: loss().backward())).finding
    assert finding.verdict == "warning" and finding.numbers["uncalled"] == ["read"], finding
    assert finding.seen == "1 layer in FP8 by the plan not called in a step: read"
    octavo.convert(model, policy=octavo.Policy(keep=["read"]))
    assert run_check(fallback, Trial(model, loss, lambda: loss().backward())).finding.verdict == "ok"


def test_layers_that_are_switched_off_are_a_failure(attempt: Try) -> None:
    trial = attempt()
    with octavo.disabled(trial.model):
        result = run_check(fallback, trial)
    assert result.finding.verdict == "failure", result.finding
    assert result.finding.seen == "3 layers converted, but no GEMM ran in FP8"
    assert "outside octavo.disabled" in result.remedy


def test_a_model_that_is_not_converted_is_no_fault(attempt: Try) -> None:
    trial = attempt()
    octavo.revert(trial.model)
    finding = run_check(fallback, trial).finding
    assert finding.verdict == "skipped", finding


@pytest.mark.gpu
def test_on_a_gpu_nothing_falls_back(attempt: Try) -> None:
    finding = run_check(fallback, attempt(device="cuda")).finding
    assert finding.verdict == "ok", finding


Try = Callable[..., Trial]


def row(layer: str, gain: float, pads: int = 0) -> dict[str, Any]:
    return {"layer": layer, "shape": "64 x 64", "tokens": 96, "gain": gain, "pads": pads}


@pytest.mark.parametrize(
    ("rows", "verdict", "seen"),
    [
        ([row("a", 1.4), row("b", 1.2)], "ok", "2 layers; lowest predicted gain 1.20, b"),
        (
            [row("a", 1.4), row("b", 0.7), row("c", 0.9)],
            "warning",
            "2 of 3 layers slower than BF16; lowest predicted gain 0.70, b",
        ),
        ([row("a", 1.4), row("b", 1.2, pads=16)], "warning", "1 of 2 layers are padded"),
    ],
)
def test_a_shape_that_does_not_pay_is_a_warning(rows: list[dict[str, Any]], verdict: str, seen: str) -> None:
    finding = speed.shapes.look((rows, True))
    assert finding.verdict == verdict and seen in finding.seen, finding
    assert ("multiples of 16" in finding.remedy) == (verdict == "warning" and "padded" in seen)


def test_shapes_are_those_of_the_layers_and_tokens_those_of_a_step(attempt: Try) -> None:
    rows = speed._shape_rows(attempt())
    assert [(row["layer"], row["shape"], row["tokens"]) for row in rows] == [
        ("first", "128 x 64", 96),
        ("second", "64 x 128", 96),
        ("third", "32 x 64", 96),
    ]
    assert rows[0]["gain"] == round(predicted_gain(load("folded"), 128, 64, 96, rates=H200), 3)
    assert [row["pads"] for row in rows] == [0, 0, 0]
    assert [row["pads"] for row in speed._shape_rows(attempt(recipe="block"))] == [128, 128, 128]


def test_a_layer_that_stores_its_weight_transposed_has_the_shape_that_it_computes() -> None:
    """`Conv1D` of transformers, as in GPT-2."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model, x = nn.Sequential(conv1d(128, 64), conv1d(64, 128)), torch.randn(96, 64)
    trial = Trial(model, lambda: model(x).sum(), lambda: None)
    recipe = {"name": "mine", "base": "folded", "modules": {"1": "bf16"}}
    octavo.convert(model, recipe, policy=octavo.Policy(min_gain=0))
    assert [(row["shape"], row["tokens"]) for row in speed._shape_rows(trial)] == [("128 x 64", 96)]
    assert run_check(layers, trial).finding.seen.startswith("1 of 2 layers are in FP8")


def test_on_a_cpu_no_shape_pays(attempt: Try) -> None:
    finding = run_check(speed.shapes, attempt()).finding
    assert finding.verdict == "skipped" and "on an H200, 3 of 3 layers slower than BF16" in finding.seen, finding


@pytest.mark.gpu
def test_a_tiny_model_does_not_pay_on_a_gpu(attempt: Try) -> None:
    result = run_check(speed.shapes, attempt(device="cuda"))
    assert result.finding.verdict == "warning" and "min_gain at 1" in result.remedy, result.finding


Try = Callable[..., Trial]


class FakeGpu:
    """A host that launches a kernel in 10 us, and a device that runs one in `kernel` us. A wait takes the device's."""

    def __init__(self, kernel: float, pause: float = 0.0, smallest: float = 20.0) -> None:
        self.kernel, self.pause, self.smallest = kernel * 1e-6, pause * 1e-6, smallest * 1e-6
        self.host = self.device = self.worked = 0.0

    def launch(self) -> None:
        self.host += 1e-5
        self.device = max(self.device, self.host) + self.kernel + self.pause
        self.worked += self.kernel

    def wait(self) -> None:
        self.host = max(self.host, self.device)

    def kernels_of(self, step: Callable[[], Any], steps: int, trace: Path | None) -> list[Kernel]:
        before = self.worked
        for _ in range(steps):
            step()
        return [Kernel("all", 0.0, 1e6 * (self.worked - before))]


@pytest.mark.parametrize(
    ("gpu", "verdict", "seen"),
    [
        (FakeGpu(kernel=2), "warning", "launch-bound: a step takes 1.00 ms, with the device busy for 0.20 ms"),
        (FakeGpu(kernel=50), "ok", "the device busy for 5.00 ms"),
        (FakeGpu(kernel=20, pause=30), "warning", "not waiting for the host"),
        (FakeGpu(kernel=2, smallest=2000), "warning", "but other processes use this GPU: its smallest kernel takes 2."),
    ],
)
def test_a_model_of_tiny_kernels_is_launch_bound(
    monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, verdict: str, seen: str
) -> None:
    monkeypatch.setattr(speed, "perf_counter", lambda: gpu.host)
    monkeypatch.setattr(speed, "synchronize", lambda device: gpu.wait())
    monkeypatch.setattr(speed, "kernels_of", gpu.kernels_of)
    monkeypatch.setattr(speed, "_smallest", lambda: gpu.smallest)

    def step() -> None:
        for _ in range(100):
            gpu.launch()

    finding = speed.launches.look(measure(step))
    assert finding.verdict == verdict and seen in finding.seen, finding


def test_a_host_that_waits_for_a_busy_device_is_not_launch_bound() -> None:
    finding = speed.launches.look(Timing(host=0.010, step=0.010, busy=0.0099))
    assert finding.verdict == "ok", finding


def test_on_a_cpu_host_and_device_are_one(attempt: Try) -> None:
    finding = run_check(launches, attempt()).finding
    assert finding.verdict == "skipped", finding


@pytest.mark.gpu
def test_a_tiny_model_is_launch_bound_on_a_gpu_and_its_trace_is_written(attempt: Try, tmp_path: Path) -> None:
    trial = attempt(device="cuda")
    for _ in range(5):
        result = run_check(launches, Trial(trial.model, trial.loss, trial.step, tmp_path))
        if result.finding.seen.startswith("launch-bound"):
            break
    if "other processes use this GPU" in result.finding.seen:
        pytest.skip("other processes use this GPU")
    assert result.finding.verdict == "warning" and result.finding.seen.startswith("launch-bound"), result.finding
    assert "CUDA graph" in result.remedy
    assert json.loads((tmp_path / TRACE).read_text())["traceEvents"]
    assert torch.cuda.is_available()


Try = Callable[..., Trial]


class FakeSyncMode:
    """Fake of PyTorch's `set_sync_debug_mode("warn")`, without a GPU."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.mode: object = 0
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        patch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))

    def item(self, x: Tensor) -> float:
        """Wait, and warn of it."""
        if self.mode == "warn":
            warnings.warn(
                "called a synchronizing CUDA operation (Triggered internally at ...)", UserWarning, stacklevel=1
            )
        return float(x)


def test_a_wait_is_counted_with_its_line_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSyncMode(monkeypatch)
    with recorded_syncs() as places:
        for _ in range(3):
            fake.item(torch.ones(()))
        warnings.warn("something else", UserWarning, stacklevel=1)
    fake.item(torch.ones(()))  # outside the block: not recorded
    finding = speed.syncs.look(places)
    assert finding.verdict == "warning" and finding.numbers["waits"] == 3, finding
    assert finding.rows[0]["place"].startswith(__file__) and finding.rows[0]["waits"] == 3
    assert "doctor/test_speed.py" in finding.seen and "warnings.warn" in finding.seen
    assert fake.mode == 0


def test_the_mode_is_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSyncMode(monkeypatch)
    shown = warnings.showwarning
    with pytest.raises(RuntimeError), recorded_syncs():
        raise RuntimeError
    assert fake.mode == 0 and warnings.showwarning is shown


def test_a_step_without_waits_is_well(attempt: Try) -> None:
    finding = speed.syncs.look(Counter())
    assert finding.verdict == "ok", finding
    finding = run_check(syncs, attempt()).finding
    assert finding.verdict == "skipped", finding


@pytest.mark.gpu
def test_an_item_in_a_forward_is_found_on_a_gpu(attempt: Try) -> None:
    def waits(x: Tensor) -> Tensor:
        return x + 0 * x.sum().item()

    result = run_check(syncs, attempt(device="cuda", wrong=waits))
    assert result.finding.verdict == "warning", result
    assert result.finding.rows[0]["code"] == "return x + 0 * x.sum().item()"
    assert ".item()" in result.remedy


@pytest.mark.gpu
def test_octavos_own_layers_wait_nowhere(attempt: Try) -> None:
    result = run_check(syncs, attempt(device="cuda"))
    assert result.finding.verdict == "ok", result.finding.rows
