"""LoRA of PEFT over a frozen base in FP8: one byte per weight, and a merge that loses nothing."""

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft", reason="needs peft (octavo[clients])")

from peft import LoraConfig, get_peft_model

import octavo
from octavo import FP8Tensor, Policy, kernels
from octavo.errors import UnsupportedError
from octavo.nn import Linear

FP8_LAYERS = 14

TARGETS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model: nn.Module, policy: Policy | None = None) -> Any:
    octavo.convert(model, policy=policy)
    return get_peft_model(model, LoraConfig(r=8, target_modules=TARGETS, lora_dropout=0.0))


def batch(data: Any) -> dict[str, torch.Tensor]:
    return torch.utils.data.default_collate([data[i] for i in range(8)])


def train(model: Any, data: Any, steps: int = 10) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(**batch(data)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model: Any, data: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=batch(data)["input_ids"]).logits


def test_a_frozen_base_has_no_wgrad_and_one_byte_per_weight(llama, sequences):
    model = adapted(llama(), Policy(weights="fp8"))
    base = [m for m in model.modules() if isinstance(m, Linear)]
    assert len(base) == FP8_LAYERS and all(isinstance(m.weight, FP8Tensor) for m in base)
    assert all(m.weight.nbytes == m.weight.numel() + 4 * m.weight.shape[0] for m in base)
    with kernels.record() as ledger:
        losses = train(model, sequences, 1)
    # fprop of 14 layers; dgrad of o, gate, up and down of each block, and one of q, k and v together of the second: the
    # input of the first needs no gradient, as the embedding is frozen.
    assert sum(ledger.gemms.values()) == FP8_LAYERS + 2 * 4 + 1 and not ledger.weights
    losses += train(model, sequences)
    assert losses[-1] < 0.95 * losses[0]
    assert all(m.weight.grad is None for m in base)


@pytest.mark.parametrize("weights", ["unchanged", "fp8"])
def test_its_loss_is_near_that_of_a_base_in_bf16(llama, sequences, weights):
    torch.manual_seed(1)
    expected = train(get_peft_model(llama(), LoraConfig(r=8, target_modules=TARGETS, lora_dropout=0.0)), sequences, 30)
    torch.manual_seed(1)
    got = train(adapted(llama(), Policy(weights=weights)), sequences, 30)
    assert abs(got[-1] - expected[-1]) < 0.05 * expected[-1]


def test_adapters_merge_into_plain_weights_and_out_again(llama, sequences):
    model = adapted(llama())
    train(model, sequences)
    before = logits(model, sequences)
    model.merge_adapter()
    merged = logits(model, sequences)
    assert not torch.equal(merged, before), "what FP8 rounds is another matrix"
    assert (merged - before).abs().max() < 0.1 * before.abs().max()
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model, sequences), before, rtol=0, atol=0.02)


def test_a_merge_into_fp8_weights_is_refused_and_the_way_named_there_loses_nothing(llama, sequences):
    model = adapted(llama(), Policy(weights="fp8"))
    train(model, sequences)
    with pytest.raises(UnsupportedError, match=r"octavo\.revert\(model\)"):
        model.merge_and_unload()
    assert octavo.revert(model) == FP8_LAYERS
    before = logits(model, sequences)
    merged = model.merge_and_unload()
    assert all(type(p) is nn.Parameter for p in merged.parameters())
    torch.testing.assert_close(logits(merged, sequences), before, rtol=1e-4, atol=1e-5)
    assert octavo.convert(merged).fp8_layers == FP8_LAYERS


def test_gpt2_merges_what_it_computed():
    """Its layers are `Conv1D` of transformers, (K, N), to which PEFT adds the transposed update."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    assert octavo.convert(model).fp8_layers == 8
    settings = LoraConfig(r=8, lora_alpha=32, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    wrapped, ids = get_peft_model(model, settings).eval(), torch.arange(48).reshape(2, 24) * 7 % 96
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:  # zero at first
            torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        expected = wrapped(ids).logits
        with wrapped.disable_adapter():
            base = wrapped(ids).logits
        merged = wrapped.merge_and_unload()(ids).logits
    moved = (expected - base).abs().max()
    assert moved > 0.05 and (merged - expected).abs().max() < 0.1 * moved


@pytest.mark.parametrize("is_converted_first", [False, True])
def test_attention_of_pytorch_computes_the_updated_weights_before_and_after_a_merge(is_converted_first):
    """PEFT adds an update to the packed weight in each forward, which FP8 quantises as it is then."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attn(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 8, 64)
    if is_converted_first:
        octavo.convert(block, "folded")
    model = get_peft_model(block, LoraConfig(r=4, target_modules=["attn"], init_lora_weights=False))
    if not is_converted_first:
        plan = octavo.convert(model, "folded")
        assert plan.fp8_layers == 2 and not plan.unconverted
    y = model(x)
    y.sum().backward()
    assert all((p.grad is not None) is p.requires_grad for p in model.parameters())
    merged = model.merge_and_unload()
    with torch.no_grad():
        assert torch.equal(merged(x), y)
        octavo.revert(merged)
        plain = merged(x)
        assert 0 < (plain - y).norm() < 0.1 * plain.norm()
