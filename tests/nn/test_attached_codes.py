"""Codes pinned to a tensor: taken from that very tensor, for that very target, as long as it is as it was."""

import copy
import io

import pytest
import torch

from octavo import kernels
from octavo.kernels.quant_spec import QuantSpec
from octavo.nn.attached_codes import attach_codes, attached_codes

ROW = QuantSpec("e4m3", "row", "power_of_two")


@pytest.fixture
def y() -> torch.Tensor:
    y = torch.randn(4, 6)
    attach_codes(y, kernels.quantize(y, *ROW[:3]), ROW)
    return y


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
    attach_codes(y, kernels.quantize(y, *ROW[:3]), ROW)
    other = copy.copy(y)
    assert (other._version, other.data_ptr()) == (y._version, y.data_ptr())
    assert attached_codes(other, ROW) is None and attached_codes(y, ROW) is not None


def write_through_a_view(y):
    y[0].zero_()


def move(y):
    y.data = torch.randn(4, 6)


@pytest.mark.parametrize("change", [lambda y: y.add_(1), write_through_a_view, move], ids=["in place", "view", "data"])
def test_a_tensor_that_was_written_to_carries_nothing(y, change):
    change(y)
    assert attached_codes(y, ROW) is None


def test_plain_tensors_carry_nothing():
    assert attached_codes(torch.randn(3), ROW) is None


def test_inference_tensors_count_no_versions_and_carry_nothing():
    with torch.inference_mode():
        y = torch.randn(4, 6)
        attach_codes(y, kernels.quantize(y, *ROW[:3]), ROW)
        assert attached_codes(y, ROW) is None


def test_files_carry_the_tensor_alone(y):
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded, y) and attached_codes(loaded, ROW) is None


@pytest.mark.parametrize("write", [False, True])
def test_compiled_code_has_them_in_its_own_graph_until_y_is_written_to(write):
    def both(x):
        y = x * 2
        made = kernels.quantize(y, *ROW[:3])
        attach_codes(y, made, ROW)
        if write:
            y[:, 2:].zero_()
        return y, made.codes, attached_codes(y, ROW), attached_codes(y, ROW._replace(format="e5m2")) is None

    y, codes, found, nothing = torch.compile(both, backend="eager", fullgraph=True)(torch.randn(4, 6))
    assert nothing and (found is None) == write and (write or torch.equal(found.codes.float(), codes.float()))
    assert attached_codes(y, ROW) is None
    assert torch.compile(lambda y: attached_codes(y, ROW) is None, backend="eager", fullgraph=True)(y)
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), y)


def test_compiled_code_does_not_look(y):
    assert torch.compile(lambda y: attached_codes(y, ROW) is None, backend="eager", fullgraph=True)(y)
