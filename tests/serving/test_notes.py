"""Notes for serving, each once."""

from __future__ import annotations

import pytest

import octavo
from octavo.serving import export


def notes(model, directory):
    return export(model, directory / "out").notes


@pytest.mark.parametrize("kept", ["layers.*.attention.wk", "layers.1.attention.wq", "layers.0.feed_forward.w3"])
def test_layers_of_which_only_some_are_in_fp8(make_llama, tmp_path, kept):
    (note,) = notes(make_llama("folded", octavo.Policy(keep={kept: "mine", "lm_head": "mine"})), tmp_path)
    names = {"wk": "0.self_attn.k_proj", "wq": "1.self_attn.q_proj", "w3": "0.mlp.up_proj"}
    assert f"vLLM fuses model.layers.{names[kept[-2:]]} with" in note and "min_gain=0" in note


def test_layers_that_are_all_in_bf16_are_as_they_should_be(make_llama, tmp_path):
    keep = {"layers.0.attention.w[qkv]": "mine", "lm_head": "mine"}
    assert not notes(make_llama("folded", octavo.Policy(keep=keep)), tmp_path)


def test_layers_with_a_scale_each(make_llama, tmp_path):
    (note,) = notes(make_llama("tensorwise", octavo.Policy(fuse=False)), tmp_path)
    assert "layers of model.layers.0.self_attn have separate scales" in note and "fuse=True" in note


@pytest.mark.parametrize("recipe", ["folded", "tensorwise", "block"])
def test_there_is_nothing_to_say_of_most_models(make_llama, tmp_path, recipe):
    assert not notes(make_llama(recipe), tmp_path)
