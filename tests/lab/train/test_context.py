"""Runs whose ranks share the tokens of sequences (`parallel.context`), against one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import pytest
import torch
from ranks import Ended, launch

from octavo._util import config_reader
from octavo.errors import ConfigError
from octavo.lab.monitor.store import STATS, RunReader
from octavo.lab.train import train
from octavo.lab.train.config import ParallelConfig, RunConfig, assemble, load_preset
from octavo.lab.train.files import read_metrics
from octavo.lab.train.parallel import Launch, Ranks
from octavo.lab.train.parallel_checks import check_parallel

ERROR = 3e-5
"""Of a loss against that of one process, relative: as for ranks with sequences of their own."""

Configure = Callable[..., RunConfig]


@pytest.fixture
def make(corpus: Path, tmp_path: Path) -> Configure:
    def configure(name: str, **sections: dict[str, Any]) -> RunConfig:
        run = {"steps": 4, "log_every": 1, "baseline": False, "device": "cpu", "out": str(tmp_path / name)}
        run |= {"eval_tokens": 512, "recipe": "folded", **sections.pop("run", {})}
        data = {"source": str(corpus), "cache": str(corpus.with_name("cache")), **sections.pop("data", {})}
        parallel = {"gather": "stored", **sections.pop("parallel", {})}
        return assemble(
            load_preset("tiny", cuda=False), ("test", {"data": data, "run": run, "parallel": parallel, **sections})
        )

    return configure


def on_ranks(count: int, config: RunConfig, *flags: str) -> Ended:
    file = config.run.out.with_suffix(".json")
    file.write_text(json.dumps(config_reader.to_dict(config)))
    ended = launch(faults.octavo, count, "none", "0", "0", "train", str(file), *flags)
    assert ended.code == 0, ended.errors
    return ended


def measured(config: RunConfig, key: str) -> list[float]:
    return [line[key] for line in read_metrics(config.run.out / "metrics.jsonl") if key in line]


@pytest.mark.parametrize(
    ("count", "recipe", "parallel"), [(2, "folded", {"context": 2}), (4, "delayed", {"context": 2, "shard": 2})]
)
def test_losses_norms_and_telemetry_are_those_of_one_process(
    count: int, recipe: str, parallel: dict[str, Any], make: Configure
) -> None:
    shared = make("shared", run={"recipe": recipe}, parallel=parallel)
    alone = make("alone", run={"recipe": recipe, "accumulate": count // 2})
    on_ranks(count, shared)
    train(alone)
    # While scales are unknown, in the first step, each rank has its own.
    error = ERROR if recipe == "folded" else 2e-3
    for key, times in (("loss_fp8", 1), ("heldout_loss_fp8", 1), ("gradient_norm_fp8", 30)):
        ours, whole = measured(shared, key), measured(alone, key)
        assert len(ours) == len(whole) >= 1
        assert ours == pytest.approx(whole, rel=times * error), key
    stored = [RunReader(config.run.out) for config in (shared, alone)]
    assert stored[0].tensors == stored[1].tensors
    amax = [run.snapshot(1)[1][:, STATS.index("amax")] for run in stored]
    # As with any ranks, a loss is the mean over a rank's tokens, and gradients are averaged afterwards.
    for row, ours, whole in zip(stored[0].tensors, *(values.tolist() for values in amax), strict=True):
        if row.role in ("input", "grad_output"):  # of a sample: other rows
            times, error = (1, 0.15) if row.role == "input" else (count, 0.35)
            assert ours == pytest.approx(times * whole, rel=error), row


def test_a_run_goes_on_with_other_ranks(make: Configure) -> None:
    config = make("run", run={"steps": 2}, parallel={"context": 2}, optimizer={"warmup": 0.0, "min_lr": 1.0})
    on_ranks(2, config)
    longer = {"run": {"steps": 4}, "optimizer": {"warmup": 0.0, "min_lr": 1.0}}
    train(make("run", **longer), resume=True)
    train(alone := make("alone", **longer))
    assert measured(config, "loss_fp8") == pytest.approx(measured(alone, "loss_fp8"), rel=ERROR)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"documents": "separate"}}, r"model\.documents: 'separate' does not go with parallel\.context = 2"),
        ({"model": {"architecture": "gpt"}}, r"model\.architecture: 'gpt' does not go with parallel\.context"),
        ({"data": {"sequence": 66}}, r"data\.sequence: 66 tokens cannot be shared evenly by 2 ranks"),
        ({"run": {"recipe": "tensorwise"}}, r"run\.recipe: 'tensorwise' does not go with parallel\.context"),
        ({"run": {"compile": "on"}}, r"run\.compile: 'on' does not go with"),
        ({"parallel": {"embedding": "rows"}}, r"parallel\.embedding: 'rows' does not go with"),
        ({"parallel": {"context": 1, "shard": 2, "attention": "ring"}}, r"parallel\.attention: 'ring' has no effect"),
    ],
)
def test_what_does_not_go_with_it_is_refused(sections: dict[str, Any], said: str, make: Configure) -> None:
    parallel = {"context": 2, **sections.pop("parallel", {})}
    with pytest.raises(ConfigError, match=said):
        check_parallel(make("refused", parallel=parallel, **sections), 2, 2)


@pytest.mark.parametrize("other", ["tensor", "pipeline"])
def test_layers_that_are_split_too_are_refused(other: str, make: Configure) -> None:
    config = make("refused", parallel={"context": 2, other: 2}, run={"accumulate": 2}, model={"heads": 4})
    with pytest.raises(ConfigError, match=rf"parallel\.{other}: '2' does not go with parallel\.context = 2"):
        check_parallel(config, 4, 4)


def test_neighbours_have_one_part_of_a_batch() -> None:
    parallel = ParallelConfig(context=2, data=2)
    assert parallel.sizes(8) == {"pipeline": 1, "data": 2, "shard": 4, "tensor": 1}
    seen = [Ranks(launch=Launch(rank, 8), parallel=parallel) for rank in range(8)]
    assert [ranks.part for ranks in seen] == [0, 0, 1, 1, 2, 2, 3, 3] and seen[0].parts == 4


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["ring", "gather"])
def test_two_gpus_train_as_one(attention: str, make: Configure) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run = {"device": "cuda", "compile": "off", "graph": "off", "min_gain": 0.0}
    sections: dict[str, Any] = {"model": {"dim": 256, "heads": 4, "kv_heads": 2, "ffn": 512}, "data": {"sequence": 256}}
    shared = make("shared", run=run, parallel={"context": 2, "attention": attention}, **sections)
    alone = make("alone", run=run, **sections)
    on_ranks(2, shared)
    train(alone)
    assert measured(shared, "loss_fp8") == pytest.approx(measured(alone, "loss_fp8"), rel=2e-3)
    assert measured(shared, "heldout_loss_fp8") == pytest.approx(measured(alone, "heldout_loss_fp8"), rel=2e-3)
