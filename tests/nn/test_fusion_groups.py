"""Groups of layers that are computed as one."""

from __future__ import annotations

import torch

import octavo
from octavo.models.config import ModelConfig
from octavo.models.llama import Llama
from octavo.nn import Linear
from octavo.nn.fusion_groups import fusion_groups


def named(model, layers):
    names = {id(module): name for name, module in model.named_modules()}
    return [[names[id(layer)] for layer in group] for group in fusion_groups(model, layers)]


def llama(**policy):
    model = Llama(ModelConfig(vocab=64, dim=64, layers=1, heads=2, ffn=96, sequence=16))
    model.reset_parameters(torch.Generator().manual_seed(0))
    octavo.convert(model, policy=octavo.Policy(**policy))
    return model, [module for module in model.modules() if isinstance(module, Linear)]


def test_what_shares_an_input_is_one_group():
    groups = named(*llama())
    attention, mlp = "layers.0.attention.", "layers.0.feed_forward."
    assert sorted(groups) == sorted(
        [[f"{mlp}w1", f"{mlp}w3"], [f"{attention}w{n}" for n in "qkv"], [f"{attention}wo"], [f"{mlp}w2"]]
    )


def test_a_group_that_lacks_a_member_is_none():
    model, layers = llama()
    groups = named(model, [layer for layer in layers if layer is not model.layers[0].attention.wk])
    assert ["layers.0.attention.wq"] in groups and ["layers.0.attention.wv"] in groups


def test_layers_that_are_not_fused_are_alone():
    assert all(len(group) == 1 for group in named(*llama(fuse=False)))
