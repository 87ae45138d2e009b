"""What sums, scales and clips gradients, where layers are cut or blocks are in stages: four ranks on one mesh.

Lanes are stepped on the same batches, by one set of processes. What a lane is compared with has the same cut and stages
and differs in what is tested alone, or it has neither and the same sequences in a part of a batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
from torch import Tensor

import octavo
from octavo.lab.models import ModelConfig, build
from octavo.lab.train import checkpoint
from octavo.lab.train.config import OptimizerConfig, ParallelConfig
from octavo.lab.train.parallel import Launch, Ranks, _mesh, whole
from octavo.lab.train.pipelined import PipelinedTrainState
from octavo.lab.train.state_tensors import place, restore_tensors, state_tensors
from octavo.lab.train.train_state import TrainState
from octavo.numerics import sqnr_db
from octavo.tensor import local

MODEL = ModelConfig(vocab=96, dim=32, layers=2, heads=4, kv_heads=4, ffn=64, sequence=16, qkv_bias=True, qk_norm=True)
CPU = torch.device("cpu")
LAYOUTS: dict[str, dict[str, Any]] = {"cut": {"tensor": 2}, "stages": {"pipeline": 2, "activations": "stored"}}
SNR = {"bf16": 39, "fp8-block": 21, "fp8-lm": 15, "two-level": 21}
"""dB of a gradient at the least: what FSDP2 alone has to keep in tests/distributed/reduce/test_reduce.py."""
SCHEMES = {"cut": ("fp8-block", "fp8-lm", "two-level"), "stages": ("bf16", "two-level")}
"""Each scheme in a layout, and two levels beside the scheme between hosts in both."""
STATES = {"cut": "fp8", "stages": "fp32"}
"""One is skipped by octavo's optimizer, one by PyTorch's."""
GROUPS = {"layers.1.*": 1e-3, "*.wq": 1e-4}
"""The first is in one stage, the second, which wins, in both."""


# --- what the ranks do -----------------------------------------------------------------------------------------------


def everything(rank: int, count: int, directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {"whole": clipped(make(rank, {}, clip_per_group=GROUPS), parts=1)}
    for layout in LAYOUTS:
        for scheme in ("fp32", *SCHEMES[layout]):
            lane = make(rank, {"reduce": scheme, **LAYOUTS[layout]})
            found[f"{layout} {scheme}"] = gradients(lane)
            found[f"{layout} {scheme} sent"] = 0 if lane.reduction is None else lane.reduction.sent
        found[f"{layout} losses"] = losses(make(rank, LAYOUTS[layout], states=STATES[layout]), 1, 3)
        found[f"{layout} struck"] = struck(rank, layout)
        found[f"{layout} resumed"] = resumed(rank, LAYOUTS[layout], Path(directory, layout))
    found["clipped"] = clipped(make(rank, LAYOUTS["stages"], clip_per_group=GROUPS))
    found["rows"] = gradients(make(rank, {"embedding": "rows", **LAYOUTS["stages"]}))
    return found


def make(rank: int, parallel: dict[str, Any], **optimizer: Any) -> TrainState:
    settings = ParallelConfig(**{"gather": "stored", **parallel})
    own = Ranks(launch=Launch(rank, 4, ranks_per_host=2), parallel=settings, device=CPU, mesh=_mesh(settings, CPU, 4))
    model = build(MODEL, seed=0)
    octavo.convert(model, "folded")
    kind = TrainState if settings.pipeline == 1 else PipelinedTrainState
    return kind("fp8", model, OptimizerConfig(**{"clip": 0.5, **optimizer}), ranks=own)


def batch(step: int, own: Ranks) -> tuple[Tensor, Tensor]:
    ids = torch.randint(MODEL.vocab, (8, MODEL.sequence + 1), generator=torch.Generator().manual_seed(step))
    mine = ids[own.own_rows(8)]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def losses(lane: TrainState, *steps: int) -> list[tuple[float, float]]:
    """Return the loss and the norm of the gradient in each of these steps."""
    made = [lane.step(*batch(step, lane.ranks), step=step, lr=1e-2, accumulate=2) for step in steps]
    return [(float(measured.loss), float(measured.gradient_norm)) for measured in made]


def gradients(lane: TrainState, parts: int = 2) -> dict[str, Tensor]:
    """Return the gradients of a batch of those parameters that this rank has, or of some of it."""
    lane._forward_backward(*batch(1, lane.ranks), parts)
    return {name: whole(parameter.grad).clone() for name, parameter in lane.parameters.items()}


def clipped(lane: TrainState, parts: int = 2) -> dict[str, float]:
    """Return the norms of gradients that were clipped."""
    lane._forward_backward(*batch(1, lane.ranks), parts)
    lane._clip()
    return {name: float(whole(parameter.grad).norm()) for name, parameter in lane.parameters.items()}


def struck(rank: int, layout: str) -> dict[str, Any]:
    """Make three steps, of which the second overflows, on the last rank alone."""
    lane = make(rank, LAYOUTS[layout], states=STATES[layout], loss_scale="dynamic")
    rows = losses(lane, 1)
    unscale = lane.loss_scale.unscale

    def overflow(*arguments: Any) -> None:
        if rank == 3:
            local(lane.parameters["layers.1.attention.wo.weight"].grad)[-1, -1] = torch.inf
        unscale(*arguments)

    with mock.patch.object(lane.loss_scale, "unscale", overflow):
        losses(lane, 2)
    rows += losses(lane, 3)
    scale = lane.loss_scale
    return {"losses": rows, "scale": float(scale.scale), "overflows": int(scale.overflows)}


def _own(name: str) -> str:
    return name.partition(".")[2]


def resumed(rank: int, layout: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Make a third step, by the lane that has made two, and by one that goes on from its checkpoint."""
    one, other = (make(rank, {"reduce": "fp8-lm", **layout}) for _ in range(2))
    losses(one, 1, 2)
    assert one.reduction is not None and other.reduction is not None
    for mu in one.reduction.mu.values():  # so different that the next step shows whose it was
        mu /= 2.0 ** (4 * (rank % 2 if "tensor" in layout else one.ranks.pipeline_rank))
    tensors = {"fp8": {name: tensor.clone() for name, tensor in state_tensors(one).items()}}
    path = checkpoint.save(directory, 2, tensors, {"config": {}, "loader": {}}, keep=1, ranks=one.ranks)
    found = checkpoint.load(path, ranks=one.ranks, place=lambda name, *kind: placed(other, _own(name), *kind))
    own = {name: tensor for name, tensor in found.tensors["fp8"].items() if other.holds(name)}
    restore_tensors(other, own, path)
    states = [lane.reduction.state_dict() for lane in (one, other)]
    return {"states": states, "losses": [losses(lane, 3) for lane in (one, other)]}


def placed(lane: TrainState, name: str, *kind: Any) -> Tensor | None:
    return place(lane, name, *kind) if lane.holds(name) else None


# --- what they found -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(everything, 4, str(tmp_path_factory.mktemp("combined")))


def of_all(found: list[dict[str, Any]], what: str) -> dict[str, Any]:
    """Return what the ranks together have of all parameters."""
    return {name: value for rank in found for name, value in rank[what].items()}


@pytest.mark.parametrize(("layout", "scheme"), [(layout, name) for layout in LAYOUTS for name in SCHEMES[layout]])
def test_gradients_are_reduced_by_every_scheme(found: list[dict[str, Any]], layout: str, scheme: str) -> None:
    expected, reduced = of_all(found, f"{layout} fp32"), of_all(found, f"{layout} {scheme}")
    assert len(expected) == len(reduced) == len(dict(build(MODEL, seed=0).named_parameters()))
    for name, gradient in expected.items():
        assert sqnr_db(gradient, reduced[name]) > SNR[scheme], name
    assert all(rank[f"{layout} {scheme} sent"] > 0 for rank in found)


def test_of_two_levels_one_is_the_host(found: list[dict[str, Any]]) -> None:
    """Of hosts of two ranks: ranks that share layers are one host's, those that share shards are then of two hosts."""
    for layout, scheme in (("cut", "fp8-block"), ("stages", "bf16")):
        expected, reduced = of_all(found, f"{layout} {scheme}"), of_all(found, f"{layout} two-level")
        assert all(torch.equal(gradient, reduced[name]) for name, gradient in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_skips_the_step_of_all(found: list[dict[str, Any]], layout: str) -> None:
    for rank in found:
        assert rank[f"{layout} struck"] == {"losses": rank[f"{layout} losses"], "scale": 128.0, "overflows": 1}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_lane_has_the_mu_of_its_rank(found: list[dict[str, Any]], layout: str) -> None:
    for rank in found:
        went_on, resumed = rank[f"{layout} resumed"]["states"]
        assert went_on == resumed  # of this rank's units alone
        assert rank[f"{layout} resumed"]["losses"][0] == rank[f"{layout} resumed"]["losses"][1]
    mus = [rank[f"{layout} resumed"]["states"][0]["layers.1.attention_norm.weight.mu"] for rank in (found[2], found[3])]
    assert (mus[0] == mus[1]) == (layout == "stages")


def test_groups_are_clipped_by_the_norm_of_all_stages(found: list[dict[str, Any]]) -> None:
    assert of_all(found, "clipped") == pytest.approx(of_all(found, "whole"), rel=1e-4)


def test_stages_send_rows_of_the_embedding(found: list[dict[str, Any]]) -> None:
    expected, by_rows = of_all(found, "stages fp32"), of_all(found, "rows")
    assert expected.keys() == by_rows.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(by_rows[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
