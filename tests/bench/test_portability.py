"""The portability probe: four ways to the loss of one set of weights, and the alarm."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import kernels
from octavo.errors import CheckpointError, ConfigError
from octavo_bench import results
from octavo_bench.portability import alarm, probe

WAYS = ["as trained", "with slow accumulation", "with exact sums", "in BF16"]
FP8_LAYERS = 7 * 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, train_run: Callable[..., Path]) -> Callable[..., Path]:
    """Return what trains a model of a few steps, once for each recipe, and gives its directory."""
    home = tmp_path_factory.mktemp("runs")

    def run(recipe: str, **model: int) -> Path:
        done = home / recipe
        return done if done.exists() else train_run(home, recipe, model={"layers": 2, **model}, steps=3, recipe=recipe)

    return run


def test_the_four_ways(trained):
    rows = [*probe(trained("folded"), device="cpu")]
    assert [row["computation"] for row in rows] == WAYS
    assert rows[0]["heldout_loss"] == rows[1]["heldout_loss"]  # it accumulates slowly anyway
    assert rows[3]["heldout_loss"] != rows[0]["heldout_loss"]
    assert all(row["difference"] == pytest.approx(row["heldout_loss"] - rows[0]["heldout_loss"]) for row in rows)
    assert all(abs(row["difference"]) < 0.01 for row in rows) and alarm(rows) is None
    batches = 512 // (4 * 32)
    assert [row["kernels"] for row in rows] == [
        {name: batches * FP8_LAYERS} for name in ("hopper", "hopper", "exact")
    ] + [{}]
    about = {"model": "llama-38k", "recipe": "folded", "step": 3, "heldout_tokens": 512}
    assert all({key: row[key] for key in about} == about for row in rows)
    assert rows[0]["accumulator"] == "Hopper's, emulated"


def test_in_bf16_is_the_loss_that_training_reports_of_such_a_model(trained):
    summary = json.loads((trained("bf16") / "summary.json").read_text())
    assert summary["heldout_loss_bf16"] == pytest.approx(
        [*probe(trained("folded"), device="cpu")][3]["heldout_loss"], abs=0.01
    )


def test_slow_differs_where_it_was_trained_fast(trained):
    rows = [*probe(trained("folded_fast", ffn=1024, layers=1), device="cpu", tokens=128)]
    assert rows[0]["heldout_tokens"] == 128
    assert rows[1]["difference"] != 0
    assert abs(rows[1]["heldout_loss"] - rows[2]["heldout_loss"]) < abs(
        rows[0]["heldout_loss"] - rows[2]["heldout_loss"]
    )


def test_what_hopper_cannot_multiply_runs_as_this_device_does_it_and_says_so(trained):
    rows = [*probe(trained("mxfp8"), device="cpu", tokens=128)]
    assert rows[0]["accumulator"] == "this device's: no tensor core of Hopper takes 1x32 scales"
    assert "hopper" not in rows[0]["kernels"] and rows[1]["heldout_loss"] == rows[0]["heldout_loss"]


def test_the_layers_are_those_that_were_trained_in_fp8(trained, tmp_path):
    """Elsewhere a plan may come out differently: on a GPU it leaves out what gains nothing."""
    run = tmp_path / "run"
    shutil.copytree(trained("folded"), run)
    plan = json.loads((run / "plan.json").read_text())
    kept = [layer for layer in plan["layers"] if layer["name"].endswith("w2")]
    for layer in kept:
        layer["precision"] = "bf16 / bf16 / bf16"
    (run / "plan.json").write_text(json.dumps(plan))
    assert len(kept) == 2
    rows = [*probe(run, device="cpu", tokens=128)]
    assert rows[0]["kernels"] == {"hopper": FP8_LAYERS - 2}


def test_a_checkpoint_can_be_named_and_nothing_is_left_switched(trained):
    run = trained("folded")
    newest = max((run / "checkpoints").iterdir())
    assert [*probe(newest, device="cpu", tokens=128)] == [*probe(run, device="cpu", tokens=128)]
    a = kernels.quantize(torch.ones(16, 32), "e4m3", "row")
    with kernels.record() as ledger:
        kernels.gemm(a, a, torch.float32)
    assert set(ledger.gemms).isdisjoint(kernels.ACCUMULATORS)


def test_what_cannot_be_probed_is_named(trained, tmp_path):
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        [*probe(tmp_path, device="cpu")]
    with pytest.raises(ConfigError, match="trained in BF16 only"):
        [*probe(trained("bf16"), device="cpu")]


def rows_of(*differences: float) -> list[dict[str, Any]]:
    return [
        {"computation": way, "heldout_loss": 2 + d, "difference": d} for way, d in zip(WAYS, differences, strict=False)
    ]


@pytest.mark.parametrize("differences", [(0.0, 0.01, -0.02, 0.02), (0.0, 0.0, 0.0, 0.0)])
def test_no_alarm(differences):
    assert alarm(rows_of(*differences), 0.02) is None


@pytest.mark.parametrize(
    ("differences", "worst"),
    [((0.0, 0.3, 0.1, 0.2), "slow"), ((0.0, 0.0, 0.0, -0.021), "BF16"), ((0.0, 0.0, float("nan"), 0.0), "exact")],
)
def test_an_alarm_names_the_worst(differences, worst):
    message = alarm(rows_of(*differences), 0.02)
    assert message is not None and worst in message.partition(", the held-out loss")[0]


def test_command(octavo, trained, tmp_path, capsys):
    assert octavo(f"bench portability {trained('folded')} --device cpu --tokens 128 --json --write {tmp_path}") == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert [row["computation"] for row in rows] == WAYS and "in BF16" in printed.err
    written = results.latest("portability", tmp_path)
    assert written is not None and list(written.rows) == rows
    assert written.command == "octavo bench portability folded --tokens 128"

    assert octavo(f"bench portability {trained('folded')} --device cpu --tokens 128 --tolerance 0") == 1
    printed = capsys.readouterr()
    assert "octavo: alarm: the weights are not portable: " in printed.err and "More than 0 shows" in printed.err
    assert "llama-38k, folded, step 3, 128 tokens; accumulator: Hopper's, emulated" in printed.out


@pytest.mark.gpu
def test_on_a_gpu_the_emulated_accumulator_gives_the_loss_of_the_real_one(trained, monkeypatch):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not Hopper")
    run = trained("folded_fast", ffn=1024, layers=1)
    real = [*probe(run, device="cuda")]
    monkeypatch.setattr("octavo_bench.portability._is_hopper", lambda device: False)
    emulated = [*probe(run, device="cuda")]
    assert real[0]["kernels"] != emulated[0]["kernels"] and real[0]["accumulator"] == "Hopper's"
    for one, other in zip(real, emulated, strict=True):
        assert one["heldout_loss"] == pytest.approx(other["heldout_loss"], abs=1e-4)
