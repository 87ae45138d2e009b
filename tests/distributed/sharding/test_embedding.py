"""Sums of row gradients, and synchronisation; whole steps with such an embedding are in test_shard.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from octavo.distributed import send_tokens, shard
from octavo.distributed.sharding import embedding
from octavo.distributed.sharding.embedding import _sum_by_row
from octavo.errors import ConfigError

ROWS, DIM = 37, 8


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[0], [5], [ROWS, 0, 3], [20] * 50], ids=str)
def test_rows_are_summed_in_fp32_in_the_order_of_ranks(counts: list[int], dtype: torch.dtype, device: str) -> None:
    asked = [torch.randperm(ROWS)[:count].sort().values for count in counts]
    values = [(torch.randn(count, DIM) * 1000).to(dtype) for count in counts]
    total = torch.zeros(ROWS, DIM)
    for rows, part in zip(asked, values, strict=True):
        total.index_add_(0, rows, part.float())
    found = _sum_by_row(torch.cat(asked).to(device), torch.cat(values).to(device), ROWS)
    assert torch.equal(found.cpu(), total)


def test_another_order_would_show() -> None:
    rows, values = torch.zeros(50, dtype=torch.long), torch.randn(50, DIM)
    assert not torch.equal(_sum_by_row(rows, values, 1), _sum_by_row(rows, values.flip(0), 1))


@pytest.fixture
def alone_on_a_gpu() -> Iterator[DeviceMesh]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.gpu
def test_the_host_waits_for_nothing_where_tokens_are_sent(alone_on_a_gpu: DeviceMesh) -> None:
    net = nn.Sequential(nn.Embedding(1000, 64, device="cuda"))
    rows = net[0].weight.detach().clone()
    shard(net, alone_on_a_gpu, blocks=[], by_rows=[net[0]])
    for mode in ("default", "error"):  # the first pass makes communicators
        tokens = torch.randint(0, 1000, (2, 16))
        torch.cuda.set_sync_debug_mode(mode)
        try:
            out = net(send_tokens(tokens, torch.device("cuda"), net))
            out.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out.cpu(), rows.bfloat16().cpu()[tokens])
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.cuda.set_sync_debug_mode("error")
        try:
            net(tokens.cuda())
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_group_that_cannot_talk_on_the_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> None:
        raise RuntimeError("No backend type associated with device type cpu")

    monkeypatch.setattr(embedding, "_exchange_requests", ask)
    with pytest.raises(ConfigError, match=r'init_process_group\("cpu:gloo,cuda:nccl"\)'):
        embedding._look_up(torch.zeros(1, dtype=torch.long), None)  # type: ignore[arg-type]
