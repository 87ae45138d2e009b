"""How rows' gradients are summed; whole steps with such an embedding are in test_shard.py."""

from __future__ import annotations

import pytest
import torch

from octavo.distributed.sharding.embedding import _sums

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
    found = _sums(torch.cat(asked).to(device), torch.cat(values).to(device), ROWS)
    assert torch.equal(found.cpu(), total)


def test_another_order_would_show() -> None:
    rows, values = torch.zeros(50, dtype=torch.long), torch.randn(50, DIM)
    assert not torch.equal(_sums(rows, values, 1), _sums(rows, values.flip(0), 1))
