"""Runs whose blocks are in stages on two ranks, against one process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pipelines
import pytest
import torch
from ranks import launch
from torch.torch_version import TorchVersion

from octavo._util import config_reader
from octavo.kernels.sample import STATS
from octavo.lab.monitor.store import RunReader
from octavo.lab.train import checkpoint, train
from octavo.lab.train.config import RunConfig, assemble, load_preset
from octavo.lab.train.files import read_metrics

ERROR = 1e-4
"""Of losses and norms against one process, relative: norms are summed in another order, and clip what is learnt. That
decides now and then how a value is rounded: 3e-5."""
BF16_ERROR = 2e-3
QUICK = {"device": "cpu", "telemetry_every": 1, "histograms_every": 3, "eval_tokens": 512}
V = "zero-bubble-v" if TorchVersion(torch.__version__) >= "2.13" else "interleaved"

FOLDED = {"recipe": "folded"}
SHORT = {
    "run": {"steps": 2, "baseline": False},
    "optimizer": {"loss_scale": "dynamic", "clip_per_group": {"*.wq": 1e-3, "layers.3.*": 1e-2}},
}

Configure = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def make(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Configure:
    """Return a run of 6 steps with a checkpoint after every second one, in a directory of that name."""
    root = tmp_path_factory.mktemp("pipelines")

    def configure(name: str, **sections: dict[str, Any]) -> RunConfig:
        base = {
            "model": {"layers": 4},
            "data": {"source": str(corpus), "cache": str(root / "cache")},
            "run": {"steps": 6, "accumulate": 2, "log_every": 1, "checkpoint_every": 2, "keep": 9, **QUICK} | FOLDED,
            "optimizer": {"clip": 0.5},
        }
        out = {"run": {"out": str(root / name)}}
        return assemble(load_preset("tiny", cuda=False), ("test", base), ("out", out), ("case", sections))

    return configure


@pytest.fixture(scope="module")
def piped(make: Configure) -> dict[str, RunConfig]:
    """Runs of two ranks; see pipelines.py."""
    exact = {"pipeline": 2, "gather": "stored", "activations": "stored"}
    runs = {
        "plain": make("plain", parallel=exact),
        "resumed": make("resumed", parallel=exact),
        "struck": make("struck", parallel=exact, guard={"mode": "act", "shadow_every": 2}, run={"baseline": False}),
        "v": make("v", parallel={"pipeline": 2, "schedule": V, "embedding": "rows"}, **SHORT),
    }
    files = []
    for name, config in runs.items():
        files.append(config.run.out.with_name(f"{name}.json"))
        files[-1].write_text(json.dumps(config_reader.to_dict(config)))
    ended = launch(pipelines.run_all, 2, *map(str, files))
    assert ended.code == 0, ended.errors
    return runs


@pytest.fixture(scope="module")
def alone(make: Configure) -> tuple[RunConfig, dict[str, Any]]:
    """The run of one process, and its summary."""
    config = make("alone")
    return config, train(config)


def lines(config: RunConfig) -> list[dict[str, Any]]:
    """Return what a run measured, without what it took."""
    found = read_metrics(config.run.out / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key.split("_")[0] in MEASURED} for line in found]


MEASURED = {"step", "loss", "gradient", "heldout"}


def assert_near(found: RunConfig, expected: RunConfig, error: float, steps: int = 6) -> None:
    names = [f"{what}_{lane}" for what in ("loss", "gradient_norm") for lane in ("fp8", "bf16")]
    rows = [[[line.get(name) for name in names] for line in lines(config)[:steps]] for config in (found, expected)]
    assert len(rows[0]) == steps
    pairs = [pair for row in zip(*rows, strict=True) for pair in zip(*row, strict=True) if pair[0] is not None]
    assert len(pairs) >= 2 * steps
    assert all(a == pytest.approx(b, rel=error) for a, b in pairs)


def test_stages_train_as_one_process(piped: dict[str, RunConfig], alone: tuple[RunConfig, dict[str, Any]]) -> None:
    assert_near(piped["plain"], alone[0], ERROR)
    out = piped["plain"].run.out
    heldout = [json.loads((directory / "heldout.json").read_text()) for directory in (out, alone[0].run.out)]
    for lane in ("fp8", "bf16"):
        assert heldout[0][lane] == pytest.approx(heldout[1][lane], rel=1e-4)  # of each sequence
    summary = json.loads((out / "summary.json").read_text())
    assert summary["parameters"] == alone[1]["parameters"]
    stages = json.loads((out / "pipeline.json").read_text())["stages"]
    assert stages == [{"rank": 0, "blocks": [0, 1]}, {"rank": 1, "blocks": [2, 3]}]
    assert RunReader(out).env["mesh"] == {"data": 1, "shard": 1, "pipeline": 2}


def test_a_resumed_run_has_the_bits_of_one_that_went_on(piped: dict[str, RunConfig]) -> None:
    assert lines(piped["resumed"]) == lines(piped["plain"])
    written = [
        checkpoint.load(checkpoint.find(piped[name].run.out / "checkpoints")[-1]) for name in ("plain", "resumed")
    ]
    for one, other in zip(*(found.tensors["fp8"].items() for found in written), strict=True):
        assert one[0] == other[0]
        assert torch.equal(one[1], other[1])


def test_the_first_rank_writes_the_tensors_of_all_stages(
    piped: dict[str, RunConfig], alone: tuple[RunConfig, dict[str, Any]]
) -> None:
    run, resumed, whole = (RunReader(config.run.out) for config in (piped["plain"], piped["resumed"], alone[0]))
    assert run.tensors == whole.tensors
    assert run.snapshot_steps().tolist() == whole.snapshot_steps().tolist() == [1, 2, 3, 4, 5, 6]
    found, expected, again = (np.stack([one.snapshot(step)[1] for step in (1, 6)]) for one in (run, whole, resumed))
    assert np.array_equal(found[1], again[1], equal_nan=True)
    roles = np.array([row.role for row in run.tensors])
    read = np.isin(roles, ["input", "grad_output"])  # weights arrive as codes, and gradients of ranks are clipped
    assert read.sum() == 2 * 7 * 4
    assert np.array_equal(found[0, read], expected[0, read], equal_nan=True)  # later weights differ, in their last bits
    amax = found[0, :, STATS.index("amax")]
    assert amax == pytest.approx(expected[0, :, STATS.index("amax")], rel=0.1)  # that of a code may be rounded
    for layer, role in (("layers.0.attention.wq", "input"), ("layers.3.feed_forward.w2", "grad_output")):
        (_, first, bins), (_, first_alone, of_one) = (one.histogram(layer, role, 3) for one in (run, whole))
        assert first == first_alone
        assert bins.sum() == pytest.approx(of_one.sum(), rel=0.01)


def test_guardrails_take_all_stages_back(piped: dict[str, RunConfig]) -> None:
    kept = [[line["loss_fp8"] for line in lines(piped[name]) if "loss_fp8" in line] for name in ("struck", "plain")]
    assert kept[0] == kept[1]
    assert RunReader(piped["struck"].run.out).events(rule="nonfinite")


def test_the_last_stage_may_be_on_the_first_rank(piped: dict[str, RunConfig], make: Configure) -> None:
    short = make("short", **SHORT)
    summary = train(short)
    assert_near(piped["v"], short, BF16_ERROR, steps=2)
    told = json.loads((piped["v"].run.out / "summary.json").read_text())
    assert told["heldout_loss_fp8"] == pytest.approx(summary["heldout_loss_fp8"], rel=BF16_ERROR)


def test_one_process_goes_on_from_stages(piped: dict[str, RunConfig], make: Configure) -> None:
    config = make("to-one", parallel={"gather": "stored", "activations": "stored"})
    shutil.copytree(piped["plain"].run.out, config.run.out)
    shutil.rmtree(config.run.out / "checkpoints/step-000006")
    train(config, resume=True)
    assert_near(config, piped["plain"], ERROR)
