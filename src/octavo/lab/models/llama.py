"""A Llama: pre-norm blocks, rotary positions, grouped queries, SwiGLU; by options also a Mistral, Qwen 2 or Qwen 3.

Shapes: B batch, T tokens, D dim, H query heads, G key and value heads, E head size, V vocab.

Under `torch.autocast(bfloat16)` the linears compute in BF16 while the residual stream, the norms, the
rotation and the loss stay in FP32: the embedding gives FP32, and adding a BF16 branch to an FP32 stream gives
FP32. Each block compiles on its own: `for block in model.layers: block.compile(fullgraph=True)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.lab.models.config import ROPE_SCALING, ModelConfig
from octavo.lab.models.hugging_face import stored_config, stored_name
from octavo.lab.models.language_model import check_length, head_output, reset_parameters, separate_documents
from octavo.nn.attention import ScaledDotProduct
from octavo.nn.documents import Mask, mask_of
from octavo.nn.rotary import rotate


class Llama(nn.Module):
    """Llama language model. `forward` returns logits, or the loss if targets are given."""

    rope_cos: Tensor
    rope_sin: Tensor
    context: Any = None
    """Ranks that share the tokens of sequences (`octavo.distributed.context_parallel`)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(self.block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight
        cos_TE, sin_TE = rotary_tables(config.head_dim, config.sequence, config.rope_theta, config.rope_scaling)
        self.register_buffer("rope_cos", cos_TE, persistent=False)
        self.register_buffer("rope_sin", sin_TE, persistent=False)

    def block(self, config: ModelConfig) -> nn.Module:
        """Return a new block."""
        return Block(config)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialise all parameters from `generator`."""
        reset_parameters(self, self.config.layers, generator)

    def stored_form(self) -> tuple[Callable[[str], str], dict[str, Any]] | None:
        """Return Hugging Face's name of a module, and config.json without quantisation, for `octavo.export`.

        None: Hugging Face has no such model.

        Raises:
            UnsupportedError: Hugging Face has no model with these options.
        """
        return stored_name, stored_config(self.config)

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor | None = None, *, by_sequence: bool = False, hits: bool = False
    ) -> Tensor:
        """Return the logits (B,T,V), or with targets the mean cross-entropy in FP32, without those that are -100.

        Args:
            tokens_BT: ids; with `config.documents` separate, `~id` for the first id of a document.
            targets_BT: the next ids. With `context` results are of this rank's tokens.
            by_sequence: return the loss of each sequence, (B,), instead of the mean.
            hits: return also the top-1 accuracy of each sequence, (B, 2).

        Raises:
            ConfigError: T is longer than `config.sequence`.
        """
        length = check_length(tokens_BT, self.config.sequence)
        cos_TE, sin_TE = self.rope_cos[:length], self.rope_sin[:length]
        if self.context is not None:
            tokens_BT, cos_TE, sin_TE = (
                self.context.own(x, dim) for x, dim in ((tokens_BT, 1), (cos_TE, 0), (sin_TE, 0))
            )
            targets_BT = None if targets_BT is None else self.context.own(targets_BT)
        mask = None
        if self.config.documents == "separate":
            tokens_BT, position_BT, document_BT = separate_documents(tokens_BT)
            cos_TE, sin_TE = cos_TE[position_BT], sin_TE[position_BT]  # (B,T,E)
            mask = mask_of(document_BT, self.config.head_dim)
        x_BTD, balance = self.run_blocks(self.tok_embeddings(tokens_BT), cos_TE, sin_TE, mask)
        output = head_output(self.norm(x_BTD), self.lm_head, targets_BT, by_sequence, hits)
        return output if balance is None or targets_BT is None else output + balance

    def run_blocks(
        self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, mask: Mask | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream after all blocks, and what joins the loss: nothing here."""
        for block in self.layers:
            x_BTD = block(x_BTD, cos_TE, sin_TE, mask)
        return x_BTD, None


class Block(nn.Module):
    """Attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = self.feed(config)

    def feed(self, config: ModelConfig) -> nn.Module:
        """Return a new feed-forward."""
        return FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, mask: Mask | None = None) -> Tensor:
        """Return the residual stream after this block, in the shape and dtype of `x_BTD`."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TE, sin_TE, mask)
        y_BTD: Tensor = x_BTD + self.feed_forward(self.ffn_norm(x_BTD))
        return y_BTD


class Attention(nn.Module):
    """Causal self-attention, with grouped queries where `kv_heads` is below `heads`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_dim, kv_dim = (heads * config.head_dim for heads in (config.heads, config.key_value_heads))
        self.wq = nn.Linear(config.dim, q_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.q_norm: nn.Module = _head_norm(config)
        self.k_norm: nn.Module = _head_norm(config)
        self.core = ScaledDotProduct("wo")
        self.wo = nn.Linear(q_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor, mask: Mask | None = None) -> Tensor:
        """Return the attention output, (B,T,D); the tables are (T,E/2), or (B,T,E/2) by row."""
        q_BTHE = rotate(self.q_norm(self._heads(self.wq(x_BTD))), cos_TE, sin_TE)
        k_BTGE = rotate(self.k_norm(self._heads(self.wk(x_BTD))), cos_TE, sin_TE)
        v_BTGE = self._heads(self.wv(x_BTD))
        y_BTD: Tensor = self.wo(self.core(q_BTHE, k_BTGE, v_BTGE, mask))
        return y_BTD

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:-1], -1, self.head_dim)


class FeedForward(nn.Module):
    """SwiGLU: `w2(silu(w1(x)) * w3(x))`."""

    def __init__(self, config: ModelConfig, ffn: int | None = None) -> None:
        """Make the layers. ffn: the hidden width; None means `config.ffn_dim`."""
        super().__init__()
        dim, ffn = config.dim, ffn or config.ffn_dim
        self.w1 = nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output, (B,T,D)."""
        y_BTD: Tensor = self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))
        return y_BTD


def _head_norm(config: ModelConfig) -> nn.Module:
    return nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()


def rotary_tables(
    head_dim: int, sequence: int, theta: float, scaling: Mapping[str, float] | None = None
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (T, E/2) in FP32: pair i of position t is rotated by `t * theta^(-2i/E)`.

    With `scaling` (`ModelConfig.rope_scaling`) channels that turn less than `low_freq_factor` times in the original
    length turn `factor` times slower, those of more than `high_freq_factor` as before, and those between are
    interpolated (Llama 3.1: Grattafiori et al. 2024, arXiv 2407.21783).
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling:
        low, high, length = (scaling[name] for name in ROPE_SCALING[1:])
        turns = length * frequencies / (2 * math.pi)  # in the original length
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling["factor"])
    angles_TE = torch.outer(torch.arange(sequence, dtype=torch.float64), frequencies)
    return angles_TE.cos().float(), angles_TE.sin().float()
