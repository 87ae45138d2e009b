"""Head and loss of a model of transformers as one: the same loss and gradients, where the loss is the head's."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers (octavo[clients])")

import transformers

import octavo
from octavo.errors import UnsupportedError
from octavo.integrations.head_loss import fuse_head_and_loss

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
IDS = torch.randint(3, 48, (2, 12), generator=torch.Generator().manual_seed(1))
LABELS = IDS.masked_fill(torch.arange(12) < 4, -100)
BATCHES: dict[str, dict[str, Any]] = {
    "mean": {},
    "of all micro-batches": {"num_items_in_batch": torch.tensor(30)},
    "a count": {"num_items_in_batch": 30},
    "shifted by the user": {"shift_labels": LABELS.roll(-1, 1)},
    "another token ignored": {"ignore_index": 5},
}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options)).train()


def mixtral() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2, output_router_logits=True)
    return transformers.MixtralForCausalLM(config).train()


def step(model: Any, labels: torch.Tensor = LABELS, **batch: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=IDS, labels=labels, **batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def close(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", BATCHES)
def test_loss_and_gradients_are_those_of_logits(batch):
    labels = IDS if batch == "another token ignored" else LABELS
    plain, fused = llama(), llama()
    fuse_head_and_loss(fused)
    close(step(fused, labels, **BATCHES[batch]), step(plain, labels, **BATCHES[batch]))


@pytest.mark.parametrize("make", [lambda: llama(tie_word_embeddings=True), mixtral], ids=["tied", "loss of the router"])
def test_tied_heads_and_losses_that_are_added(make):
    plain, fused = make(), make()
    fuse_head_and_loss(fused)
    close(step(fused), step(plain))


def test_a_head_in_fp8_under_autocast():
    plain, fused = llama(), llama()
    for model in (plain, fused):
        policy = octavo.Policy(keep_defaults=False, min_gain=0.0, min_features=16, keep=["model.*"])
        assert octavo.convert(model, policy=policy).fp8_layers == 1
    fuse_head_and_loss(fused)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = step(plain), step(fused)
    torch.testing.assert_close(got[0], expected[0], rtol=1e-2, atol=0)


def test_evaluation_and_copies_have_logits_and_the_model_its_own_loss_again():
    plain, fused = llama(), llama()
    done = fuse_head_and_loss(fused)
    assert fused(input_ids=IDS, labels=LABELS).logits.shape == (2, 12, 0), "to use them is an error"
    assert torch.equal(fused(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    copied = copy.deepcopy(fused)
    assert torch.equal(copied(input_ids=IDS, labels=LABELS).logits, plain(input_ids=IDS).logits)
    assert all(torch.equal(a, b) for a, b in zip(step(copied), step(plain), strict=True))
    for model in (plain, fused):
        model.eval()
    expected, got = plain(input_ids=IDS, labels=LABELS), fused(input_ids=IDS, labels=LABELS)
    assert torch.equal(got.logits, expected.logits) and torch.equal(got.loss, expected.loss)
    done.remove()
    fused.train(), plain.train()
    assert type(fused.lm_head) is torch.nn.Linear and not fused._forward_pre_hooks
    assert all(torch.equal(a, b) for a, b in zip(step(fused), step(plain), strict=True))


def test_models_that_change_their_logits_are_left_as_they_are():
    for cap in (30.0, 1e3):  # far above the logits of a new model
        config = transformers.Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=cap)
        model = transformers.Gemma2ForCausalLM(config)
        with pytest.raises(UnsupportedError, match="Gemma2ForCausalLM changes its logits before the loss"):
            fuse_head_and_loss(model)
        assert type(model.lm_head) is torch.nn.Linear
    config = transformers.GraniteConfig(**SIZES, logits_scaling=1.01)
    with pytest.raises(UnsupportedError, match="changes its logits"):
        fuse_head_and_loss(transformers.GraniteForCausalLM(config))


def test_what_is_no_language_model_or_is_fused_already_is_refused():
    with pytest.raises(UnsupportedError, match="has not the loss of a causal language model"):
        fuse_head_and_loss(torch.nn.Linear(2, 2))
    model = llama()
    fuse_head_and_loss(model)
    with pytest.raises(UnsupportedError, match="Leave fuse_loss out"):
        fuse_head_and_loss(model)
    hooked = llama()
    hooked.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="has hooks"):
        fuse_head_and_loss(hooked)
