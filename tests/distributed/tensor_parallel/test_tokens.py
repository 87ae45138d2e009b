"""Codes that are gathered or passed on belong to values that nobody has written to since."""

import pytest
import torch
import torch.distributed as dist

from octavo import kernels
from octavo.distributed.tensor_parallel.tokens import all_gather_codes, copy_to_region
from octavo.kernels.quant_spec import QuantSpec
from octavo.nn.attached_codes import attach_codes, attached_codes

ROW = QuantSpec("e4m3", "row", "power_of_two")


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def x():
    x = torch.randn(1, 4, 16)
    attach_codes(x, (kernels.quantize(x[0], *ROW[:3]), ROW))
    return x


def write(x: torch.Tensor) -> None:
    x.data.mul_(3)


def of_others(x: torch.Tensor) -> None:
    dist.all_reduce(x)


writes = pytest.mark.parametrize("write", [write, of_others])


@writes
def test_codes_are_passed_on_until_a_write_before_or_after(x, group, write):
    y = copy_to_region(x, group)
    assert attached_codes(y, ROW) is attached_codes(x, ROW) is not None
    write(y)
    assert attached_codes(y, ROW) is None and attached_codes(x, ROW) is None  # of the same memory
    assert attached_codes(copy_to_region(x, group), ROW) is None


@writes
def test_what_is_gathered_is_what_is_there(x, group, write):
    y = all_gather_codes(x, ROW, group)
    assert attached_codes(y, ROW) is not None
    write(x)
    codes = attached_codes(all_gather_codes(x, ROW, group), ROW)
    want = kernels.quantize(x[0], *ROW[:3])
    assert torch.equal(codes.codes.float(), want.codes.float()) and torch.equal(codes.scale, want.scale)
