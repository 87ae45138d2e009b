"""What is counted of the part of a tensor in this process."""

import pytest
import torch
from torch import Tensor

from octavo.tensor import FP8Tensor, non_finite

CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def stored(codes: list[int], scale: float, format: str = "e4m3", dtype: torch.dtype = torch.bfloat16) -> FP8Tensor:
    """Return one row of these bytes, and one of zeros with the scale 1."""
    rows = torch.tensor([codes, [0] * len(codes)], dtype=torch.uint8).view(CODES[format])
    plain = FP8Tensor.from_tensor(torch.zeros(2, len(codes)), granularity="row")
    return FP8Tensor(rows, torch.tensor([scale, 1.0]).reshape(plain.scale.shape), plain.granularity, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_values_of_plain_tensors_that_are_not_finite_are_counted(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]).to(dtype)
    assert int(non_finite(x)) == 3 and int(non_finite(torch.arange(3))) == 0


@pytest.mark.parametrize(
    ("x", "count"),
    [
        pytest.param(stored([0x7E, 0xFE, 0x00, 0x08], 1.0), 0, id="finite"),
        pytest.param(stored([0x7F, 0xFF, 0x7E, 0x00], 1.0), 2, id="NaN codes of E4M3"),
        pytest.param(stored([0x7C, 0xFC, 0x7D, 0xFF, 0x7B], 1.0, "e5m2"), 4, id="infinite and NaN codes of E5M2"),
        pytest.param(stored([0x7E, 0x00, 0x08], torch.nan), 3, id="a NaN as scale, zeros included"),
        pytest.param(stored([0x7E, 0x00, 0x08], torch.inf), 3, id="an infinite scale, zeros included"),
        pytest.param(stored([0x7E, 0x38, 0x00], 2.0**120), 1, id="448 x 2^120 overflows FP32, 1 x 2^120 does not"),
        pytest.param(stored([0x7E, 0x38], 2.0**10, dtype=torch.float16), 1, id="448 x 1024 overflows FP16"),
        pytest.param(stored([0x7E, 0x38], 2.0**10), 0, id="448 x 1024 does not overflow BF16"),
    ],
)
def test_values_of_an_fp8_tensor_are_counted_as_it_dequantises(x: FP8Tensor, count: int) -> None:
    found: Tensor = non_finite(x)
    assert (int(found), found.shape, found.dtype) == (count, (), torch.int64)
    assert int(non_finite(torch.nn.Parameter(x).t())) == count
