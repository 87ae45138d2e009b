"""Stages of two ranks, sharded, forward alone: losses of the whole model; and the stages that schedules give a rank."""

import typing

import pytest
import ranks
import torch
from sharded import FP32, SHAPE, batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

import octavo
from octavo.distributed import shard
from octavo.distributed.pipeline import SCHEDULES, Pipeline
from octavo.errors import ConfigError
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama
from octavo.lab.models.stages import stages
from octavo.lab.train.config import ParallelConfig
from octavo.tensor import local


def llama():
    torch.manual_seed(0)
    model = Llama(ModelConfig(**{**SHAPE, "layers": 4}))
    octavo.convert(model, "folded")
    return model


def losses(name, rank, count):
    """Return the losses of a batch, of one process and of stages, before and after weights were changed."""
    schedule, alone = SCHEDULES[name], llama()
    mesh = init_device_mesh("cpu", (count, 1), mesh_dim_names=("pipeline", "data"))
    parts, places = stages(llama(), count * schedule.stages), schedule.places(count)
    own = {i: part for i, part in enumerate(parts) if places[i] == rank}
    for part in own.values():
        shard(part, mesh["data"], mp_policy=FP32, reshard_after_forward=False)
    group, stream = mesh.get_group("pipeline"), {"width": SHAPE["dim"], "stream": torch.float32, "sent": "as is"}
    pipeline = Pipeline(own, schedule, group, device=torch.device("cpu"), **stream)
    weights = [*alone.parameters(), *(p for part in own.values() for p in part.parameters())]
    tokens, targets = batch(0, 3)
    assert "3 sequences" in ranks.refusal(ConfigError, lambda: pipeline.step(tokens, targets, 2))
    rows = []
    for _ in range(2):
        with torch.no_grad():
            expected = alone(tokens, targets, by_sequence=True).tolist()
        found = pipeline.loss(tokens, targets, by_sequence=True)
        mean = pipeline.loss(tokens, targets)
        rows.append((expected, None if found is None else found.tolist(), None if mean is None else mean.item()))
        with torch.no_grad():
            for weight in weights:
                local(weight).mul_(1.25)
    return rows


def masked(rank, count):
    """Return losses and gradients of batches of which few targets count, of one process and of this rank's stages."""
    rows = []
    for counted in ([2, 8, 24, 1], [0, 3, 0, 0]):  # of each sequence
        tokens, targets = (ids.clone() for ids in batch(0, 4))
        for sequence, number in zip(targets, counted, strict=True):
            sequence[number:] = -100
        alone, parts = (Llama(ModelConfig(**{**SHAPE, "layers": 4})) for _ in range(2))
        parts.load_state_dict(alone.state_dict())
        expected = alone(tokens, targets)
        expected.backward()
        group = torch.distributed.group.WORLD
        own, stream = {rank: stages(parts, count)[rank]}, {"width": SHAPE["dim"], "stream": torch.float32}
        pipeline = Pipeline(own, SCHEDULES["1f1b"], group, device=torch.device("cpu"), **stream, sent="as is")
        loss = pipeline.step(tokens, targets, 4)
        gradients = [(alone.get_parameter(name).grad, p.grad) for name, p in own[rank].named_parameters()]
        rows.append((expected.item(), None if loss is None else loss.item(), gradients))
    return rows


def two_ranks(rank, count):
    found = {name: losses(name, rank, count) for name in ("1f1b", "interleaved", "zero-bubble-v")}
    return {**found, "masked": masked(rank, count)}


@pytest.fixture(scope="module")
def found():
    return ranks.run(two_ranks, 2)


@pytest.mark.parametrize(("schedule", "knowing"), [("1f1b", 1), ("interleaved", 1), ("zero-bubble-v", 0)])
def test_losses_are_those_of_the_whole_model_also_after_its_weights_changed(found, schedule, knowing):
    for expected, by_sequence, mean in found[knowing][schedule]:
        assert by_sequence == expected
        assert mean == pytest.approx(sum(expected) / 3, rel=1e-6)
    assert all(row[1:] == (None, None) for row in found[1 - knowing][schedule])
    before, after = (row[0] for row in found[knowing][schedule])
    assert before != after


def test_every_target_that_counts_has_the_same_weight(found):
    for rank, result in enumerate(found):
        for expected, loss, gradients in result["masked"]:
            assert loss == (pytest.approx(expected, rel=1e-6) if rank == 1 else None)
            for one, other in gradients:
                torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_are_where_pytorch_looks_for_them(name, ranks):
    schedule = SCHEDULES[name]
    places = schedule.places(ranks)
    style = "v" if schedule.is_v else "loop"
    assert dict(enumerate(places)) == generate_stage_to_rank_mapping(ranks, schedule.stages * ranks, style)
    assert places[-1] == ParallelConfig(pipeline=ranks, schedule=name).last


def test_every_schedule_can_be_named():
    assert typing.get_args(typing.get_type_hints(ParallelConfig)["schedule"]) == tuple(SCHEDULES)
