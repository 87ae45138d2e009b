"""Gradients stored, summed and read by Triton, against the reference, bit for bit."""

import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels.gradient import reference
from octavo.kernels.runtime.transfers import PinnedStaging

fast = pytest.importorskip("octavo.kernels.gradient.triton")
sys.path.insert(0, str(Path(__file__).parents[1]))
import optimizer_cases as cases  # noqa: E402

CODES = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch, device):
    """The interpreter would walk over what is not there."""
    if device == "cpu":
        monkeypatch.setattr(fast, "STEPS", 2)
        monkeypatch.setattr(fast, "SQUARES_STEPS", 4)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(12, 256), (3, 200), (1, 5)])
@pytest.mark.parametrize("scaling", ["group", "tensor"])
@pytest.mark.parametrize("dtype", CODES)
def test_store(dtype, scaling, shape, device):
    torch.manual_seed(0)
    gradient = cases.wide(shape)
    gradient.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    ours = cases.empty(dtype, scaling, shape)
    theirs = [tensor.clone().to(device) for tensor in ours]
    half = gradient.bfloat16()
    reference.store_gradient(half, *ours, scaling)
    fast.store_gradient(half.to(device), *theirs, scaling)
    assert torch.equal(ours[1], theirs[1].cpu())
    assert torch.equal(ours[0].view(torch.uint8), theirs[0].cpu().view(torch.uint8))
    assert not ours[0].float().view(-1)[:3].isfinite().any()


@pytest.mark.parametrize("source", [torch.float32, torch.float16])
def test_store_of_other_dtypes(source, device):
    gradient = cases.wide((3, 128)).to(source)
    ours = cases.empty(torch.float8_e5m2, "group", (3, 128))
    theirs = [tensor.clone().to(device) for tensor in ours]
    reference.store_gradient(gradient, *ours, "group")
    fast.store_gradient(gradient.to(device), *theirs, "group")
    assert torch.equal(ours[0].view(torch.uint8), theirs[0].cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", CODES)
def test_the_scale_of_the_largest_value_that_fits_and_of_the_next(dtype, device):
    largest = torch.tensor(torch.finfo(dtype).max)
    for value, expected in ((largest, 127), (largest.nextafter(torch.tensor(torch.inf)), 128)):
        codes, scale = (tensor.to(device) for tensor in cases.empty(dtype, "group", (1, 128)))
        fast.store_gradient(value.to(device).expand(1, 128).contiguous(), codes, scale, "group")
        assert scale.item() == expected


def test_squares_are_those_of_fp64(device):
    torch.manual_seed(0)
    tensors = [torch.randn(3, 5000), torch.randn(7).bfloat16(), torch.randn(9, 9).half(), torch.zeros(0), torch.ones(2)]
    tensors += [torch.randn(4, 4, 16).bfloat16(), torch.zeros(0, 3).half()]
    found = fast.squares([t.to(device) for t in tensors], [None] * len(tensors), PinnedStaging())
    expected = torch.stack([t.double().square().sum() for t in tensors])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-14, atol=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(4, 256), (3, 200)])
@pytest.mark.parametrize("scaling", ["group", "tensor"])
@pytest.mark.parametrize("dtype", CODES)
def test_squares_of_codes(dtype, scaling, shape, device):
    torch.manual_seed(0)
    layout = cases.layout_of("fp8", "adamw", dtype, scaling=scaling)
    pairs = [cases.stored(layout, shape) for _ in range(2)]
    tensors, scales = [codes for codes, _ in pairs], [scale for _, scale in pairs]
    expected = [reference.load_gradient(*pair).double().square().sum() for pair in pairs] + [torch.tensor(4.0).double()]
    place = [t.to(device) for t in (*tensors, torch.ones(4))], [*(s.to(device) for s in scales), None]
    torch.testing.assert_close(fast.squares(*place, PinnedStaging()).cpu(), torch.stack(expected), rtol=1e-14, atol=0)
    tensors[0].view(torch.uint8)[0, 0] = 0x7F  # NaN
    assert fast.squares([tensors[0].to(device)], [scales[0].to(device)], PinnedStaging()).isnan().all()
