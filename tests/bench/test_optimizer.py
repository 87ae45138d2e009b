"""The bench runs on a CPU, and its rows are results."""

import json

import pytest

from octavo.lab.cli.main import main
from octavo.optim import TIERS
from octavo_bench import optimizer
from octavo_bench.facts import optimizer_state_table
from octavo_bench.optimizer import BASELINE, CASES, KIND, bench_optimizer


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "optimizer", *arguments])
    return ended.value.code


def test_every_tier_is_timed(monkeypatch):
    monkeypatch.setattr(optimizer, "STEPS", 10)
    rows = [*bench_optimizer(parameters=10**5, device="cpu", repeats=1)]
    assert [row["states"] for row in rows] == [case.label for case in CASES]
    assert not [row for row in rows if "error" in row]
    assert rows[0]["ratio_to_fused_adamw"] == 1 and rows[0]["bytes_per_parameter"] == 16
    table = KIND.markdown(rows)
    assert "fp8-min" in table and "fp8, Muon" in table and "update error, dB" in table
    error = {(row["states"], row["weight"], row["gradient"]): row.get("update_error_db") for row in rows}
    wide, half, eight = "float32", "bfloat16", "float8_e4m3fn"
    assert error[BASELINE, wide, wide] < -100 and error["fp32", wide, wide] < -100
    assert error["fp32", half, half] < error["exact", half, half] < error["fp8", half, half] < -20
    assert error["fp8", eight, eight] < -20 and error["fp8, Muon", half, half] is None
    bytes_of = {(row["states"], row["gradient"]): row["bytes_per_parameter"] for row in rows if row["weight"] == eight}
    assert bytes_of["fp8-lm", eight] == pytest.approx(7, abs=0.05)
    assert bytes_of["fp8-min", eight] == pytest.approx(5, abs=0.05)


def test_one_tier(monkeypatch, capsys):
    monkeypatch.setattr(optimizer, "STEPS", 2)
    assert run("--states", "exact", "--parameters", "1e5", "--device", "cpu", "--json") == 0
    assert {row["states"] for row in json.loads(capsys.readouterr().out)} == {BASELINE, "exact"}


def test_an_unknown_tier(capsys):
    assert run("--states", "fp9", "--device", "cpu") == 2
    assert "Did you mean 'fp8'" in capsys.readouterr().err


def test_the_table_of_bytes_has_every_tier():
    table = optimizer_state_table()
    assert all(f"`{name}`" in table for name in TIERS)
