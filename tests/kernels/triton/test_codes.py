"""Scales by the kernels' own arithmetic, FP32, against the specification's, which rounds from FP64."""

import numpy as np
import pytest
import torch

from octavo.numerics import E4M3, E5M2, INT8, scale_from_amax

triton = pytest.importorskip("triton")
tl = triton.language

from octavo.kernels.triton.codes import scale_of  # noqa: E402

SIZE = 4096
RULES = {"float32": 0, "power_of_two": 1, "engine": 2}


@triton.jit
def _scales_kernel(
    amax_ptr, codes_ptr, scale_ptr, inverse_ptr, SCALING: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    at = tl.arange(0, SIZE)
    scale, inverse = scale_of(tl.load(amax_ptr + at), codes_ptr.dtype.element_ty, SCALING)
    tl.store(scale_ptr + at, scale)
    tl.store(inverse_ptr + at, inverse)


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, INT8], ids=lambda fmt: fmt.name)
def test_scales_are_the_specifications_bit_for_bit(fmt, rule, device):
    bits = np.random.default_rng(0).integers(0, 0x7F800000, SIZE, dtype=np.int32)
    bits[:8] = 0, 1, 0x7FFFFF, 0x800000, 0x800001, 0x7F7FFFFF, 0x3F800000, 0x43E00000
    bits[8:1032] &= 0x00FFFFFF  # subnormal, and the smallest exponent
    amax = torch.from_numpy(bits).to(device).view(torch.float32)
    scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
    _scales_kernel[(1,)](amax, torch.empty(1, dtype=fmt.dtype, device=device), scale, inverse, RULES[rule], SIZE)
    want, wanted = scale_from_amax(amax, fmt, rule)
    assert torch.equal(scale, want) and torch.equal(inverse, wanted)
