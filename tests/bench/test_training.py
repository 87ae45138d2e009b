"""The bench of whole training steps: two ranks of a tiny model in every layout, and mistakes that are named."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import launch
from torch.distributed.device_mesh import init_device_mesh

from octavo.errors import ConfigError
from octavo.lab.cli.main import main
from octavo_bench import distributed as training
from octavo_bench.distributed import KIND, WORKLOADS, Work, bench_distributed
from octavo_bench.results import Result, load, write
from octavo_bench.sharded import Implementation, Layout, part_of_batch


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "distributed", *arguments])
    return int(ended.value.code or 0)


def measure(*flags: str) -> None:
    main(["bench", "distributed", *flags])


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """What two ranks measured."""
    layouts = [part for text in ("data", "tensor=2", "pipeline=2") for part in ("--layout", text)]
    flags = ["--workload", "tiny-model", *layouts, "--only", "octavo folded, fp8-block", "--steps", "1", "--json"]
    ended = launch(measure, 2, *flags)
    assert ended.code == 0, ended.errors[-3000:]
    found: list[dict[str, Any]] = json.loads(ended.out)
    return found


def of(rows: list[dict[str, Any]], layout: str, implementation: str) -> dict[str, Any]:
    return next(row for row in rows if (row["layout"], row["implementation"]) == (layout, implementation))


def test_every_layout_and_implementation_has_a_row(rows: list[dict[str, Any]]) -> None:
    names = ("bf16", "octavo folded, fp8-block")
    assert [(row["layout"], row["implementation"]) for row in rows] == [
        (layout, name) for layout in ("data", "tensor 2", "pipeline 2") for name in names
    ]
    assert all(training.KIND.keys.keys() <= row.keys() and "error" not in row for row in rows)


def test_layouts_learn_the_same(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        bf16 = of(rows, "data", "bf16")
        assert row["losses"] == pytest.approx(bf16["losses"], abs=5e-3), row["layout"]
    assert of(rows, "pipeline 2", "bf16")["losses"] == pytest.approx(of(rows, "data", "bf16")["losses"], abs=2e-4)


def test_ratios_are_to_bf16_of_the_same_layout(rows: list[dict[str, Any]]) -> None:
    for layout in ("data", "tensor 2", "pipeline 2"):
        bf16, octavo = of(rows, layout, "bf16"), of(rows, layout, "octavo folded, fp8-block")
        assert bf16["ratio_to_bf16"] == 1.0
        assert octavo["ratio_to_bf16"] == pytest.approx(bf16["ms"] / octavo["ms"], abs=1e-3)


def test_fewer_bytes_are_sent(rows: list[dict[str, Any]]) -> None:
    bf16, octavo = of(rows, "data", "bf16"), of(rows, "data", "octavo folded, fp8-block")
    config = WORKLOADS["tiny-model"].model
    parameters = 2 * config.vocab * config.dim + config.layers * (3 * config.dim * config.ffn + 3 * config.dim**2)
    gathered, reduced = (bf16["wire_bytes_by_kind"][kind] for kind in ("all_gather", "reduce_scatter"))
    # Two micro-batches: weights twice each, in BF16, the root's once; gradients once each, in FP32.
    assert 3 * 2 * parameters < gathered < 4 * 2.1 * parameters and 8 * parameters < reduced < 8.3 * parameters
    assert octavo["wire_bytes"] < 0.45 * bf16["wire_bytes"]


def test_ranks_share_a_step() -> None:
    config = WORKLOADS["tiny-model"].model
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        tokens, targets = part_of_batch(config, 3, 7, init_device_mesh("cpu", (1,)))
    finally:
        torch.distributed.destroy_process_group()
    assert tokens.shape == targets.shape == (3, config.sequence)
    assert torch.equal(tokens[:, 1:], targets[:, :-1]) and int(tokens.max()) < config.vocab


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (Work(workload="tiny-modell"), "Did you mean 'tiny-model'"),
        (Work(workload="tiny-model", only=("octavo foldet",)), "Did you mean 'octavo folded'"),
    ],
)
def test_mistakes_are_named(work: Work, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        [*bench_distributed(work)]


@pytest.mark.parametrize("text", ["tensor", "tensor=1", "tensor=x", "pipeline=2,fp4", ""])
def test_a_layout_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert run("--layout", text) == 2 and "is none of data, tensor=N" in capsys.readouterr().err


def test_it_says_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2 and "torchrun --nproc-per-node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(), "data"),
        (Layout(tensor=2), "tensor 2"),
        (Layout(stages=2, sent="fp8"), "pipeline 2, FP8 between stages"),
    ],
)
def test_layouts_have_names(layout: Layout, words: str) -> None:
    assert str(layout) == words


def test_what_there_is_no_time_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(key, value)
    rows = [*bench_distributed(Work(workload="tiny-model", only=("octavo folded",), seconds=-1.0))]
    assert [row["implementation"] for row in rows] == ["bf16", "octavo folded"]
    assert all("not started" in row["error"] for row in rows)


def test_a_speed_beside_nothing_is_an_error_and_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(key, value)

    def measure(_: object, implementation: Implementation, *others: object) -> dict[str, Any]:
        if implementation.name == "bf16":
            raise torch.OutOfMemoryError("full")
        return {"ms": 80.0, "tokens_per_s_per_gpu": 100.0, "peak_gib": 0.0, "wire_bytes": 1}

    monkeypatch.setattr(training, "_measure", measure)
    rows = [*bench_distributed(Work(workload="tiny-model", only=("octavo folded",)))]
    assert rows[0]["error"] == "OutOfMemoryError: full" and "BF16 failed; 80.00 ms" in rows[1]["error"]
    kept = Result(kind="distributed", date="2026-11-21", hardware="x", versions={}, command="c", rows=tuple(rows))
    assert load(write(kept, tmp_path)) == kept


def test_rows_without_traffic_are_written_and_shown(tmp_path: Path) -> None:
    about = {
        "workload": "tiny-model",
        "layout": "context 2",
        "ranks": 2,
        "compiled": False,
        "shape": asdict(WORKLOADS["tiny-model"].model),
    }
    timed = {"ms": 2.0, "waited_ms": 3.0, "tokens_per_s_per_gpu": 100.0, "peak_gib": 1.0, "losses": [5.0, 4.0]}
    rows = tuple(
        about | timed | {"implementation": name, "ratio_to_bf16": ratio}
        for name, ratio in (("bf16", 1.0), ("octavo rotated", 1.5))
    )
    kept = Result(kind="distributed", date="2026-11-29", hardware="x", versions={}, command="c", rows=rows)
    assert load(write(kept, tmp_path)) == kept
    assert "| context 2 | octavo rotated | 100 | 1.50 |" in KIND.markdown(rows)
