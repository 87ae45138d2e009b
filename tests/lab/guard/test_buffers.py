"""Buffers that a forward pass writes, replaces, creates or cannot write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from octavo.lab.guard.buffers import overwrite, tensors_of, untouched_buffers


def holding(**buffers: Any) -> nn.Module:
    """Return a module with a parameter and these buffers, not part of checkpoints."""
    module = nn.Linear(2, 2)
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer, persistent=False)
    return module


def test_buffers_are_restored_in_their_own_memory_also_after_an_error() -> None:
    written, replaced = torch.zeros(3), torch.ones(2, dtype=torch.float8_e4m3fn)
    module = holding(written=written, replaced=replaced, created=None)
    with pytest.raises(ZeroDivisionError), untouched_buffers(module):
        module.written += 1
        module.replaced, module.created = torch.zeros(2), torch.zeros(2)
        replaced.fill_(4.0)
        raise ZeroDivisionError
    assert module.written is written and module.replaced is replaced and module.created is None
    assert written.tolist() == [0, 0, 0] and replaced.float().tolist() == [1, 1]


def test_parameters_may_change() -> None:
    module = holding(written=torch.zeros(3))
    with untouched_buffers(module), torch.no_grad():
        module.weight.fill_(3.0)
    assert bool((module.weight == 3).all())


def test_buffers_that_no_pass_can_write_are_left_alone() -> None:
    with torch.inference_mode():
        table = torch.arange(4)
    module = holding(table=table, expanded=torch.ones(1).expand(5), sparse=torch.eye(3).to_sparse())
    saved = {name: tensor.detach().clone() for name, tensor in tensors_of(module).items()}
    assert {"weight", "bias", "table", "expanded", "sparse"} == saved.keys()
    with untouched_buffers(module):
        pass
    overwrite(tensors_of(module), saved)
    assert module.table.tolist() == [0, 1, 2, 3] and module.expanded.tolist() == [1] * 5
    assert torch.equal(module.sparse.to_dense(), torch.eye(3))
