"""Llama blocks of NVIDIA's Transformer Engine, with the weights of the blocks they replace.

`LayerBlock` is a whole `TransformerLayer` with its own attention and rotary embedding, run eagerly, as its users do.
`ModuleBlock` has Transformer Engine's linear modules, which fuse the norms and SwiGLU, around the rotary embedding and
attention of Octavo's blocks. These are compiled; the graph breaks at the modules, which Transformer Engine excludes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.lab.models.llama import Block, FeedForward
from octavo.nn.rotary import rotate

RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
"""Name in implementations -> recipe class of `transformer_engine.common.recipe`."""


class ModuleBlock(nn.Module):
    """A block of `LayerNormLinear`, `Linear` and `LayerNormMLP`."""

    def __init__(self, block: Block) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        attention, wo = block.attention, block.attention.wo
        weights = [layer.weight for layer in (attention.wq, attention.wk, attention.wv)]
        self.core, self.head_dim = attention.core, attention.head_dim
        self.widths = [len(weight) for weight in weights]
        options = {"bias": False, "params_dtype": wo.weight.dtype, "device": wo.weight.device}
        normed = options | {"normalization": "RMSNorm", "eps": block.attention_norm.eps}
        self.qkv = te.LayerNormLinear(wo.out_features, sum(self.widths), **normed)
        self.wo = te.Linear(wo.in_features, wo.out_features, **options)
        self.mlp = te.LayerNormMLP(wo.out_features, _mlp_of(block).w1.out_features, activation="swiglu", **normed)
        _fill(self.qkv.weight, *weights)
        _fill(self.wo.weight, wo.weight)
        _fill_norms_and_mlp(self.qkv, self.mlp, block)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        """Return the residual stream after this block."""
        q_BTHE, k_BTGE, v_BTGE = (
            part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv(x_BTD).split(self.widths, dim=-1)
        )
        y_BTD = self.core(rotate(q_BTHE, cos_TE, sin_TE), rotate(k_BTGE, cos_TE, sin_TE), v_BTGE, mask_B1TT)
        x_BTD = x_BTD + self.wo(y_BTD)
        z_BTD: Tensor = x_BTD + self.mlp(x_BTD)
        return z_BTD


class LayerBlock(nn.Module):
    """A block that is a `TransformerLayer`."""

    angles: Tensor | None
    """(T, 1, 1, E), from the tables of the first forward pass; later passes have the same."""

    def __init__(self, block: Block) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        attention, wo = block.attention, block.attention.wo
        head_dim, groups = attention.head_dim, attention.wk.out_features // attention.head_dim
        self.layer = te.TransformerLayer(
            wo.out_features,
            _mlp_of(block).w1.out_features,
            wo.in_features // head_dim,
            num_gqa_groups=groups,
            layernorm_epsilon=block.attention_norm.eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            fuse_qkv_params=True,
            bias=False,
            activation="swiglu",
            normalization="RMSNorm",
            attn_input_format="bshd",
            params_dtype=wo.weight.dtype,
            device=wo.weight.device,
        )
        self.angles = None
        own = self.layer.self_attention
        layers = (attention.wq, attention.wk, attention.wv)
        by_group = [
            layer.weight.unflatten(0, (groups, -1)) for layer in layers
        ]  # a group's queries, its key, its value
        _fill(own.layernorm_qkv.weight, torch.cat(by_group, dim=1).flatten(0, 1))
        _fill(own.proj.weight, wo.weight)
        _fill_norms_and_mlp(own.layernorm_qkv, self.layer.layernorm_mlp, block)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, mask_B1TT: Tensor | None = None) -> Tensor:
        """Return the residual stream after this block; a mask is not supported."""
        if self.angles is None:
            self.angles = torch.atan2(sin_TE, cos_TE).repeat(1, 2)[:, None, None]
        y_BTD: Tensor = self.layer(x_BTD, rotary_pos_emb=self.angles)
        return y_BTD


def convert(model: nn.Module, tokens: int, *, recipe: str, block: type[ModuleBlock | LayerBlock]) -> None:
    """Replace the blocks under `model.layers`, and run the model's forward under Transformer Engine's autocast.

    Args:
        recipe: a name of `RECIPES`, with Transformer Engine's defaults.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    blocks: Any = model.get_submodule("layers")
    with torch.random.fork_rng():  # its modules draw weights; data drawn later must be that of the others
        for index in range(len(blocks)):
            blocks[index] = block(blocks[index])
    chosen, forward = getattr(recipes, RECIPES[recipe])(), model.forward

    def in_fp8(*args: Any, **kwargs: Any) -> Any:
        with te.autocast(enabled=True, recipe=chosen):
            return forward(*args, **kwargs)

    model.forward = in_fp8


def _fill_norms_and_mlp(qkv: Any, mlp: Any, block: Block) -> None:
    _fill(qkv.layer_norm_weight, block.attention_norm.weight)
    _fill(mlp.layer_norm_weight, block.ffn_norm.weight)
    _fill(mlp.fc1_weight, _mlp_of(block).w1.weight, _mlp_of(block).w3.weight)
    _fill(mlp.fc2_weight, _mlp_of(block).w2.weight)


def _mlp_of(block: Block) -> FeedForward:
    assert isinstance(block.feed_forward, FeedForward)
    return block.feed_forward


def _fill(parameter: nn.Parameter, *rows: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(torch.cat(rows))
