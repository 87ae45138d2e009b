"""A peer's layer on the same weights and inputs. What differs is how scales are computed, and in rare cases a code."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from octavo import kernels
from octavo.nn import Linear
from octavo.numerics import format_of

float8 = pytest.importorskip("torchao.float8")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
M, N, K = 256, 384, 512


def uneven(rows: int, cols: int) -> Tensor:
    """Return a BF16 matrix whose rows and columns have magnitudes of their own, so that hardly two scales are alike."""
    return (torch.randn(rows, cols) * torch.exp(2 * torch.randn(rows, 1)) * torch.exp(torch.randn(cols))).bfloat16()


def three(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Return y, dx and dw."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    weight = next(layer.parameters())
    assert x.grad is not None and weight.grad is not None
    return [tensor.detach().double() for tensor in (y, x.grad, weight.grad)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_outputs_are_torchaos(recipe, device):
    weight, x, dy = uneven(N, K).to(device), uneven(M, K).to(device), 1e-4 * uneven(M, N).to(device)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    slow = dataclasses.replace(config.gemm_config_output, use_fast_accum=False)
    theirs = nn.Sequential(nn.Linear(K, N, bias=False, dtype=torch.bfloat16, device=device))
    with torch.no_grad():
        theirs[0].weight.copy_(weight)
    ours = Linear(K, N, bias=False, dtype=torch.bfloat16, device=device, recipe=recipe)
    ours.load_state_dict(copy.deepcopy(theirs[0].state_dict()))
    float8.convert_to_float8_training(theirs, config=dataclasses.replace(config, gemm_config_output=slow))
    assert type(theirs[0]).__name__ == "Float8Linear"

    for mine, other in zip(three(ours, x, dy), three(theirs, x, dy), strict=True):
        different = mine != other
        # A scale that is one FP32 step apart turns a tie: one code in thousands, and a sum by a part of its own code.
        assert different.double().mean() < (1e-3 if device == "cpu" else 0.5)  # a GPU's kernels round to BF16 twice
        step = 2.0**-7 * torch.maximum(mine.abs(), other.abs()) + 2.0**-10 * mine.square().mean().sqrt()
        assert bool(((mine - other).abs() <= step).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", ["e4m3", "e5m2"])
@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_codes_are_torchaos_but_for_ties(granularity, target, device):
    utils = pytest.importorskip("torchao.float8.float8_scaling_utils")
    granular = pytest.importorskip("torchao.float8.config").ScalingGranularity
    for _ in range(8):
        x = uneven(M, K).to(device)
        ours = kernels.quantize(x, target, granularity, "float32")
        theirs = utils.hp_tensor_to_float8_dynamic(
            x,
            ours.codes.dtype,
            None,
            scaling_granularity=granular.TENSORWISE if granularity == "tensor" else granular.AXISWISE,
            axiswise_dim=-1,
        )
        inverse = theirs._scale.reshape(ours.scale.shape)
        assert bool(((ours.scale.double() * inverse.double() - 1).abs() < 2.0**-22).all())
        apart = (order(ours.codes) - order(theirs._data)).abs()
        assert apart.max() <= 1 and (apart > 0).double().mean() < 1e-3


def order(codes: Tensor) -> Tensor:
    """Return integers that follow one another as the values of finite codes do."""
    assert format_of(codes).has_sign
    bits = codes.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)
