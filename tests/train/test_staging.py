"""What `parallel.pipeline` refuses, before anything is started. Runs in stages are in test_pipelined.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.train.config import RunConfig
from octavo.train.staging import check_stages

Configure = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"layers": 1}}, r"model.layers: 1 blocks do not make 2 stages .* Take 2 or more"),
        ({"parallel": {"schedule": "interleaved"}}, r"model.layers: 2 blocks do not make 4 stages"),
        ({"run": {"accumulate": 1}}, r"run.accumulate: 1 parts .* pipeline of 2 ranks. Take a multiple of 2; 8 leave"),
        ({"model": {"architecture": "gpt"}}, r"model.architecture: 'gpt' does not go with parallel.pipeline = 2: only"),
        ({"model": {"tie_embeddings": True}}, r"model.tie_embeddings: 'true' .* Take false"),
        ({"run": {"recipe": "delayed"}}, r"run.recipe: 'delayed' .* keeps scales .* Take 'folded'"),
        ({"optimizer": {"gradients": "fp8"}}, r"optimizer.gradients: 'fp8'"),
    ],
)
def test_what_makes_no_stages_is_refused(configure: Configure, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_stages(staged(configure, **sections))


@pytest.mark.parametrize(
    ("version", "compiled", "message"),
    [
        ("2.11.0", "auto", r"parallel.schedule: 'zero-bubble' .* Take '1f1b' or 'interleaved', or PyTorch 2.13"),
        ("2.13.0", "on", r"run.compile: 'on' .* 'zero-bubble' goes backward through a block by parts"),
    ],
)
def test_what_goes_backward_by_parts_wants_more(
    configure: Configure, monkeypatch: pytest.MonkeyPatch, version: str, compiled: str, message: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    sections = {"model": {"layers": 4}, "parallel": {"schedule": "zero-bubble"}, "run": {"compile": compiled}}
    with pytest.raises(ConfigError, match=message):
        check_stages(staged(configure, **sections))


def test_a_llama_can_be_put_into_stages_and_what_is_not_need_not_fit(configure: Configure) -> None:
    check_stages(staged(configure))
    check_stages(configure(model={"architecture": "gpt"}, parallel={"schedule": "zero-bubble"}))


def staged(configure: Configure, **sections: dict[str, Any]) -> RunConfig:
    run = {"accumulate": 2, **sections.pop("run", {})}
    return configure(parallel={"pipeline": 2, **sections.pop("parallel", {})}, run=run, **sections)
