"""The recipes `served` and `served_block` against what inference engines compute, written down from their sources.

vLLM 0.32: model_executor/layers/quantization/input_quant_fp8.py per token (its operator for eager mode, in
csrc/quantization/w8a8/fp8/common.cu, divides instead), w8a8/fp8/per_token_group_quant.cu per 128 values.
SGLang: sgl-kernel/csrc/gemm/per_token_quant_fp8.cu per token, per_token_group_quant_8bit.cu per 128 values.
"""

import numpy as np
import pytest
import torch

from octavo.kernels.quant_spec import spec_of
from octavo.numerics import quantize
from octavo.recipes import load

LARGEST = np.float32(448)


def codes(x):
    """Return the codes of FP32 values, clamped: E4M3, nearest."""
    return torch.from_numpy(np.clip(x, -LARGEST, LARGEST)).to(torch.float8_e4m3fn).view(torch.uint8)


def vllm_per_token(x):
    amax = np.abs(x).max(axis=-1, keepdims=True)
    scale = np.maximum(amax / LARGEST, np.float32(1 / (448 * 512)))
    return codes(x * (np.float32(1) / scale)), scale


def sglang_per_token(x):
    scale = np.abs(x).max(axis=-1, keepdims=True) / LARGEST
    return codes(x * (np.float32(1) / scale)), scale


def vllm_per_group(x):
    grouped = x.reshape(len(x), -1, 128)
    scale = np.maximum(np.abs(grouped).max(axis=-1, keepdims=True), np.float32(1e-10)) / LARGEST
    return codes(grouped / scale).reshape(x.shape), scale[..., 0]


def sglang_per_group(x):
    grouped = x.reshape(len(x), -1, 128)
    amax = np.maximum(np.abs(grouped).max(axis=-1, keepdims=True), np.float32(1e-10))
    return codes(grouped * (LARGEST / amax)).reshape(x.shape), (amax * (np.float32(1) / LARGEST))[..., 0]


def activations(seed, rows=512, columns=512):
    """Return BF16 values in FP32, rows over nine orders of magnitude; in BF16 quotients meet ties."""
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    spread = 10 ** torch.linspace(-6, 3, rows)
    return (made * spread[:, None]).bfloat16()


def ours(x, recipe, role="input"):
    spec = spec_of(getattr(load(recipe).fprop, role))
    made = quantize(x, spec.fmt, spec.tile, spec.scaling)
    return made.codes.view(torch.uint8), made.scale.numpy()


@pytest.mark.parametrize("role", ["input", "weight"])
def test_served_is_vllm_per_token_and_per_channel_to_the_bit(role):
    x = activations(0)
    (found, scale), (wanted, theirs) = ours(x, "served", role), vllm_per_token(x.float().numpy())
    assert torch.equal(found, wanted) and np.array_equal(scale, theirs)


def test_served_is_sglang_per_token_to_the_bit_above_the_floor():
    x = activations(1)
    x = x[x.abs().amax(dim=1) >= 1 / 512]
    (found, scale), (wanted, theirs) = ours(x, "served"), sglang_per_token(x.float().numpy())
    assert len(x) > 200 and torch.equal(found, wanted) and np.array_equal(scale, theirs)


def test_served_block_has_the_scales_of_vllm_and_the_codes_of_sglang():
    x = activations(2)
    found, scale = ours(x, "served_block")
    assert torch.equal(found, sglang_per_group(x.float().numpy())[0])
    wanted, theirs = vllm_per_group(x.float().numpy())
    assert np.array_equal(scale, theirs)
    differ = found != wanted  # it multiplies by 448 / amax where vLLM divides by amax / 448: one code, at ties
    assert differ.float().mean() < 1e-3 and int((found.int() - wanted.int()).abs().max()) <= 1


def test_block_is_vllm_with_deep_gemm_whose_scales_are_powers_of_two():
    x = activations(3)
    grouped = x.float().reshape(len(x), -1, 128)
    raw = grouped.abs().amax(dim=-1, keepdim=True).double() / 448
    scale = torch.exp2(torch.ceil(torch.log2(raw))).float()
    found, made = ours(x, "block")
    assert torch.equal(torch.from_numpy(made), scale[..., 0])
    assert torch.equal(found, codes((grouped / scale).numpy()).reshape(x.shape))


def test_ties_tell_the_formulas_apart():
    """The test of equality would be idle if every formula gave these codes."""
    x = activations(0)
    x = x[x.abs().amax(dim=1) >= 1 / 512]
    differ = ours(x, "served")[0] != quantize(x, scaling="float32").codes.view(torch.uint8)
    assert 0 < differ.sum() < 1e-3 * x.numel()
