"""The helper of these tests: results come back in order, and whoever fails is named."""

import os
import time

import pytest
import ranks
import torch
import torch.distributed as dist


def total(rank, world, start):
    value = start + rank
    dist.all_reduce(value)
    return {"rank": rank, "total": value}


def fails(rank, world):
    if rank == 1:
        raise ValueError("this rank has had enough")
    dist.barrier()


def dies(rank, world):
    if rank == 0:
        os._exit(7)
    time.sleep(60)


def test_results_come_back_in_order():
    found = ranks.run(total, 2, torch.tensor([1.0]))
    assert [r["rank"] for r in found] == [0, 1] and [r["total"].item() for r in found] == [3.0, 3.0]


@pytest.mark.parametrize(("function", "words"), [(fails, "rank 1 ended with 1"), (dies, "rank 0 ended with 7")])
def test_a_rank_that_fails_is_named(function, words):
    with pytest.raises(ranks.RanksFailed, match=words) as failure:
        ranks.run(function, 2, timeout=600)  # that of the whole suite: it does not wait for the other
    assert "had enough" in str(failure.value) or function is dies
