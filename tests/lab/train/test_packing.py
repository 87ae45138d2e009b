"""Runs on text whose documents are packed: `model.documents = "separate"`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.lab.evaluation.run import EvalSettings, evaluate_run
from octavo.lab.models import build
from octavo.lab.train import checkpoint, train
from octavo.lab.train.config import RunConfig
from octavo.lab.train.parallel_checks import check_parallel
from octavo.lab.train.setup import set_up

PACKED: dict[str, Any] = {"model": {"documents": "separate"}, "data": {"sequence": 384}}


@pytest.fixture
def packed(configure: Callable[..., RunConfig], tmp_path: Path) -> Callable[..., RunConfig]:
    """A run on documents shorter than its sequences."""
    (tmp_path / "text").mkdir()
    for i in range(60):
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(f"{i} and {j}" for j in range(3 + i % 23)))

    def make(name: str = "run", **sections: dict[str, Any]) -> RunConfig:
        data = {**PACKED["data"], "source": str(tmp_path / "text"), "heldout": 0.2}
        run = {"out": str(tmp_path / name), "baseline": False, "batch": 2, "min_gain": 0, **sections.pop("run", {})}
        model = {**PACKED["model"], **sections.pop("model", {})}
        return configure(model=model, data={**data, **sections.pop("data", {})}, run=run, **sections)

    return make


def test_the_held_out_loss_is_that_of_each_document_alone(packed: Callable[..., RunConfig]) -> None:
    setup = set_up(packed(run={"recipe": "bf16"}))
    model = build(setup.config.model, seed=3).eval()
    together, alone = [], []
    for inputs_BT, targets_BT in setup.heldout:
        for inputs_T, targets_T in zip(inputs_BT, targets_BT, strict=True):
            with torch.no_grad():
                together.append(model(inputs_T[None], targets_T[None]))
                starts = [*(inputs_T < 0).nonzero().flatten().tolist(), len(inputs_T)]
                assert starts[0] == 0 and len(starts) > 2
                plain_T = torch.where(inputs_T < 0, ~inputs_T, inputs_T)
                sums = [
                    torch.nn.functional.cross_entropy(model(plain_T[None, a:b])[0], targets_T[a:b], reduction="sum")
                    for a, b in pairwise(starts)
                ]
                alone.append(sum(sums) / (targets_T >= 0).sum())
                assert int((targets_T < 0).sum()) in (len(starts) - 2, len(starts) - 1)  # ends alone predict nothing
    torch.testing.assert_close(torch.stack(together), torch.stack(alone), rtol=1e-5, atol=0)


def test_a_packed_run_resumes_bit_for_bit_and_is_evaluated(packed: Callable[..., RunConfig]) -> None:
    constant = {"warmup": 0.0, "min_lr": 1.0}
    whole, halves = (packed(name, run={"steps": n}, optimizer=constant) for name, n in (("whole", 4), ("halves", 2)))
    train(whole)
    train(halves)
    train(packed("halves", run={"steps": 4}, optimizer=constant), resume=True)
    tensors = [checkpoint.load(run.run.out / "checkpoints" / "step-000004").tensors["fp8"] for run in (whole, halves)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name
    found = evaluate_run(whole.run.out, EvalSettings(device="cpu"))
    assert found.is_finite and found.text["tokens"] < found.text["sequences"] * 384


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}])
def test_layers_that_are_split_are_refused(packed: Callable[..., RunConfig], parallel: dict[str, Any]) -> None:
    config = packed(parallel=parallel, run={"accumulate": 2}, model={"heads": 4, "layers": 2})
    with pytest.raises(ConfigError, match=r"model\.documents: 'separate' does not go with parallel\."):
        check_parallel(config, 2, 2)


def test_a_gpt_is_refused(configure: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match=r"model\.documents: 'separate' needs architecture 'llama'"):
        configure(model={"documents": "separate", "architecture": "gpt"})
