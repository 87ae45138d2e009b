"""Runs of two ranks, as torchrun starts them, against one process; and what becomes of a rank that fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import faults
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ended, launch
from torch.distributed.device_mesh import init_device_mesh

from octavo._util import config_reader
from octavo.distributed import REDUCTIONS
from octavo.errors import CheckpointError, ConfigError
from octavo.lab.monitor.store import ROLES, STATS, RunReader
from octavo.lab.train import checkpoint, train
from octavo.lab.train.config import ParallelConfig, RunConfig, assemble, load_preset
from octavo.lab.train.files import read_metrics
from octavo.lab.train.opening import open_run
from octavo.lab.train.parallel import SINGLE_PROCESS, Launch, Ranks, ranks_of
from octavo.lab.train.parallel_checks import two_level_sizes
from octavo.lab.train.sharding import make_reduction, shard_model

HERE = Path(__file__).parent
ERROR = 3e-5
"""Of a loss against that of one process, relative. Norms are summed in another order, which decides now and then how a
value is rounded to FP8: 1e-5. Where both ranks take the same sequences it is 3e-3; where the states of one layer are
lost on resuming, 1e-4."""

QUICK = {"device": "cpu", "eval_tokens": 512}
Configure = Callable[..., RunConfig]


def two_ranks(
    fault: str,
    rank: int,
    step: int,
    config: RunConfig,
    *,
    restarts: int = 0,
    by_torchrun: bool = False,
    resume: bool = False,
) -> Ended:
    """Run `octavo train` in two ranks, of which one fails at a step; see faults.py.

    By torchrun itself, ranks start as a user starts them; each then imports PyTorch, which takes 10 seconds.
    """
    file = config.run.out.with_suffix(".json")
    file.write_text(json.dumps(config_reader.to_dict(config)))
    arguments = [fault, str(rank), str(step), "train", str(file), "--json", *(["--resume"] if resume else [])]
    if not by_torchrun:
        return launch(faults.octavo, 2, *arguments, restarts=restarts)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    known = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[2] / "src")}
    started = time.monotonic()
    done = subprocess.run(
        [*launcher, "--max-restarts", str(restarts), str(HERE / "faults.py"), *arguments],
        env=known, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return Ended(done.returncode, time.monotonic() - started, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def make(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Configure:
    """Return a run of 6 steps with a checkpoint after every second one, in a directory of that name."""
    root = tmp_path_factory.mktemp("runs")

    def configure(name: str, **sections: dict[str, Any]) -> RunConfig:
        base = {
            "model": {"layers": 1},
            "data": {"source": str(corpus), "cache": str(root / "cache")},
            "run": {"steps": 6, "log_every": 1, "checkpoint_every": 2, "keep": 9, "baseline": False, **QUICK},
            "parallel": {"gather": "stored", "embedding": "rows"},
        }
        out = {"run": {"out": str(root / name), "recipe": "folded"}}
        return assemble(load_preset("tiny", cuda=False), ("test", base), ("out", out), ("case", sections))

    return configure


@pytest.fixture(scope="module")
def two(make: Configure) -> tuple[RunConfig, Ended]:
    """A run of two ranks, of which one is killed in step 5, and which torchrun then starts again."""
    config = make("two")
    return config, two_ranks("kill", 1, 5, config, restarts=1)


def losses(config: RunConfig) -> list[float]:
    lines = read_metrics(config.run.out / "metrics.jsonl")
    return [line.get("loss_fp8", line.get("heldout_loss_fp8")) for line in lines if "recipe_fp8" not in line]


def test_after_the_death_of_a_rank_the_others_name_it_and_the_run_goes_on(two: tuple[RunConfig, Ended]) -> None:
    ended = two[1]
    assert ended.code == 0, ended.errors
    assert len(ended.lines()) == 1
    assert re.fullmatch(r"octavo: error: rank 1 of 2 is gone: .*, for \d+ s, at step 5\.", ended.lines()[0])
    assert "resumed after step 4" in ended.errors


def test_the_losses_are_those_of_one_process_that_takes_as_large_parts(
    two: tuple[RunConfig, Ended], make: Configure
) -> None:
    config, ended = two
    alone = make("one", run={"accumulate": 2})
    summary = train(alone)
    assert len(losses(config)) == 6 + 1
    assert losses(config) == pytest.approx(losses(alone), rel=ERROR)
    told = json.loads(ended.out)  # by one rank, once
    assert told == json.loads((config.run.out / "summary.json").read_text())
    assert told["tokens"] == summary["tokens"]
    assert told["device"] == f"2 x {summary['device']}"
    assert told["optimizer_bytes_per_parameter"] == summary["optimizer_bytes_per_parameter"]
    heldout = [json.loads((c.run.out / "heldout.json").read_text())["fp8"] for c in (config, alone)]
    assert heldout[0] == pytest.approx(heldout[1], rel=ERROR)
    sharding = json.loads((config.run.out / "sharding.json").read_text())
    assert sharding["ranks"] == 2
    assert "e4m3 row" in {parameter["sent"] for parameter in sharding["parameters"]}


def test_a_sharded_run_that_gathers_once_begins_in_bf16_and_ends_by_another_recipe(make: Configure) -> None:
    run = {"bf16_first_steps": 1, "last_share": 0.5, "eval_every": 2}  # weights stay gathered after these
    config = make("ending", run=run, parallel={"reshard": False})
    alone = make("one that ends so", run={**run, "accumulate": 2})
    ended = two_ranks("kill", 1, 6, config, restarts=1)
    assert ended.code == 0, ended.errors
    assert "resumed after step 4" in ended.errors  # by the last recipe
    train(alone)
    assert losses(config) == pytest.approx(losses(alone), rel=ERROR)
    sharding = json.loads((config.run.out / "sharding.json").read_text())
    assert {parameter["sent"] for parameter in sharding["parameters"]} == {"float32", "float32, rows looked up"}


def test_states_that_are_whole_on_one_rank_train_as_one_process_and_resume(make: Configure) -> None:
    config = make("greedy", parallel={"data": 2, "zero": "greedy", "embedding": "whole"})
    ended = two_ranks("kill", 1, 5, config, restarts=1)
    assert ended.code == 0, ended.errors
    assert "resumed after step 4" in ended.errors
    alone = make("one for greedy", run={"accumulate": 2})
    summary = train(alone)
    assert losses(config) == pytest.approx(losses(alone), rel=ERROR)
    told = json.loads(ended.out)
    share = told["optimizer_bytes_per_parameter"] / summary["optimizer_bytes_per_parameter"]
    assert 0.3 < share < 0.7
    assert not (config.run.out / "sharding.json").exists()


@pytest.mark.gpu
def test_a_sharded_run_of_two_gpus_is_replayed(make: Configure) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = []
    for graph in ("off", "on"):
        run = {"graph": graph, "device": "cuda", "compile": "off", "min_gain": 0.0, "eval_every": 2, "steps": 8}
        parallel = {"gather": "bf16", "embedding": "whole"}
        config = make(f"graph {graph}", model={"dim": 128, "ffn": 256}, run=run, parallel=parallel)
        ended = two_ranks("none", 0, 0, config)
        assert ended.code == 0, ended.errors
        assert "kernel by kernel" not in ended.errors
        found.append(losses(config))
    assert found[1] == pytest.approx(found[0], rel=ERROR)


@pytest.mark.parametrize(("parallel", "expected"), [({}, None), ({"reshard": False}, False), ({"pipeline": 2}, False)])
def test_what_is_gathered_is_kept_if_the_run_says_so(
    parallel: dict[str, Any], expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("octavo.distributed.shard", lambda *_, **options: given.update(options))
    ranks = MagicMock(mesh=MagicMock(mesh_dim_names=("shard",)), is_greedy=False, parallel=ParallelConfig(**parallel))
    shard_model(ranks, torch.nn.Linear(2, 2))
    assert given["reshard_after_forward"] is expected


@pytest.mark.parametrize(
    ("gather", "dtype", "int8"),
    [("bf16", torch.bfloat16, False), ("int8", torch.bfloat16, True), ("stored", None, False)],
)
def test_parameters_are_gathered_in_the_format_of_the_run(
    gather: Any, dtype: torch.dtype | None, int8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("octavo.distributed.shard", lambda *_, **options: given.update(options))
    ranks = MagicMock(
        mesh=MagicMock(mesh_dim_names=("shard",)), is_greedy=False, parallel=ParallelConfig(gather=gather)
    )
    shard_model(ranks, torch.nn.Linear(2, 2))
    assert given["mp_policy"].param_dtype is dtype and given["gather_int8"] is int8


def copied(two: tuple[RunConfig, Ended], make: Configure, name: str, *, step: int, **sections: Any) -> RunConfig:
    """Return a run whose directory is that of the two ranks after a step."""
    config = make(name, **sections)
    shutil.copytree(two[0].run.out, config.run.out)
    for path in checkpoint.find(config.run.out / "checkpoints"):
        if path.name > f"step-{step:06d}":
            shutil.rmtree(path)
    return config


def test_one_process_goes_on_from_a_checkpoint_of_two_ranks(two: tuple[RunConfig, Ended], make: Configure) -> None:
    config = copied(two, make, "to-one", step=4, run={"accumulate": 2})
    summary = train(config, resume=True)
    assert losses(config)[:4] == losses(two[0])[:4]
    assert losses(config) == pytest.approx(losses(two[0]), rel=ERROR)
    assert summary["heldout_loss_fp8"] == pytest.approx(json.loads(two[1].out)["heldout_loss_fp8"], rel=ERROR)


@pytest.mark.parametrize("damaged", ["sharded/shard-00002-model-00001-of-00001.safetensors", "fp8.rank-1.safetensors"])
def test_a_damaged_part_of_any_rank_is_noticed(two: tuple[RunConfig, Ended], make: Configure, damaged: str) -> None:
    config = copied(two, make, damaged.replace("/", "-"), step=6)
    file = config.run.out / "checkpoints/step-000006" / damaged
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{re.escape(damaged)}: truncated.*resume from step-000004"):
        train(config, resume=True)


def test_a_rank_that_hangs_is_named_with_what_it_does(make: Configure) -> None:
    ended = two_ranks("hang", 1, 3, make("hung", parallel={"timeout": 2}))
    assert ended.code != 0
    assert ended.seconds < 60  # it would hang for 100
    assert len(ended.lines()) == 1
    assert re.match(r"octavo: error: rank 1 of 2 is missing: .*, for \d+ s, at step 3\.", ended.lines()[0])
    assert "rank 1 of 2, at step 3, is here:" in ended.errors
    assert "in hang" in ended.errors


def test_all_ranks_save_and_stop_if_one_is_asked_to(two: tuple[RunConfig, Ended], make: Configure) -> None:
    config = make("asked")
    ended = two_ranks("term", 1, 3, config)
    assert ended.code != 0 and "Traceback" not in ended.errors
    assert ended.errors.count("octavo: interrupted. Resume from step-000003") == 1
    assert [path.name for path in checkpoint.find(config.run.out / "checkpoints")] == ["step-000002", "step-000003"]
    assert two_ranks("none", 0, 0, config, resume=True).code == 0
    assert losses(config) == losses(two[0])


def test_ranks_split_batches_and_cover_those_they_cannot_split() -> None:
    ranks = [Ranks(launch=Launch(rank, 3)) for rank in range(3)]
    assert [r.own_rows(6) for r in ranks] == [[0, 1], [2, 3], [4, 5]]
    assert [r.own_rows(4) for r in ranks] == [[0, 1], [2, 3], [0, 1]]
    assert [r.own_rows(2, 6) for r in ranks] == [[0, 1], [0, 1], [0, 1]]
    assert [r.own_rows(1, 4) for r in ranks] == [[0, 0], [0, 0], [0, 0]]
    assert SINGLE_PROCESS.own_rows(3) == [0, 1, 2] and SINGLE_PROCESS.own_rows(2, 3) == [0, 1, 0]


def test_ranks_that_share_layers_have_the_same_part_of_a_batch() -> None:
    ranks = [Ranks(launch=Launch(rank, 4), parallel=ParallelConfig(tensor=2)) for rank in range(4)]
    assert [(r.part, r.parts) for r in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [r.own_rows(4) for r in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_single_process_that_torchrun_restarts_goes_on(make: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make("alone", run={"steps": 2, "checkpoint_every": 1, "baseline": False})
    train(config)
    shutil.rmtree(config.run.out / "checkpoints" / "step-000002")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(config)
    assert [path.name for path in checkpoint.find(config.run.out / "checkpoints")] == ["step-000001", "step-000002"]


def test_ranks_of_a_pipeline_have_the_same_part_of_a_batch() -> None:
    ranks = [Ranks(launch=Launch(rank, 8), parallel=ParallelConfig(tensor=2, pipeline=2)) for rank in range(8)]
    assert [(r.pipeline_rank, r.part, r.parts) for r in ranks] == [
        (p, part, 2) for p in (0, 1) for part in (0, 0, 1, 1)
    ]


@pytest.mark.parametrize(
    ("parallel", "of_host", "expected"),
    [
        ({}, 4, (1, 4, 4, 1)),
        ({}, 16, (1, 1, 16, 1)),
        ({"data": 2}, 4, (2, 2, 4, 1)),
        ({"tensor": 2}, 4, (1, 4, 2, 2)),
        ({"tensor": 4}, 4, (1, 4, 1, 4)),
        ({"pipeline": 4}, 8, (4, 1, 4, 1)),
        ({"pipeline": 2, "tensor": 2}, 4, (2, 2, 2, 2)),
    ],
)
def test_levels_are_of_the_ranks_that_share_shards(
    parallel: dict[str, Any], of_host: int, expected: tuple[int, ...]
) -> None:
    assert two_level_sizes(ParallelConfig(**parallel), 16, of_host) == expected


@pytest.mark.parametrize(("tensor", "of_host"), [(1, 6), (4, 2), (2, 5)])
def test_levels_want_hosts_that_go_evenly(tensor: int, of_host: int) -> None:
    with pytest.raises(ConfigError, match=rf"hosts of {of_host} ranks .*Take 'fp8-block'"):
        two_level_sizes(ParallelConfig(tensor=tensor), 16, of_host)


def test_losses_of_rows_are_taken_once_of_ranks_that_share_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everyone: list[torch.Tensor], values: torch.Tensor) -> None:
        for rank, part in enumerate(everyone):
            part.copy_(values + 10 * (rank // 2))

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    ranks = Ranks(launch=Launch(3, 4), parallel=ParallelConfig(tensor=2))
    assert ranks.gather_rows(torch.tensor([0.0, 1.0]), 3).tolist() == [0, 1, 10]


@pytest.mark.parametrize(("schedule", "known"), [("1f1b", [20, 30]), ("zero-bubble-v", [0, 10])])
def test_losses_of_rows_are_taken_of_the_last_stage(
    monkeypatch: pytest.MonkeyPatch, schedule: Any, known: list[float]
) -> None:
    def gather(everyone: list[torch.Tensor], values: torch.Tensor) -> None:
        for rank, part in enumerate(everyone):
            part.copy_(values + 10 * rank)

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    ranks = Ranks(launch=Launch(3, 4), parallel=ParallelConfig(pipeline=2, schedule=schedule))
    assert ranks.gather_rows(torch.tensor([0.0]), 2).tolist() == known


BLOCKS: dict[str, Any] = {"model": {"layers": 2}}
STAGED: dict[str, Any] = {"run": {"accumulate": 2}, **BLOCKS}


@pytest.mark.parametrize(
    ("sections", "ranks", "message"),
    [
        ({"parallel": {"shard": 4}}, 2, r"shard = 4 want 4 ranks, and 2 were started.*torchrun --nproc-per-node 4"),
        ({"parallel": {"shard": 2}}, 1, r"want 2 ranks, and 1 was started"),
        ({"parallel": {"data": 3}}, 4, r"data = 3, shard = all others want 3 ranks, and 4 were started"),
        ({"run": {"batch": 6}}, 4, r"run.batch: 6 sequences cannot be split evenly over 4 ranks.*multiple of 4"),
        ({"run": {"bf16_first_steps": 1, "weights": "fp8"}}, 2, r"bf16_first_steps.*keep one recipe"),
        (
            {"run": {"last_share": 0.1}, "parallel": {"tensor": 2, "embedding": "whole"}},
            2,
            r"last_share.*by FSDP2 alone",
        ),
        ({"run": {"device": "cuda:1"}}, 2, r"run.device: 'cuda:1' is one device, but 2 ranks"),
        ({"parallel": {"data": 2, "reduce": "bf16"}}, 2, r"parallel.reduce: 'bf16' .* on 2 ranks nothing is sharded"),
        (
            {"parallel": {"data": 2, "pipeline": 2, "reduce": "bf16"}, **STAGED},
            4,
            r"'bf16' .* on 4 ranks nothing is sharded",
        ),
        ({"parallel": {"reduce": "two-level"}, "run": {"batch": 12}}, 6, r"but 6 ranks .* hosts of 4 ranks"),
        ({"parallel": {"tensor": 2}}, 1, r"shard = all others, tensor = 2 want 2 ranks, and 1 was started"),
        ({"parallel": {"tensor": 2}, "run": {"batch": 3}}, 4, r"over 2 groups of 2 ranks.*multiple of 2"),
        ({"parallel": {"tensor": 4}}, 4, r"model.heads: 2 cannot be split evenly over 4 ranks"),
        ({"parallel": {"pipeline": 2}}, 1, r"shard = all others, pipeline = 2 want 2 ranks, and 1 was started"),
        ({"parallel": {"pipeline": 2, "tensor": 2}, "run": {"batch": 3}}, 8, r"over 2 groups of 4 ranks"),
        (
            {"parallel": {"pipeline": 2}, **BLOCKS},
            2,
            r"run.accumulate: 1 micro-batches do not fill a pipeline of 2 ranks",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(
    make: Configure, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], ranks: int, message: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(ranks, 4)))
    with pytest.raises(ConfigError, match=message), ranks_of(make("refused", **sections)):
        pass


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"data": 1}}, r"parallel\.data: '1'.*all weights. Take 2"),
        ({"optimizer": {"gradients": "fp8"}}, r"optimizer\.gradients: 'fp8'.*reduced before"),
        ({"optimizer": {"loss_scale": "dynamic"}}, r"optimizer\.loss_scale"),
        ({"optimizer": {"clip_per_group": {"*": 1.0}}}, r"optimizer\.clip_per_group"),
        ({"parallel": {"embedding": "rows"}}, r"parallel\.embedding"),
        ({"parallel": {"reduce": "two-level"}}, r"parallel\.reduce"),
    ],
)
def test_what_does_not_go_with_whole_states_is_refused(
    make: Configure, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    parallel = {"data": 2, "zero": "greedy", "embedding": "whole", **sections.get("parallel", {})}
    given = {**sections, "parallel": parallel}
    with pytest.raises(ConfigError, match=message), ranks_of(make("refused", **given)):
        pass


def test_every_reduction_can_be_named() -> None:
    named, unsaid = typing.get_args(typing.get_type_hints(ParallelConfig)["reduce"])
    assert typing.get_args(named) == REDUCTIONS and unsaid is type(None)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "bf16"),
        ({"gather": "int8"}, "bf16"),
        ({"gather": "stored"}, "fp32"),  # gradients are in FP32
        ({"pipeline": 2}, "fp32"),  # sums of several gradients travel
        ({"gather": "stored", "reduce": "bf16"}, "bf16"),
        ({"reduce": "fp32"}, "fp32"),
    ],
)
def test_by_default_a_reduction_loses_nothing(said: dict[str, Any], expected: str) -> None:
    assert ParallelConfig(**said).reduction == expected


def test_copies_of_one_rank_have_nothing_to_reduce() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "shard"))
        assert make_reduction(Ranks(parallel=ParallelConfig(data=2), mesh=mesh)) is None
        said = make_reduction(Ranks(parallel=ParallelConfig(reduce="fp8-block"), mesh=mesh))
        assert said is not None and said.name == "fp8-block"  # what was asked for is not left out in silence
    finally:
        dist.destroy_process_group()


def test_all_ranks_measure_tensors_and_the_first_writes_them(two: tuple[RunConfig, Ended]) -> None:
    run = RunReader(two[0].run.out)
    assert (run.env["world_size"], run.env["mesh"]) == (2, {"data": 1, "shard": 2})
    assert run.snapshot_steps().tolist() == [1, 2, 3, 4, 5, 6]
    _, values = run.snapshot()
    measured = {role: values[[row.role == role for row in run.tensors]] for role in ROLES}
    assert all(np.isfinite(found[:, STATS.index("amax")]).all() for found in measured.values())
    assert all(len(found) == len(measured["input"]) > 6 for found in measured.values())
    assert np.isfinite(measured["input"][:, STATS.index("flushed")]).all()


@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_guardrails_take_all_ranks_back(two: tuple[RunConfig, Ended], make: Configure, by_torchrun: bool) -> None:
    config = make(f"struck {by_torchrun}", guard={"mode": "act", "shadow_every": 0})
    struck = two_ranks("nan", 1, 4, config, by_torchrun=by_torchrun)
    assert struck.code == 0, struck.errors
    assert losses(config) == losses(two[0])
    assert struck.errors.count("back to step 0") == 1  # the first rank alone says it
    # That of step 2, the only one, was replaced as soon as possible, and written again.
    kept = [path.name for path in checkpoint.find(config.run.out / "checkpoints")]
    assert kept == [checkpoint.name_of(step) for step in (1, 2, 4, 6)]
    assert len(re.findall(r"\[transient\] nonfinite.* did not come back", struck.errors)) == 1


CUT: dict[str, dict[str, Any]] = {"parallel": {"tensor": 2, "embedding": "whole"}}
QWEN = {"qk_norm": True, "qkv_bias": True}
CUT_BY_INPUTS = "layers.0.feed_forward.w2.weight"
CUT_ERROR = {"loss_fp8": 2e-4, "gradient_norm_fp8": 4e-3, "loss_bf16": 4e-5, "gradient_norm_bf16": 5e-4}
"""Of a run whose layers are cut against one process, relative: of a row of `wo` and `w2` each rank has a part, with a
scale of its own, and sums of parts are rounded to BF16."""


@pytest.fixture(scope="module")
def cut(make: Configure) -> RunConfig:
    """A run of two ranks that share every layer, with norms of heads and biases."""
    config = make("cut", **CUT, run={"baseline": True}, model=QWEN)
    ended = two_ranks("none", 0, 0, config)
    assert ended.code == 0, ended.errors
    return config


def test_ranks_that_share_layers_train_as_one_process(cut: RunConfig, make: Configure) -> None:
    alone = make("whole", run={"baseline": True}, model=QWEN)
    train(alone)
    found, expected = (read_metrics(config.run.out / "metrics.jsonl") for config in (cut, alone))
    for key, error in CUT_ERROR.items():
        values = [[line[key] for line in lines if key in line] for lines in (found, expected)]
        assert len(values[0]) == 6
        assert values[0] == pytest.approx(values[1], rel=error), key
    heldout = [json.loads((config.run.out / "heldout.json").read_text()) for config in (cut, alone)]
    for lane in ("fp8", "bf16"):
        assert heldout[0][lane] == pytest.approx(heldout[1][lane], rel=1e-3)  # of each sequence
    run = RunReader(cut.run.out)
    assert run.env["mesh"] == {"data": 1, "shard": 1, "tensor": 2}
    whole = RunReader(alone.run.out)
    assert run.tensors == whole.tensors
    assert run.snapshot_steps().tolist() == [1, 2, 3, 4, 5, 6]
    amax, expected = (one.snapshot(1)[1][:, STATS.index("amax")] for one in (run, whole))
    error = {
        "input": 0.05,
        "grad_weight": 0.05,
        "grad_output": 0.25,
        "weight": 0.5,
    }  # of weights, other rows are sampled
    for row, found_amax, expected_amax in zip(run.tensors, amax.tolist(), expected.tolist(), strict=True):
        assert found_amax == pytest.approx(expected_amax, rel=error[row.role]), row
    layers = json.loads((cut.run.out / "tensor.json").read_text())["layers"]
    assert {layer["cut"] for layer in layers} == {"columns", "rows"}


def test_ranks_that_share_layers_go_on_bit_for_bit_after_one_has_died(make: Configure) -> None:
    wide: dict[str, dict[str, Any]] = {"model": {"dim": 128, "ffn": 256}, "run": {"weights": "fp8", "steps": 4}}
    wide["optimizer"] = {"states": "fp8", "loss_scale": "dynamic", "loss_scale_window": 2}
    whole, killed = make("cut-bytes", **CUT, **wide), make("cut-killed", **CUT, **wide)
    assert two_ranks("none", 0, 0, whole).code == 0
    ended = two_ranks("kill", 1, 4, killed, restarts=1)
    assert ended.code == 0, ended.errors
    assert "resumed after step 2" in ended.errors
    assert losses(killed) == losses(whole)
    subject = open_run(whole.run.out)
    seen = subject.setup().states[0].model.get_parameter(CUT_BY_INPUTS)
    codes, scale = (subject.trained.tensors["fp8"][f"model.{CUT_BY_INPUTS}.{part}"] for part in ("codes", "scale"))
    assert scale.shape[1] == 2  # of a row, each rank has one: who looks in one process has one for both
    values = codes.float() * scale.repeat_interleave(codes.shape[1] // 2, dim=1)
    assert torch.allclose(seen.dequantize(torch.float32), values, rtol=2**-4, atol=values.abs().max().item() * 2**-9)


def test_another_cut_does_not_go_on(cut: RunConfig, make: Configure) -> None:
    config = copied((cut, Ended(0, 0, "", "")), make, "uncut", step=4, run={"baseline": True}, model=QWEN)
    with pytest.raises(CheckpointError, match=r"parallel.embedding|parallel.tensor is 2 there and 1 here"):
        train(config, resume=True)
