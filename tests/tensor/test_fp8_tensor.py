"""FP8Tensor stores what `quantize` gave, moves as a tensor does, and never leaves FP8 silently."""

import pytest
import torch

from octavo.errors import CheckpointError, UnsupportedError
from octavo.numerics import PER_ROW, dequantize, quantize
from octavo.tensor import FP8Tensor

GRANULARITIES = ["tensor", "row", "1x128", "128x128"]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(40, 200)


def same(a: FP8Tensor, b: FP8Tensor) -> bool:
    return (
        torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
        and torch.equal(a.scale, b.scale)
        and a.granularity == b.granularity
        and a.dtype == b.dtype
    )


def test_values_are_those_of_quantize(x):
    stored = FP8Tensor.from_tensor(x)
    assert torch.equal(stored.dequantize(), dequantize(quantize(x, granularity=PER_ROW)))
    assert stored.shape == x.shape and stored.dtype == x.dtype


def test_takes_one_byte_an_element(x):
    stored = FP8Tensor.from_tensor(x)
    assert stored.codes.element_size() == 1
    assert stored.scale.numel() == x.shape[0]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_clone_detach_and_move_keep_codes_and_scales(x, granularity):
    stored = FP8Tensor.from_tensor(x, granularity=granularity)
    for copy in (stored.clone(), stored.detach(), stored.to("cpu"), stored.t().t()):
        assert isinstance(copy, FP8Tensor)
        assert same(copy, stored)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_transpose_rounds_nothing(x, granularity):
    stored = FP8Tensor.from_tensor(x, granularity=granularity)
    assert torch.equal(stored.t().dequantize(), stored.dequantize().t())


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_product_is_that_of_the_values(x, granularity):
    w = torch.randn(24, 200)
    a, b = (FP8Tensor.from_tensor(m, granularity=granularity) for m in (x, w))
    exact = a.dequantize().double() @ b.dequantize().double().t()
    # FP32 sums of 200 products: a few units in the last place of the largest partial sum
    assert torch.allclose((a @ b.t()).double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def test_product_with_a_plain_tensor_is_refused(x):
    with pytest.raises(UnsupportedError, match="quantise the other operand"):
        FP8Tensor.from_tensor(x) @ torch.randn(200, 3)


def test_any_other_operation_is_refused_by_name(x):
    with pytest.raises(UnsupportedError, match=r"aten\.add.*dequantize"):
        FP8Tensor.from_tensor(x) + 1


def test_asking_for_another_dtype_gives_values(x):
    stored = FP8Tensor.from_tensor(x)
    assert torch.equal(stored.to(torch.bfloat16), stored.dequantize(torch.bfloat16))
    assert not isinstance(stored.to(torch.bfloat16), FP8Tensor)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_plain_tensors_round_trip(x, granularity):
    stored = FP8Tensor.from_tensor(x, granularity=granularity)
    assert same(FP8Tensor.from_tensors(stored.to_tensors(), granularity, x.dtype), stored)


def test_tensors_of_another_shape_are_refused(x):
    tensors = FP8Tensor.from_tensor(x).to_tensors()
    with pytest.raises(CheckpointError, match=r"scales of shape \(1, 1\), found \(40, 1\)"):
        FP8Tensor.from_tensors(tensors, "tensor", x.dtype)
    with pytest.raises(CheckpointError, match=r"found \['codes'\]"):
        FP8Tensor.from_tensors({"codes": tensors["codes"]}, "row", x.dtype)


def test_goes_through_compiled_code(x):
    w = torch.randn(24, 200)
    a, b = FP8Tensor.from_tensor(x), FP8Tensor.from_tensor(w)
    compiled = torch.compile(lambda left, right: left @ right.t(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b), a @ b.t())


def test_repr_names_what_it_is(x):
    assert (
        repr(FP8Tensor.from_tensor(x)) == "FP8Tensor(40 x 200, torch.float8_e4m3fn, scale per row, from torch.float32)"
    )
