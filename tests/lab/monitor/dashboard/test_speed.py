"""Throughput, utilisation, energy and memory, against figures worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.lab.models import ModelConfig, flops_per_token
from octavo.lab.monitor.dashboard.speed import speed
from octavo.lab.monitor.store import RunReader, RunWriter

MODEL = {"vocab": 1000, "dim": 256, "layers": 4, "heads": 4, "sequence": 128}
CONFIG = {"model": MODEL, "data": {"sequence": 128}, "run": {"batch": 8}}
START = 1.7e9


def written(path: Path, config: dict[str, Any], env: dict[str, Any], milliseconds: float = 20.0) -> RunReader:
    """Write 100 steps of half a second, FP8 twice as fast as BF16, and a GPU of 500 watts measured every 5 s."""
    with RunWriter(path) as run, run.batch():
        run.write_document("config", config)
        run.write_document("env", env)
        for step in range(1, 101):
            times = {"milliseconds_fp8": milliseconds, "milliseconds_bf16": 2 * milliseconds}
            run.write_step(step, {**times, "time": START + 0.5 * step, "tokens": 1024.0 * step})
        for second in range(0, 51, 5):
            joules = 500.0 * (second if second < 20 else second - 20)  # the counter starts over: a new session
            system = {"gpu_energy_joules": joules, "gpu_memory_bytes": 9e9, "torch_allocated_bytes": 4e9}
            run.write_system({**system, "torch_reserved_bytes": 5e9, "process_memory_bytes": 1e9}, t=START + second)
    return RunReader(path)


def test_utilisation_is_operations_by_time_by_peak(tmp_path: Path) -> None:
    curves, facts = speed(written(tmp_path, CONFIG, {"device": "NVIDIA H200"}))
    operations = flops_per_token(ModelConfig(**MODEL), 128) * 8 * 128
    assert facts["tflops_fp8"] == pytest.approx(operations / 20e-3 / 1e12)
    assert facts["utilisation_fp8_of_bf16"] == pytest.approx(100 * operations / 20e-3 / 989e12)
    assert facts["utilisation_fp8_of_fp8"] == pytest.approx(facts["utilisation_fp8_of_bf16"] / 2)
    assert facts["utilisation_bf16_of_bf16"] == pytest.approx(facts["utilisation_fp8_of_bf16"] / 2)
    assert facts["tokens_per_second_fp8"] == pytest.approx(1024 / 20e-3)
    assert facts["speedup"] == pytest.approx(2)
    np.testing.assert_allclose(curves["utilisation_fp8_of_fp8"][1], facts["utilisation_fp8_of_fp8"])
    np.testing.assert_array_equal(curves["tflops_fp8"][0], np.arange(1, 101))


def test_steps_in_bf16_before_fp8_begins_are_not_counted_and_a_summary_is_quoted(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run, run.batch():
        run.write_document("config", {**CONFIG, "run": {"batch": 8, "bf16_first_steps": 70}})
        for step in range(1, 101):
            run.write_step(step, {"milliseconds_fp8": 40.0 if step <= 70 else 20.0, "milliseconds_bf16": 40.0})
    assert speed(RunReader(tmp_path))[1]["speedup"] == pytest.approx(2)
    with RunWriter(tmp_path, keep_until=100) as run:
        run.write_document("summary", {"step_milliseconds_fp8": 30.0, "step_milliseconds_bf16": None})
    assert speed(RunReader(tmp_path))[1]["speedup"] == pytest.approx(40 / 30)


def test_energy_is_of_the_newest_session(tmp_path: Path) -> None:
    _, facts = speed(written(tmp_path, CONFIG, {"device": "NVIDIA H200"}))
    assert facts["joules_per_step"] == pytest.approx(250)
    assert facts["joules_per_token"] == pytest.approx(250 / 1024)
    assert facts["tokens_per_kwh"] == pytest.approx(3.6e6 / (250 / 1024))


def test_the_cost_is_of_all_sessions_and_gpus(tmp_path: Path) -> None:
    config = {**CONFIG, "run": {"batch": 8, "price_per_kwh": 0.3}}
    _, facts = speed(written(tmp_path, config, {"world_size": 2}))
    assert facts["kwh"] == pytest.approx(2 * (500 * 15 + 500 * 30) / 3.6e6)
    assert facts["cost"] == pytest.approx(0.3 * facts["kwh"])


def test_memory_adds_up(tmp_path: Path) -> None:
    _, facts = speed(written(tmp_path, CONFIG, {}))
    gpu = {"tensors": 4e9, "reserved by PyTorch, free": 1e9, "other on the GPU": 4e9}
    assert facts["memory_bytes"] == {**gpu, "host memory of the process": 1e9}


def test_the_machine_is_drawn_at_the_step_of_its_time(tmp_path: Path) -> None:
    curves, _ = speed(written(tmp_path, CONFIG, {}))
    np.testing.assert_allclose(curves["gpu_memory_bytes"][0], [1, *range(10, 101, 10)])


@pytest.mark.parametrize(
    ("config", "env", "per_token", "per_step"),
    [
        ({}, {"parameters": 1000}, 6000.0, 1024.0),
        ({"model": {"dim": 3}, "data": {"sequence": 8}}, {}, None, 1024.0),
        ({"model": "gpt2", "run": "long"}, {"parameters": 10}, 60.0, 1024.0),
        ({}, {}, None, 1024.0),
    ],
)
def test_a_run_of_another_program_says_what_it_can(
    tmp_path: Path, config: dict[str, Any], env: dict[str, Any], per_token: float | None, per_step: float
) -> None:
    _, facts = speed(written(tmp_path, config, env))
    assert facts["flops_per_token"] == per_token
    assert facts["tokens_per_step"] == per_step
    assert facts["peak_tflops"] == {} and not any("utilisation" in key for key in facts)


def test_a_run_that_measured_nothing(tmp_path: Path) -> None:
    with RunWriter(tmp_path):
        curves, facts = speed(RunReader(tmp_path))
    assert curves == {} and facts["memory_bytes"] == {}
    assert not any(isinstance(value, float) and math.isnan(value) for value in facts.values())
