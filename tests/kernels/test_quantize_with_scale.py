"""Quantising with a known scale: against the specification, in every case of the decision."""

import pytest
import torch

from octavo import kernels
from octavo.errors import ConfigError
from octavo.kernels import QuantSpec, ScaleRef
from octavo.numerics import E4M3, PER_TENSOR, dequantize, quantize

TARGET = QuantSpec("e4m3", "tensor", "float32")


def stored(scale: float, **how: bool) -> ScaleRef:
    return ScaleRef(torch.tensor([[7.0, 7.0], [scale, 0.0]]), 1, **how)


def codes(quantized) -> torch.Tensor:
    return quantized.codes.view(torch.uint8)


def test_an_unknown_scale_is_the_tensors_own():
    x = torch.randn(40, 24)
    here = stored(0.0)
    rows, columns = kernels.quantize_with_scale([x], here, TARGET, TARGET)
    expected = quantize(x, E4M3, PER_TENSOR, "float32")
    assert torch.equal(codes(rows), codes(expected)) and torch.equal(rows.scale, expected.scale)
    assert torch.equal(codes(columns), codes(expected).t()) and columns.codes.is_contiguous()
    assert here.scale_and_amax.tolist() == [[7, 7], [0, float(x.abs().max())]]


def test_a_known_scale_is_used_and_what_is_larger_saturates():
    x = torch.tensor([[1.0, -500.0, 3.0, 448.0]])
    here = stored(0.5)
    rows, columns = kernels.quantize_with_scale([x], here, TARGET, None)
    assert columns is None and rows.scale.tolist() == [[0.5]]
    assert dequantize(rows).tolist() == [[1.0, -224.0, 3.0, 224.0]]
    assert here.scale_and_amax[1].tolist() == [0.5, 500.0]


@pytest.mark.parametrize(("amax", "scale"), [(224.0, 0.5), (224.1, 224.1 / 448), (1.0, 0.5)])
def test_at_once_its_own_scale_only_where_it_would_saturate(amax, scale):
    rows, _ = kernels.quantize_with_scale([torch.full((2, 2), amax)], stored(0.5, just_in_time=True), TARGET, None)
    assert rows.scale == torch.tensor(scale, dtype=torch.float64).float()


def test_the_scale_that_comes_back_is_nobody_elses():
    here = stored(0.5)
    rows, _ = kernels.quantize_with_scale([torch.ones(2, 2)], here, TARGET, None)
    here.scale_and_amax[1, 0] = 9.0
    assert rows.scale.item() == 0.5


def test_not_to_observe_leaves_the_cell_alone():
    here = stored(0.5, update_amax=False)
    kernels.quantize_with_scale([torch.full((2, 2), 9.0)], here, TARGET, None)
    assert here.scale_and_amax[1].tolist() == [0.5, 0.0]


def test_an_amax_never_falls():
    here = stored(0.5)
    for value in (3.0, 1.0):
        kernels.quantize_with_scale([torch.full((2, 2), value)], here, TARGET, None)
    assert here.scale_and_amax[1, 1] == 3.0


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty_matrices(shape):
    here = stored(0.5)
    rows, columns = kernels.quantize_with_scale([torch.empty(shape)], here, TARGET, TARGET)
    assert rows.codes.shape == shape and columns.codes.shape == shape[::-1] and rows.scale.item() == 0.5
    assert here.scale_and_amax[1].tolist() == [0.5, 0.0]


def test_a_write_is_no_change_that_autograd_counts():
    here = stored(0.5)
    version = here.scale_and_amax._version
    kernels.quantize_with_scale([torch.ones(2, 2)], here, TARGET, None)
    assert here.scale_and_amax._version == version


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ((None, None), "one scale per tensor"),
        ((QuantSpec("e4m3", "row", "float32"), None), "one scale per tensor"),
        ((TARGET, QuantSpec("e5m2", "tensor", "float32")), "alike for both"),
        ((QuantSpec("e4m3", "tensor", "float32", "stochastic"), None), "rounded to nearest"),
    ],
)
def test_what_has_no_such_scale_is_refused(targets, message):
    with pytest.raises(ConfigError, match=message):
        kernels.quantize_with_scale([torch.ones(2, 2)], stored(0.5), *targets)


def test_matrices_of_other_rows_are_refused():
    with pytest.raises(ConfigError, match=r"equal row counts, got shapes \[\(2, 2\), \(3, 2\)\]"):
        kernels.quantize_with_scale([torch.ones(2, 2), torch.ones(3, 2)], stored(0.5), TARGET, None)
