"""Codes pinned to a tensor: taken from that very tensor, for that very target, as long as it is as it was."""

import copy
import ctypes
import io
import operator
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from octavo import kernels
from octavo.kernels.quant_spec import QuantSpec
from octavo.nn.attached_codes import attach_codes, attached_codes, attached_input, renew
from octavo.recipes import load

ROW = QuantSpec("e4m3", "row", "power_of_two")
RECIPE = load("rotated")
ROTATED = RECIPE.plan.x


@pytest.fixture
def y() -> torch.Tensor:
    y = torch.randn(4, 6)
    y.before = y.view(2, 12)
    attach_codes(y, (kernels.quantize(y, *ROW[:3]), ROW))
    return y


def test_a_layer_takes_the_sets_that_it_reads(y):
    attach_codes(y, *((kernels.quantize(y, *spec[:4], spec.rotation), spec) for spec in (ROTATED, ROW)))
    both = attached_input(y, RECIPE)
    assert (both.fprop.codes.dtype, both.second.codes.dtype) == (torch.int8, torch.float8_e4m3fn)
    alone = attached_input(y, load("folded"))
    assert alone.fprop is both.second and alone.second is None
    assert attached_input(y, load("block")) is None and attached_input(y, load("bf16")) is None
    attach_codes(y, (both.fprop, ROTATED))
    assert attached_input(y, RECIPE) == (both.fprop, None)
    attach_codes(y, (both.second, ROW))
    assert attached_input(y, RECIPE) is None


def test_taken_by_every_reader(y):
    first, second = attached_codes(y, ROW), attached_codes(y, ROW)
    assert first is second and torch.equal(first.codes.float(), kernels.quantize(y, *ROW[:3]).codes.float())


@pytest.mark.parametrize("field", [{"format": "e5m2"}, {"granularity": "1x128"}, {"scaling": "float32"}], ids=str)
def test_another_target(y, field):
    assert attached_codes(y, ROW._replace(**field)) is None


@pytest.mark.parametrize(
    "other",
    [torch.clone, lambda y: y.detach(), lambda y: y.view(2, 12), lambda y: y.data, copy.copy, copy.deepcopy],
    ids=["clone", "detach", "view", "data", "copy", "deepcopy"],
)
def test_another_tensor_carries_nothing(y, other):
    assert attached_codes(other(y), ROW) is None
    assert attached_codes(y, ROW) is not None


def test_a_shallow_copy_carries_nothing_though_it_has_the_same_memory_and_version():
    y = torch.randn(4, 6)
    versions = copy.copy(y)._version
    for _ in range(versions):
        y.add_(0)
    attach_codes(y, (kernels.quantize(y, *ROW[:3]), ROW))
    other = copy.copy(y)
    assert (other._version, torch._C._data_address(other)) == (y._version, torch._C._data_address(y))
    assert attached_codes(other, ROW) is None and attached_codes(y, ROW) is not None


def under_no_grad(y):
    with torch.no_grad():
        y.copy_(torch.zeros_like(y))


def moved(y):
    y.data = torch.randn(4, 6)


def swapped_twice(y):
    """The storage that comes last may have the address of the first."""
    y.data = torch.randn(4, 6)
    y.data = torch.randn(4, 6)


def by_an_optimizer(y):
    leaf = nn.Parameter(y.data)
    leaf.grad = torch.ones_like(leaf)
    torch.optim.SGD([leaf], lr=0.1, fused=True).step()


def by_a_pointer(y):
    ctypes.memset(y.data_ptr(), 0, 4)


def by_threads(y):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(y.data.mul_, 2).result()


def fill(out):
    out.fill_(1.0)


WRITES = {
    "in place": lambda y: y.add_(1),
    "operator": lambda y: operator.imul(y, 2),
    "element": lambda y: operator.setitem(y, (0, 0), 1.0),
    "mask": lambda y: operator.setitem(y, y > 0, 1.0),
    "no_grad": under_no_grad,
    "inference_mode": torch.inference_mode()(lambda y: y.mul_(2)),
    "view": lambda y: y[0].zero_(),
    "detached": lambda y: y.detach().mul_(2),
    "view made before": lambda y: y.before.mul_(2),
    "out": lambda y: torch.mul(y, 2, out=y),
    "out of a view": lambda y: torch.mul(y[0], 2, out=y.data[0]),
    "data": lambda y: y.data.mul_(2),
    "view of data": lambda y: y.data.view(-1)[3:].mul_(2),
    "element of data": lambda y: operator.setitem(y.data, (0, 0), 1.0),
    "copy to data": lambda y: y.data.copy_(torch.zeros(4, 6)),
    "scatter to data": lambda y: y.data.scatter_(0, torch.zeros(1, 6, dtype=torch.long), 0.0),
    "index_add": lambda y: y.data.index_add_(0, torch.tensor([0]), torch.ones(1, 6)),
    "random numbers": lambda y: y.data.normal_(),
    "initialisation": lambda y: nn.init.zeros_(y.data),
    "dropout": lambda y: F.dropout(y.data, inplace=True),
    "activation": lambda y: F.relu(y.data, inplace=True),
    "matmul": lambda y: torch.mm(torch.ones(4, 2), torch.ones(2, 6), out=y.data),
    "cat": lambda y: torch.cat([torch.ones(2, 6)] * 2, out=y.data),
    "foreach": lambda y: torch._foreach_mul_([y], 2.0),
    "foreach on data": lambda y: torch._foreach_mul_([y.data], 2.0),
    "foreach copy": lambda y: torch._foreach_copy_([y.data], [torch.zeros(4, 6)]),
    "fused optimizer": by_an_optimizer,
    "all_reduce": lambda y: dist.all_reduce(y),
    "all_reduce, asynchronous": lambda y: dist.all_reduce(y, async_op=True).wait(),
    "broadcast": lambda y: dist.broadcast(y, 0),
    "all_gather": lambda y: dist.all_gather([y], torch.ones(4, 6)),
    "all_gather_into_tensor": lambda y: dist.all_gather_into_tensor(y, torch.ones(4, 6)),
    "reduce_scatter": lambda y: dist.reduce_scatter_tensor(y, torch.ones(4, 6)),
    "scatter": lambda y: dist.scatter(y, [torch.ones(4, 6)]),
    "gather": lambda y: dist.gather(torch.ones(4, 6), [y]),
    "DLPack": lambda y: torch.from_dlpack(y).mul_(2),
    "DLPack's capsule": lambda y: torch.from_dlpack(torch.utils.dlpack.to_dlpack(y)).mul_(2),
    "NumPy": lambda y: operator.imul(y.numpy(), 2),
    "asarray": lambda y: np.asarray(y).fill(0),
    "buffer": lambda y: operator.setitem(memoryview(y.numpy()), (0, 0), 1.0),
    "pointer": by_a_pointer,
    "storage": lambda y: y.untyped_storage().fill_(0),
    "byte of the storage": lambda y: operator.setitem(y.untyped_storage(), 0, 1),
    "storage's copy": lambda y: y.untyped_storage().copy_(torch.zeros(4, 6).untyped_storage()),
    "another view of the storage": lambda y: torch.empty(0).set_(y.untyped_storage()).fill_(1.0),
    "shared memory": lambda y: y.share_memory_().zero_(),
    "set_": lambda y: y.set_(torch.zeros(4, 6)),
    "another data": moved,
    "another data twice": swapped_twice,
    "another layout": lambda y: y.set_(y.untyped_storage(), 0, (4, 6), (1, 4)),
    "transposed": lambda y: y.t_(),
    "compiled": lambda y: torch.compile(fill, backend="eager")(y),
    "compiled, on data": lambda y: torch.compile(fill, backend="aot_eager")(y.data),
    "thread": by_threads,
}


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_tensor_that_was_written_to_carries_nothing(y, write, group):
    attach_codes(y, *((kernels.quantize(y, *spec[:4], spec.rotation), spec) for spec in (ROTATED, ROW)))
    assert None not in attached_input(y, RECIPE)
    write(y)
    assert attached_codes(y, ROTATED) is None and attached_codes(y, ROW) is None and attached_input(y, RECIPE) is None


READS = {
    "sum": lambda y: y.sum(),
    "product": lambda y: y @ y.t(),
    "cast": lambda y: y.bfloat16(),
    "clone": lambda y: y.clone(),
    "linear": lambda y: F.linear(y, torch.randn(3, 6)),
    "view": lambda y: y.view(2, 12).sum(),
    "element": lambda y: y[0, 0].item(),
    "text": repr,
    "copy": copy.deepcopy,
    "saved": lambda y: (y.requires_grad_() * y.exp()).sum().backward(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_tensor_that_pytorch_has_read_carries_its_codes_still(y, read):
    read(y)
    assert attached_codes(y, ROW) is not None


def test_a_tensor_that_its_layer_has_read_carries_them_again_once_they_are_renewed(y):
    y.data_ptr()  # as a launch of a kernel does
    renew(y)
    assert attached_codes(y, ROW) is not None
    y.data.mul_(2)
    assert attached_codes(y, ROW) is None


def test_memory_that_is_not_pytorchs_cannot_be_sealed():
    y = torch.from_numpy(np.ones((4, 6), np.float32))
    attach_codes(y, (kernels.quantize(y, *ROW[:3]), ROW))
    assert attached_codes(y, ROW) is None


def test_the_memory_goes_with_the_tensor():
    y = torch.randn(4, 6)
    attach_codes(y, (kernels.quantize(y, *ROW[:3]), ROW))
    storage = weakref.ref(y.untyped_storage())
    del y
    assert storage() is None


def test_plain_tensors_carry_nothing():
    assert attached_codes(torch.randn(3), ROW) is None


def test_inference_tensors_count_no_versions_and_carry_theirs_until_they_are_written_to():
    with torch.inference_mode():
        y = torch.randn(4, 6)
        attach_codes(y, (kernels.quantize(y, *ROW[:3]), ROW))
        assert attached_codes(y, ROW) is not None
        y.mul_(2)
        assert attached_codes(y, ROW) is None


def test_files_carry_the_tensor_alone(y):
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded, y) and attached_codes(loaded, ROW) is None


def zero_element(y):
    y[0, 0] = 0.0


COMPILED_WRITES = {
    "in place": lambda y: y.add_(1),
    "view": lambda y: y[:, 2:].zero_(),
    "element": lambda y: zero_element(y),
    "out": lambda y: torch.mul(y, 2, out=y),
    "detached": lambda y: y.detach().mul_(2),
    "data": lambda y: y.data.mul_(2),
    "view of data": lambda y: y.data.view(-1)[3:].mul_(2),
    "element of data": lambda y: zero_element(y.data),
    "operator on data": lambda y: operator.imul(y.data, 2),
    "foreach": lambda y: torch._foreach_mul_([y], 2.0),
    "foreach on data": lambda y: torch._foreach_mul_([y.data], 2.0),
    "all_reduce": lambda y: dist.all_reduce(y),
    "operator by its name": lambda y: torch.ops.aten.mul_(y.data, 2),
    "set_": lambda y: y.set_(torch.zeros(4, 6)),
}


def test_compiled_code_has_them_in_its_own_graph_until_y_is_written_to(group):
    def both(x, write):
        y = x * 2
        made = kernels.quantize(y, *ROW[:3])
        attach_codes(y, (made, ROW))
        z = y + 1
        if write is not None:
            write(y)
        return y, z, made.codes, attached_codes(y, ROW), attached_codes(y, ROW._replace(format="e5m2")) is None

    def each(x):
        return [both(x, write) for write in (None, *COMPILED_WRITES.values())]

    torch._dynamo.reset()
    results = torch.compile(each, backend="eager", fullgraph=True)(torch.randn(4, 6))
    for name, (y, _, codes, taken, nothing) in zip(("none", *COMPILED_WRITES), results, strict=True):
        assert nothing and (taken is None) == (name != "none"), name
        assert taken is None or torch.equal(taken.codes.float(), codes.float())
        assert attached_codes(y, ROW) is None, name
    (y, *_), *_ = results
    assert torch.compile(lambda y: attached_codes(y, ROW) is None, backend="eager", fullgraph=True)(y)


def test_files_of_a_result_of_compiled_code_carry_the_tensor_alone():
    def both(x):
        y = x * 2
        attach_codes(y, (kernels.quantize(y, *ROW[:3]), ROW))
        return y

    y = torch.compile(both, backend="eager", fullgraph=True)(torch.randn(4, 6))
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), y)


def test_compiled_code_does_not_look(y):
    assert torch.compile(lambda y: attached_codes(y, ROW) is None, backend="eager", fullgraph=True)(y)
