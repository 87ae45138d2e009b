"""Conflicts of `[parallel]`. Tensor-parallel runs are in test_parallel.py, pipelines in test_pipelined.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.lab.train.config import RunConfig
from octavo.lab.train.parallel_checks import check_pipeline, check_tensor

Configure = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("sections", "shards", "message"),
    [
        ({"model": {"architecture": "gpt"}}, 1, r"parallel.tensor: 2: .* only architecture 'llama', not 'gpt'"),
        ({"model": {"heads": 1}}, 1, r"model.heads: 1 cannot be split evenly over 2 ranks"),
        ({"model": {"kv_heads": 1}}, 1, r"model.kv_heads: 1 cannot .* Take a multiple of 2, or fewer ranks"),
        ({"data": {"sequence": 31}}, 1, r"data.sequence: 31 cannot"),
        ({"model": {"ffn": 66}}, 2, r"model.ffn: 66 cannot be split evenly over 4 ranks .* sharded over 2"),
        ({"model": {"ffn": 65}}, 1, r"model.ffn: 65 cannot"),
        ({"run": {"recipe": "delayed"}}, 1, r"run.recipe: 'delayed' .* keeps a scale per tensor .* Take 'folded'"),
        ({"parallel": {"embedding": "rows"}}, 1, r"parallel.embedding: 'rows'"),
    ],
)
def test_tensor_conflicts(configure: Configure, sections: dict[str, Any], shards: int, message: str) -> None:
    parallel = {"tensor": 2, **sections.pop("parallel", {})}
    with pytest.raises(ConfigError, match=message):
        check_tensor(configure(parallel=parallel, **sections), shards)


def test_a_llama_is_split_and_unsplit_sizes_are_not_checked(configure: Configure) -> None:
    check_tensor(configure(parallel={"tensor": 2}), 2)
    small = {"states": "fp8-lm", "name": "muon", "gradients": "fp8"}
    check_tensor(configure(parallel={"tensor": 2}, run={"weights": "fp8"}, optimizer=small), 2)
    check_tensor(configure(parallel={"tensor": 2}, model={"qkv_bias": True, "qk_norm": True}), 2)
    whole = configure(model={"architecture": "gpt"}, run={"weights": "fp8"})
    check_tensor(whole, 1)
    for config, shards in ((configure(parallel={"tensor": 2}, model={"ffn": 66}), 2), (split(whole, tensor=2), 1)):
        with pytest.raises(ConfigError):  # the same, split, or split otherwise
            check_tensor(config, shards)


def split(config: RunConfig, **sizes: int) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, **sizes))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"layers": 1}}, r"model.layers: 1 blocks are too few for 2 stages .* Take 2 or more"),
        ({"parallel": {"schedule": "interleaved"}}, r"model.layers: 2 blocks are too few for 4 stages"),
        (
            {"run": {"accumulate": 1}},
            r"run.accumulate: 1 micro-batches .* pipeline of 2 ranks. Take a multiple of 2; 8 leave",
        ),
        ({"model": {"architecture": "gpt"}}, r"model.architecture: 'gpt' does not go with parallel.pipeline = 2: only"),
        ({"model": {"tie_embeddings": True}}, r"model.tie_embeddings: 'true' .* Take false"),
        ({"run": {"recipe": "delayed"}}, r"run.recipe: 'delayed' .* keeps scales .* Take 'folded'"),
        ({"optimizer": {"gradients": "fp8"}}, r"optimizer.gradients: 'fp8'"),
    ],
)
def test_pipeline_conflicts(configure: Configure, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_pipeline(staged(configure, **sections))


@pytest.mark.parametrize(
    ("version", "compiled", "message"),
    [
        ("2.11.0", "auto", r"parallel.schedule: 'zero-bubble' .* Take '1f1b' or 'interleaved', or PyTorch 2.13"),
        ("2.13.0", "on", r"run.compile: 'on' .* 'zero-bubble' splits the backward pass of a block"),
    ],
)
def test_a_split_backward_needs_more(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, version: str, compiled: str, message: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    sections = {"model": {"layers": 4}, "parallel": {"schedule": "zero-bubble"}, "run": {"compile": compiled}}
    with pytest.raises(ConfigError, match=message):
        check_pipeline(staged(configure, **sections))


def test_a_llama_is_split_into_stages_and_others_are_not_checked(configure: Configure) -> None:
    check_pipeline(staged(configure))
    whole = configure(model={"architecture": "gpt"}, parallel={"schedule": "zero-bubble"})
    check_pipeline(whole)
    with pytest.raises(ConfigError, match="pipeline"):
        check_pipeline(split(whole, pipeline=2))


def staged(configure: Configure, **sections: dict[str, Any]) -> RunConfig:
    run = {"accumulate": 2, **sections.pop("run", {})}
    model = {"layers": 2, **sections.pop("model", {})}
    return configure(parallel={"pipeline": 2, **sections.pop("parallel", {})}, model=model, run=run, **sections)
