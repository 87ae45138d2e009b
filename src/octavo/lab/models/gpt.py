"""A GPT-2: pre-norm blocks, learned positions, one fused query-key-value linear, GELU, biases.

Shapes: B batch, T tokens, D dim, H heads, E head size, V vocab. Precision under autocast is as in `llama.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.lab.models.config import ModelConfig
from octavo.lab.models.language_model import check_length, head_output, reset_parameters
from octavo.nn.attention import ScaledDotProduct


class GPT(nn.Module):
    """GPT language model. `forward` returns logits, or the loss if targets are given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.pos_embeddings = nn.Embedding(config.sequence, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialise all parameters from `generator`."""
        reset_parameters(self, self.config.layers, generator)

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, *, by_sequence: bool = False, hits: bool = False
    ) -> Tensor:
        """Return the logits (B,T,V), or with targets the mean cross-entropy in FP32.

        Args:
            by_sequence: return the loss of each sequence, (B,), instead of the mean.
            hits: return also the top-1 accuracy of each sequence, (B, 2).

        Raises:
            ConfigError: T is longer than `config.sequence`.
        """
        length = check_length(tokens_BT, self.config.sequence)
        x_BTD = self.tok_embeddings(tokens_BT) + self.pos_embeddings.weight[:length]
        for block in self.layers:
            x_BTD = block(x_BTD)
        return head_output(self.norm(x_BTD), self.lm_head, targets_BT, by_sequence, hits)


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the residual stream after this block, in the shape and dtype of `x_BTD`."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        y_BTD: Tensor = x_BTD + self.feed_forward(self.ffn_norm(x_BTD))
        return y_BTD


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wqkv = nn.Linear(config.dim, 3 * config.dim)
        self.core = ScaledDotProduct("wo")
        self.wo = nn.Linear(config.dim, config.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the attention output, (B,T,D)."""
        qkv_BTHE: Tensor = self.wqkv(x_BTD).view(*x_BTD.shape[:-1], -1, self.head_dim)
        y_BTD: Tensor = self.wo(self.core(*qkv_BTHE.chunk(3, dim=2)))
        return y_BTD


class FeedForward(nn.Module):
    """`w2(gelu(w1(x)))`, with GPT-2's tanh form of GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim)
        self.w2 = nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output, (B,T,D)."""
        y_BTD: Tensor = self.w2(F.gelu(self.w1(x_BTD), approximate="tanh"))
        return y_BTD
