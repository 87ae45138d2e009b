"""Attention masks that mask nothing, left out by what the host knows; all others are those of transformers."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers (octavo[clients])")

import transformers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import octavo
from octavo.integrations.full_masks import NAME, FullMaskDropper, full_mask, is_known_to_be_full, mark_full_masks

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
IDS = torch.randint(3, 48, (2, 12), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones(2, 12, dtype=torch.long)
PADDED[0, 9:] = 0
LEFT = PADDED.flip(1)
PACKED = torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)
BATCHES: dict[str, dict[str, Tensor]] = {
    "causal": {},
    "ones": {"attention_mask": torch.ones(2, 12, dtype=torch.long)},
    "padded": {"attention_mask": PADDED},
    "left-padded": {"attention_mask": LEFT},
    "packed": {"position_ids": PACKED},
    "positions": {"position_ids": torch.arange(12)[None]},
    "ones and restarting positions": {"attention_mask": torch.ones(2, 12, dtype=torch.long), "position_ids": PACKED},
}


def model(window: int | None = None) -> Any:
    torch.manual_seed(0)
    if window is None:
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window))


def results(model: nn.Module, call: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad()
    out = call(input_ids=IDS, labels=IDS, **batch)
    out.loss.backward()
    seen = batch.get("attention_mask", torch.ones_like(IDS)).bool()  # of padding tokens no logit means anything
    return [out.logits.detach()[seen], *(p.grad for p in model.parameters())]


class Backend:
    """Runs graphs as they are, and records the mask of each attention in them."""

    def __init__(self) -> None:
        self.masks: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if "scaled_dot_product" in str(n.target)]
        self.masks += [node.kwargs["attn_mask"] for node in nodes]
        return graph.forward


@pytest.mark.parametrize("way", ["blocks", "whole"])
@pytest.mark.parametrize("window", [None, 4, 64])
def test_every_kind_of_batch_has_the_results_of_eager_mode_without_marks(window, way):
    torch._dynamo.reset()
    plain, marked = model(window), model(window)
    mark_full_masks(marked)
    backend, call = Backend(), marked
    if way == "blocks":
        octavo.compile(marked, backend=backend)
    else:
        call = torch.compile(marked, backend=backend)
    for name, batch in BATCHES.items():
        expected, got = results(plain, plain, batch), results(marked, call, batch)
        for a, b in zip(expected, got, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        if name == "causal":
            assert all((mask is None) == (window != 4) for mask in backend.masks) and backend.masks
            backend.masks.clear()
    if way == "whole":  # compiled code cannot read the others
        assert backend.masks and None not in backend.masks


@pytest.mark.parametrize("batch", ["causal", "padded", "packed"])
def test_the_batches_of_a_model_in_fp8(batch):
    torch._dynamo.reset()
    plain, marked = model(), model()
    for each in (plain, marked):
        octavo.convert(each, policy=octavo.Policy(min_gain=0.0, min_features=16))
    mark_full_masks(marked)
    octavo.compile(marked, backend="aot_eager")
    expected, got = (results(each, each, BATCHES[batch]) for each in (plain, marked))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_no_value_of_a_batch_is_read_where_all_is_known(monkeypatch):
    def read(self: Tensor) -> bool:
        raise AssertionError("the host waits for the values of a tensor")

    made, plain = model(), model()
    mark_full_masks(made)
    expected = plain(input_ids=IDS).logits
    monkeypatch.setattr(Tensor, "__bool__", read)
    assert torch.equal(made(input_ids=IDS).logits, expected)
    assert torch.equal(made(inputs_embeds=made.get_input_embeddings()(IDS)).logits, expected)
    with pytest.raises(AssertionError, match="the host waits"):
        plain(input_ids=IDS)


def test_a_mask_is_known_to_be_full_by_its_strides_alone():
    assert is_known_to_be_full(full_mask(2, 5, torch.device("meta")))
    assert not is_known_to_be_full(torch.ones(2, 5)) and not is_known_to_be_full(None)
    assert not is_known_to_be_full(torch.ones(5).expand(2, -1)), "one row, which may have zeros, for all sequences"


def test_generating_with_a_cache_is_that_of_the_model_without_marks():
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "use_cache": True}
    plain, marked = model().eval(), model().eval()
    mark_full_masks(marked)
    for mask in (None, LEFT):
        assert torch.equal(
            plain.generate(IDS, attention_mask=mask, **settings), marked.generate(IDS, attention_mask=mask, **settings)
        )
    first = marked(input_ids=IDS, use_cache=True)  # the next call has a cache, and no mask
    again = marked(input_ids=IDS, past_key_values=first.past_key_values, use_cache=True).logits
    whole = plain(input_ids=torch.cat([IDS, IDS], 1)).logits[:, 12:]
    torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-5)


def test_marks_come_off_and_files_do_not_have_them(tmp_path):
    made = model()
    marks = mark_full_masks(made)
    assert made.config._attn_implementation == NAME
    assert torch.equal(copy.deepcopy(made)(input_ids=IDS).logits, made(input_ids=IDS).logits)
    assert isinstance(pickle.loads(pickle.dumps(made)), LlamaForCausalLM)
    made.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    marks.remove()
    assert made.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in made.modules())


def test_models_of_another_attention_are_left_alone():
    made = transformers.LlamaForCausalLM._from_config(LlamaConfig(**SIZES), attn_implementation="eager")
    assert not mark_full_masks(made).covers(made) and made.config._attn_implementation == "eager"
    assert not mark_full_masks(nn.Linear(2, 2)).covers(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("batch", "dropped"),
    [
        ({"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, True),
        ({"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "position_ids": None}, True),
        ({"input_ids": IDS, "attention_mask": PADDED}, False),
        ({"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "position_ids": PACKED}, False),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 12, 12)}, False),
        ({"attention_mask": torch.ones_like(IDS)}, False),
        ({"input_ids": IDS}, False),
    ],
)
def test_the_data_loader_drops_masks_that_are_full(batch, dropped):
    has_mask = "attention_mask" in batch
    got = FullMaskDropper(lambda samples: dict(samples))(batch)
    assert ("attention_mask" in got) == (has_mask and not dropped)
    assert FullMaskDropper(lambda samples: samples)([1]) == [1]
