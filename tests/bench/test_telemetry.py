"""The cost of telemetry is measured on a CPU too, and its row is a result."""

import itertools
import json
import math
import random
from dataclasses import replace

import pytest

from octavo.lab.cli.main import main
from octavo.nn import telemetry_ops
from octavo_bench import results
from octavo_bench.results import Result
from octavo_bench.telemetry import DEMO, KIND, _own_time, bench_telemetry, interval

sample_input = telemetry_ops.sample_input


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "telemetry", *arguments])
    return ended.value.code


def test_a_row_is_a_result(capsys, tmp_path):
    assert run("--workload", "tiny", "--device", "cpu", "--steps", "1", "--rounds", "1", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    result = Result(kind="telemetry", date="2026-01-01", hardware="cpu", versions={}, command="", rows=tuple(rows))
    results.write(result, tmp_path)
    assert "| tiny | cpu | 128 |" in KIND.table(tmp_path)
    assert rows[0]["tensors"] >= 2 * 5 * 3
    assert rows[0]["ms_watched"] > 0
    assert 0 < rows[0]["own_percent"] < 500
    assert telemetry_ops.sample_input is sample_input  # what counts is taken away again


def test_an_optimizer_closes_the_steps_of_a_whole_model():
    row = bench_telemetry(replace(DEMO, layers=1, batch=1, sequence=16, dim=32, ffn=64), device="cpu", rounds=3)
    assert (row["pairs"], row["tensors"]) == (3, 7 * 4)
    assert row["low_percent"] <= row["overhead_percent"] <= row["high_percent"]


@pytest.mark.parametrize(("count", "first"), [(1, 0), (5, 0), (6, 0), (9, 1), (60, 21), (100, 39)])
def test_the_interval_holds_the_median_in_95_of_100(count, first):
    low, high = interval(random.sample(range(count), count))
    assert (low, high) == (first, count - 1 - first)
    missed = 2 * sum(math.comb(count, below) for below in range(first + 1)) / 2**count
    assert missed < 0.06 or first == 0


def test_own_time_counts_calls_within_calls_once(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("octavo_bench.telemetry.time.thread_time", lambda: float(next(clock)))
    monkeypatch.setattr(telemetry_ops, "sample_input", lambda: None)
    monkeypatch.setattr(telemetry_ops, "sample_weights", lambda: telemetry_ops.sample_input())
    plain = telemetry_ops.sample_weights
    with _own_time() as spent:
        telemetry_ops.sample_input()
        telemetry_ops.sample_weights()
    # In ms: 1 between two looks at the clock, and 2 where a call within looked once more.
    assert spent == [3000.0]
    assert telemetry_ops.sample_weights is plain


@pytest.mark.parametrize("arguments", [("--workload", "tinny"), ("--every", "0"), ("--workload", "tiny-model")])
def test_what_it_refuses(arguments, capsys):
    assert run("--device", "cpu", *arguments) == 2
    assert "Did you mean 'tiny'" in capsys.readouterr().err or arguments[1] != "tinny"
