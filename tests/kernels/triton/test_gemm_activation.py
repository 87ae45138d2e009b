"""The GEMM that searches the gradients of an activation: bit for bit the GEMM, and then the passes by themselves."""

import pytest
import torch

from octavo.kernels.quant_spec import QuantSpec
from octavo.numerics import PER_ROW, PER_TENSOR, Quantized

fused = pytest.importorskip("octavo.kernels.gemm_activation.triton")
activation = pytest.importorskip("octavo.kernels.activation.triton")
ROW = QuantSpec("e4m3", "row", "power_of_two")
COLUMN = QuantSpec("e4m3", "column", "power_of_two")
SMALL = fused.Config(32, 32, 32)


@pytest.fixture(autouse=True)
def tiles_for_the_interpreter(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(fused, "CONFIGS", dict.fromkeys(fused.CONFIGS, SMALL))
        for name in ("BACKWARD_SEARCH", "BACKWARD_WRITE"):
            monkeypatch.setattr(activation, name, activation.Shape(32, 128, warps=4))


def case(device, m=70, f=48, k=80, dtype=torch.bfloat16):
    """g and w of small whole numbers, whose sums are exact with any accumulator; dh; gate and up side by side."""
    g, w = (torch.randint(-4, 5, (rows, k), device=device).float().to(torch.float8_e4m3fn) for rows in (m, f))
    g_scale = torch.randint(-9, 4, (m, 1), device=device).float().exp2()
    both = (torch.randn(m, 2 * f, device=device) * 2).to(dtype)
    dh = (g.float() @ w.float().t() * g_scale).to(dtype)
    one = torch.ones(1, 1, device=device)
    return Quantized(g, g_scale, PER_ROW), Quantized(w, one, PER_TENSOR), dh, both[:, :f], both[:, f:]


def folds(m, f, device):
    exponents = torch.randint(-3, 4, (2 * f + m,), device=device).float()
    return exponents[: 2 * f].exp2()[None], exponents[2 * f :].exp2()[:, None]


def equal(got, expected):
    if expected is None:
        return got is None
    same = torch.equal(got.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    return same and torch.equal(got.scale, expected.scale) and got.granularity == expected.granularity


@pytest.mark.parametrize(
    ("kind", "dtype", "targets", "config"),
    [
        ("silu", torch.bfloat16, (ROW, ROW, COLUMN), {}),
        ("gelu_tanh", torch.float16, (None, ROW, None), {"parts": 2}),
        ("relu2", torch.float32, (ROW, None, COLUMN), {"halves": 1, "flatten": False}),
        ("silu", torch.bfloat16, (ROW, ROW, None), {"halves": 1, "parts": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("fast", [False, True])
def test_it_is_the_gemm_and_the_passes(kind, dtype, targets, config, fast, device, monkeypatch):
    tiling = SMALL if device == "cpu" else fused.Config()
    monkeypatch.setattr(fused, "CONFIGS", dict.fromkeys(fused.CONFIGS, tiling._replace(**config)))
    g, w, dh, gate, up = case(device, dtype=dtype)
    gate[3, 5], up[4, 6] = torch.nan, torch.inf
    hidden = None if targets[2] is None else torch.full((len(dh), 1), 0.5, device=device)
    factors = (*folds(*dh.shape, device), hidden)
    got = fused.gemm_activation_backward(g, w, "fast" if fast else "slow", kind, gate, up, targets, factors)
    expected = activation.activation_backward(kind, dh, gate, up, targets, factors)
    assert all(map(equal, got, expected))


def test_without_folds(device):
    g, w, dh, gate, up = case(device, 33, 16, 16)
    targets = ROW, ROW, None
    got = fused.gemm_activation_backward(g, w, "slow", "silu", gate, up, targets, (None,) * 3)
    assert all(map(equal, got, activation.activation_backward("silu", dh, gate, up, targets, (None,) * 3)))
