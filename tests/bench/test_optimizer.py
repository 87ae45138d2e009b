"""The bench runs on a CPU, its rows are results, and the ablation tells what holds from what does not."""

import json

import pytest

from octavo.bench.ablation import CHOICES, run_ablation
from octavo.bench.facts import optimizer_state_table
from octavo.bench.optimizer import BASELINE, CASES, bench_optimizer
from octavo.bench.results import Result
from octavo.bench.tables import ablation, optimizer
from octavo.cli.main import main
from octavo.optim import TIERS


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "optimizer", *arguments])
    return ended.value.code


def result(kind, rows):
    return Result(kind=kind, date="2026-01-01", hardware="cpu", versions={}, command="", rows=tuple(rows))


def test_every_tier_is_timed():
    rows = bench_optimizer(parameters=10**5, device="cpu", repeats=1)
    assert [row["states"] for row in rows] == [case.states for case in CASES]
    assert not [row for row in rows if "error" in row]
    assert rows[0]["ratio_to_fused_adamw"] == 1 and rows[0]["bytes_per_parameter"] == 16
    assert "fp8-min" in optimizer(result("optimizer", rows))


def test_one_tier(capsys):
    assert run("--states", "exact", "--parameters", "1e5", "--device", "cpu", "--json") == 0
    assert {row["states"] for row in json.loads(capsys.readouterr().out)} == {BASELINE, "exact"}


def test_an_unknown_tier(capsys):
    assert run("--states", "fp9", "--device", "cpu") == 2
    assert "Did you mean 'fp8'" in capsys.readouterr().err


def test_the_ablation_in_small():
    chosen = [states for states in CHOICES if states.name not in ("FP8-LM #2b", "exact", "fp8-min")]
    rows = run_ablation(chosen, steps=40, seeds=(0,))
    loss = {row["states"]: row.get("heldout_loss", float("inf")) for row in rows}
    assert loss["FP8-LM #2a"] == pytest.approx(loss["FP32"], abs=0.02)
    assert loss["fp8"] == pytest.approx(loss["FP32"], abs=0.02)
    assert loss["FP8-LM #3"] > loss["FP32"] + 0.2
    assert loss["FP8-LM #4"] > loss["FP32"] + 0.2
    assert "FP8-LM #4" in ablation(result("ablation", rows))


def test_the_table_of_bytes_has_every_tier():
    table = optimizer_state_table()
    assert all(f"`{name}`" in table for name in TIERS)
