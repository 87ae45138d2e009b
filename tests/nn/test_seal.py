"""The proof that a tensor has not been written to: what it costs, what it cannot be given for, on which devices."""

import gc

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from octavo.nn.seal import Seal, Unwritten

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)


@every_device
def test_sealing_copies_nothing_and_neither_does_a_write(device):
    x = torch.randn(64, 64, device=device)
    pointer, values = torch._C._data_address(x), x.clone()
    seal = Seal.of(x)
    assert seal.holds(x) and torch._C._data_address(x) == pointer
    x.data.mul_(2)
    assert not seal.holds(x) and torch._C._data_address(x) == pointer and torch.equal(x, 2 * values)


@every_device
def test_a_seal_after_a_write_is_another_one(device):
    x = torch.randn(4, 4, device=device)
    first = Seal.of(x)
    x.add_(1)
    second = Seal.of(x)
    assert second.holds(x) and not first.holds(x)
    assert Seal.of(x).holds(x) and not Seal.of(x).is_new


def test_lifted_it_is_gone_unless_another_one_had_been_there():
    x = torch.randn(4, 4)
    first = Seal.of(x)
    Seal.of(x).lift()
    assert first.holds(x)
    first.lift()
    assert not first.holds(x)


def test_a_view_is_sealed_with_its_memory():
    x = torch.randn(4, 4)
    view = x[1:]
    seal = Seal.of(view)
    assert seal.holds(view) and not seal.holds(x)
    x.data[3].zero_()
    assert not seal.holds(view)


class Other(Tensor):
    pass


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3).as_subclass(Other),
        torch.frombuffer(bytearray(16), dtype=torch.float32),
        torch.zeros(3).share_memory_(),
    ],
    ids=["subclass", "memory of others", "shared memory"],
)
def test_what_cannot_be_sealed(x):
    assert Seal.of(x) is None


def moved(x: Tensor) -> Tensor:
    return x


def test_nothing_is_sealed_while_hooks_of_others_move_saved_tensors(monkeypatch):
    """They may use `record_stream`, which does not know sealed memory."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    x = torch.randn(3)
    with saved_tensors_hooks(moved, moved):
        assert Seal.of(x) is None
    with save_on_cpu():
        assert Seal.of(x) is not None
    y = torch.randn(3, requires_grad=True)
    seals = []
    checkpoint(lambda y: seals.append(Seal.of(y * 2)) or y * 2, y, use_reentrant=False)
    assert seals[0] is not None


def test_sealed_memory_is_freed():
    x = torch.randn(3)
    seal = Seal.of(x)
    del x, seal
    gc.collect()
    y = torch.randn(3)
    assert Seal.of(y).holds(y)


def test_on_a_cpu_values_are_compared_so_that_a_pointer_from_before_is_seen():
    x = torch.randn(4, 4)
    alias = x.numpy()
    before = Unwritten.of(x)
    assert before.is_provable and before.holds(x) and not torch._C._is_cow_tensor(x)
    alias[0, 0] += 1
    assert not before.holds(x)


@pytest.mark.gpu
def test_on_a_gpu_a_captured_graph_takes_a_seal_along():
    x = torch.randn(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        seal = Seal.of(y)
        z = y + 1
    graph.replay()
    assert seal.holds(y) and torch.equal(z, 2 * x + 1)
