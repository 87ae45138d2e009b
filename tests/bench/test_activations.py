"""The bytes of a block on paper against the storages that it saves."""

import copy

import pytest
import torch

import octavo
from octavo.kernels.gemm.vendor import cpu_unsupported_reason
from octavo.lab.models.config import ModelConfig
from octavo.nn import norm
from octavo_bench import passes as activations
from octavo_bench.facts import activation_table
from octavo_bench.workloads import Stack

CONFIG = ModelConfig(vocab=64, dim=256, heads=4, kv_heads=2, layers=1, sequence=64, ffn=544)
FP8 = {"activation_inputs": "fp8", "attention_output": "fp8", "norm_inputs": "fp8"}


@pytest.fixture
def stack(monkeypatch):
    """A block, its norms computed by their kernels, as on a GPU."""
    monkeypatch.setattr(norm, "gains_by_kernels", lambda device: True)
    return Stack(CONFIG).bfloat16()


def saved(model: torch.nn.Module, x: torch.Tensor) -> int:
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(t.untyped_storage().nbytes() for where, t in kept.items() if where not in own)


def weight_scales(model: torch.nn.Module) -> int:
    """Return the bytes of what dgrad needs beside the BF16 weights: the scales of their rows."""
    layers = [m for m in model.modules() if isinstance(m, octavo.nn.Linear)]
    return sum(4 * layer.weight.shape[0] for layer in layers)


@pytest.mark.parametrize("options", [{}, *({name: "fp8"} for name in FP8), FP8], ids=str)
def test_what_is_kept(options, stack):
    policy = octavo.Policy(**options)
    octavo.convert(stack, "folded", policy=policy, strict=True)
    x = torch.randn(2, CONFIG.sequence, CONFIG.dim, dtype=torch.bfloat16, requires_grad=True)
    activations_bytes = 2 * CONFIG.sequence * sum(activations.block_kept(CONFIG, policy).values())
    assert saved(stack, x) == activations_bytes + weight_scales(stack)


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), FP8], ids=str)
def test_what_is_kept_by_compiled_blocks(options, stack, monkeypatch):
    monkeypatch.setattr(norm, "on_gpu", lambda x: True)
    monkeypatch.setattr(norm, "COMPILED_ROW", 0)
    policy = octavo.Policy(**options)
    octavo.convert(stack, "folded", policy=policy, strict=True)
    torch._dynamo.reset()
    for block in stack.layers:
        block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    x = torch.randn(2, CONFIG.sequence, CONFIG.dim, dtype=torch.bfloat16, requires_grad=True)
    activations_bytes = 2 * CONFIG.sequence * sum(activations.block_kept(CONFIG, policy, compiled=True).values())
    assert saved(stack, x) == activations_bytes + weight_scales(stack)
    torch._dynamo.reset()


def unrounded(model: torch.nn.Module, lowest: float) -> int:
    """Return the bytes per token that GEMM results have more where the reference computes them: it keeps FP32 sums."""
    layers = [m for m in model.modules() if isinstance(m, octavo.nn.Linear) and m.in_features >= lowest]
    return 2 * sum(layer.out_features for layer in layers) if cpu_unsupported_reason() else 0


@pytest.mark.parametrize("keep", ["products", 300, "nothing"])
@pytest.mark.parametrize("options", [{}, FP8], ids=["", "fp8"])
def test_what_a_block_that_is_recomputed_keeps(keep, options, stack):
    octavo.convert(stack, "folded", policy=octavo.Policy(**options))
    x = torch.randn(2, CONFIG.sequence, CONFIG.dim, dtype=torch.bfloat16, requires_grad=True)
    everything, chosen = octavo.recompute(stack, keep).costs(lambda: stack(x), ())
    lowest = {"products": 1.0, "nothing": float("inf")}.get(keep, keep)
    size, share = activations.recomputed(CONFIG, lowest)
    size += unrounded(stack, lowest)
    assert chosen.bytes == 2 * CONFIG.sequence * size and chosen.share == pytest.approx(share)
    kept = activations.block_kept(CONFIG, octavo.Policy(**options))
    assert everything.bytes == 2 * CONFIG.sequence * sum(kept.values()) + weight_scales(stack)
    assert everything.share == 0


def test_the_effect_of_each_option_on_gradients_is_bounded(stack):
    """What one more rounding of that tensor costs, against the same layers without the option."""
    for parameter in stack.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, parameter.shape[1] ** -0.5)
    x, dy = (torch.randn(2, CONFIG.sequence, CONFIG.dim).bfloat16() for _ in range(2))
    found = {}
    for name in ("none", *FP8):
        model, leaf = copy.deepcopy(stack), x.clone().requires_grad_()
        octavo.convert(model, policy=octavo.Policy(**({} if name == "none" else {name: "fp8"})), strict=True)
        y = model(leaf)
        y.backward(dy)
        found[name] = [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]
    for name, least in {"activation_inputs": 22, "attention_output": 26, "norm_inputs": 26}.items():
        assert torch.equal(found[name][0], found["none"][0])
        noise = [octavo.numerics.sqnr_db(a, b) for a, b in zip(found["none"][1:], found[name][1:], strict=True)]
        assert least < min(noise) < 40, name
    assert octavo.numerics.sqnr_db(found["none"][1], found["norm_inputs"][1]) > 35


def test_the_table_has_a_line_for_each():
    lines = activation_table().splitlines()[2:]
    assert [line.split(" | ")[0].strip("| `") for line in lines][:2] == ["as converted", 'activation_inputs = "fp8"']
    assert len(lines) == 8
