"""FLOPs per token of a model, and peak FLOP/s of GPUs. Without torch."""

from __future__ import annotations

from octavo.lab.models.config import ModelConfig


def flops_per_token(config: ModelConfig, sequence: int) -> int:
    """Return the floating-point operations of training on one token: forward and backward, no recomputation.

    `6 N + 6 L D T` (Chowdhery et al. 2022, PaLM, appendix B, with causal attention counted at half):

    - N: the weights of GEMMs (all linear layers and the head; the embedding is a lookup without FLOPs). Each takes
      one multiply and one add in fprop, dgrad and wgrad: 6 operations.
    - Attention: a token attends to T/2 tokens on average. Scores and weighted values are two products of D
      channels, 2 * 2 * D * T/2 = 2 D T operations per layer forward, and twice that backward: 6 L D T.

    Norms, activations and the softmax are neglected: less than 1 %. `sequence` is the training length T.
    """
    attention = 6 * config.layers * config.heads * config.head_dim * sequence
    return 6 * matmul_parameters(config) + attention


def matmul_parameters(config: ModelConfig) -> int:
    """Return the number of weights in linear layers, including the head even if tied, without biases.

    Of a mixture those that a token meets: its experts, shared ones included, and the router.
    """
    kv_dim = config.key_value_heads * config.head_dim
    attention = 2 * config.dim * (config.heads * config.head_dim + kv_dim)
    feed_forward = (2 if config.architecture == "gpt" else 3) * config.dim * config.ffn_dim
    if config.architecture == "moe":
        feed_forward *= config.experts_per_token + config.shared_experts
        feed_forward += config.dim * config.experts
    return config.layers * (attention + feed_forward) + config.vocab * config.dim


def datasheet_tflops(gpu: str) -> float | None:
    """Return NVIDIA's dense BF16 peak of a GPU in TFLOP/s, or None for one not listed here.

    989 for SXM versions of the H100 and H200; their PCIe and NVL versions have lower clocks.
    """
    listed = any(name in gpu for name in ("H100", "H200")) and not any(card in gpu for card in ("PCIe", "NVL"))
    return 989.0 if listed else None
