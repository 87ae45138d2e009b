"""One rank without the others: each collective gives what it would where all ranks hold the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from alone import join_alone
from torch.distributed.device_mesh import init_device_mesh

RANKS = 3


@pytest.fixture
def group() -> Iterator[None]:
    join_alone(RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("op", "factor"), [(dist.ReduceOp.SUM, RANKS), (dist.ReduceOp.AVG, 1), (dist.ReduceOp.MAX, 1)])
def test_a_reduction_of_equals(group: None, op: dist.ReduceOp, factor: int) -> None:
    x = torch.arange(6.0)
    summed, part = x.clone(), torch.full((2,), torch.nan)
    dist.all_reduce(summed, op)
    dist.reduce_scatter_tensor(part, x, op)
    assert torch.equal(summed, factor * x) and torch.equal(part, factor * x[:2])


def test_a_gather_of_equals(group: None) -> None:
    x = torch.arange(4.0).view(2, 2)
    whole, each = torch.full((2 * RANKS, 2), torch.nan), [torch.empty(2, 2) for _ in range(RANKS)]
    dist.all_gather_into_tensor(whole, x)
    dist.all_gather(each, x)
    assert torch.equal(whole, x.repeat(RANKS, 1)) and all(torch.equal(one, x) for one in each)


def test_each_receives_what_it_sends_itself(group: None) -> None:
    sent = torch.arange(6)
    received = torch.empty(6, dtype=torch.int64)
    dist.all_to_all_single(received, sent)
    assert received.tolist() == [0, 1] * RANKS


def test_messages_of_other_sizes_repeat_it(group: None) -> None:
    sent, received = torch.arange(6), torch.full((7,), -1)
    dist.all_to_all_single(received, sent, [2, 1, 4], [2, 3, 1])
    assert received.tolist() == [0, 1, 0, 0, 1, 0, 1]
    dist.all_to_all_single(received, sent, [2, 1, 4], [0, 5, 1])
    assert received.tolist() == [0] * 7


def test_a_mesh_has_groups_of_its_own(group: None) -> None:
    mesh = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("one", "all"))
    x = torch.ones(2)
    dist.all_reduce(x, group=mesh.get_group("one"))
    assert x.tolist() == [1, 1] and mesh["all"].size() == RANKS
    dist.all_reduce(x, group=mesh.get_group("all"))
    assert x.tolist() == [RANKS, RANKS]
