"""Model configuration, validated on creation. Without torch, for the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from octavo.errors import ConfigError, did_you_mean

Architecture = Literal["llama", "gpt", "moe"]
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


MOST_LAYERS = 10_000
"""Largest number of layers: each is a module of Python, whose construction nobody would wait for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of a Llama, a GPT or a mixture of experts.

    Raises:
        ConfigError: an invalid value; the message names the field.
    """

    architecture: Architecture = "llama"
    """`llama` (RMSNorm, rotary, SwiGLU, no biases), `gpt` (LayerNorm, learned positions, GELU, biases) or `moe` (a
    Llama with a mixture of experts in each block)."""
    vocab: int
    """Number of token ids; a multiple of 16 lets the head run in FP8."""
    dim: int
    """Width of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Number of query heads; divides `dim`."""
    kv_heads: int | None = None
    """Number of key and value heads (grouped queries, `llama` only); None means `heads`."""
    ffn: int | None = None
    """Hidden width of the feed-forward; None means 8/3 `dim` rounded up (`llama`), 4 `dim` (`gpt`), or for each expert
    a Llama's divided by the experts that a token goes to (`moe`)."""
    sequence: int
    """Longest sequence, in tokens."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths (`llama` only)."""
    tie_embeddings: bool = False
    """Whether the head shares the weight of the token embedding."""
    norm_eps: float = 1e-5
    """Added to the variance in the norms."""
    head_size: int | None = None
    """Channels of one head (`llama` only); None means `dim / heads`."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases, as in Qwen 2 (`llama` only)."""
    qk_norm: bool = False
    """Whether queries and keys of each head are normalised, as in Qwen 3 (`llama` only)."""
    rope_scaling: dict[str, float] = field(default_factory=dict, hash=False)
    """Llama 3's stretched wavelengths: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings."""
    documents: Literal["joined", "separate"] = "joined"
    """`separate`: attention does not leave a document, and its positions start at 0 (`llama` and `moe` only). Chat data
    set it; documents of text then begin with the tokenizer's BOS, if it has one."""
    experts: int = 16
    """Number of experts per block (`moe` only)."""
    experts_per_token: int = 2
    """Number of experts that a token is sent to (`moe` only)."""
    shared_experts: int = 0
    """Number of further experts that every token is sent to (`moe` only)."""
    balance_rate: float = 1e-3
    """Step of the biases by which experts are kept equally busy, after each optimizer step; 0: none (`moe` only)."""
    balance_loss: float = 0.0
    """Factor of the balance loss that joins the loss in training; 0: none (`moe` only)."""

    def __post_init__(self) -> None:
        if self.architecture not in get_args(Architecture):
            near = did_you_mean(str(self.architecture), get_args(Architecture))
            raise ConfigError(f"model.architecture: {self.architecture!r} is none of 'llama', 'gpt' and 'moe'.{near}")
        for name in (
            "vocab",
            "dim",
            "layers",
            "heads",
            "kv_heads",
            "ffn",
            "sequence",
            "rope_theta",
            "norm_eps",
            "head_size",
            "experts",
            "experts_per_token",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"model.{name}: {value} is not a positive number.")
        if self.layers > MOST_LAYERS:
            raise ConfigError(f"model.layers: {self.layers} is more than {MOST_LAYERS}, which take minutes to build.")
        for name in ("shared_experts", "balance_rate", "balance_loss"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"model.{name}: {getattr(self, name)} is negative.")
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"model.experts_per_token: {self.experts_per_token} experts per token of model.experts {self.experts}."
            )
        self._check_heads()

    def _check_heads(self) -> None:
        if self.head_size is None and self.dim % self.heads:
            raise ConfigError(f"model.heads: {self.heads} heads do not divide dim {self.dim}.")
        if self.heads % self.key_value_heads:
            raise ConfigError(f"model.kv_heads: {self.kv_heads} does not divide heads {self.heads}.")
        of_llama: dict[str, object] = {
            "head_size": None,
            "qkv_bias": False,
            "qk_norm": False,
            "rope_scaling": {},
            "documents": "joined",
        }
        for name, without in of_llama.items() if self.architecture == "gpt" else ():
            if getattr(self, name) != without:
                raise ConfigError(f"model.{name}: {getattr(self, name)!r} needs architecture 'llama'.")
        if self.rope_scaling and self.rope_scaling.keys() != set(ROPE_SCALING):
            raise ConfigError(
                f"model.rope_scaling: needs {', '.join(ROPE_SCALING)}; has {', '.join(self.rope_scaling)}."
            )
        if self.architecture == "gpt" and self.key_value_heads != self.heads:
            raise ConfigError("model.kv_heads: grouped queries need architecture 'llama'; leave it out for 'gpt'.")
        if self.architecture != "gpt" and self.head_dim % 2:
            raise ConfigError(
                f"model.heads: dim {self.dim} / heads {self.heads} gives heads of {self.head_dim}, which is odd; "
                "rotary positions turn pairs of channels, choose an even head size."
            )

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.dim // self.heads if self.head_size is None else self.head_size

    @property
    def key_value_heads(self) -> int:
        """`kv_heads`, or `heads` where it is None."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def ffn_dim(self) -> int:
        """`ffn`, or the architecture's usual width where it is None.

        A Llama has three feed-forward matrices where a GPT has two, so 8/3 `dim` keeps its parameters at
        those of 4 `dim`. Rounded up to a multiple of 128 (a block of scales, a tile), or of 32 in models too
        small for that.
        """
        if self.ffn is not None:
            return self.ffn
        if self.architecture == "gpt":
            return 4 * self.dim
        multiple = 128 if self.dim >= 512 else 32
        active = self.experts_per_token + self.shared_experts if self.architecture == "moe" else 1
        return -(-8 * self.dim // (3 * multiple * active)) * multiple
