"""Which rank has which stage, against what PyTorch's schedules think; every schedule can be named in a run file."""

import typing

import pytest
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from octavo.distributed.pipeline.schedules import SCHEDULES
from octavo.train.config import ParallelConfig


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
