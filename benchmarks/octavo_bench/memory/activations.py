"""What a Llama block keeps from forward to backward, in bytes a token, by option: on paper, as the code computes it.

A test holds it to the storages that a block really saves. D: width. F: hidden width. G: channels of the keys, and of
the values. H: query heads. The recipe scales a token, as `folded` does; layers share inputs and MLPs are fused.
"""

from __future__ import annotations

from octavo.conversion import Policy
from octavo.models.config import ModelConfig

BF16, CODE, SCALE, TILE = 2, 1, 4, 128


def kept(config: ModelConfig, policy: Policy | None = None) -> dict[str, int]:
    """Return the bytes that a token costs in a block of a converted Llama, by what they hold."""
    policy = policy or Policy()
    dim, ffn, keys = config.dim, config.ffn_dim, config.head_dim * config.key_value_heads
    by_row, by_tile = CODE * dim + SCALE, {width: CODE * width + SCALE * -(-width // TILE) for width in (dim, ffn)}
    return {
        "inputs of the norms": 2 * ((by_tile[dim] if policy.norm_inputs == "fp8" else BF16 * dim) + SCALE),
        "codes that layers read": 3 * by_row,
        "queries, keys, values": BF16 * (dim + 2 * keys),
        "attention's output": 0 if policy.attention_output == "fp8" else BF16 * dim,
        "logsumexp": SCALE * config.heads,
        "gate and up": 2 * (by_tile[ffn] if policy.activation_inputs == "fp8" else BF16 * ffn),
        "scale of the hidden activation": SCALE,
    }


def recomputed(config: ModelConfig, keep: float) -> tuple[int, float]:
    """Return the bytes a token of a block that is recomputed, and the share of its forward's FLOPs that run again.

    Args:
        keep: FLOPs a byte from which on a result is kept, infinite for none.
    """
    dim, ffn, keys = config.dim, config.ffn_dim, config.head_dim * config.key_value_heads
    results = [  # length of the sum, elements a token, other bytes kept with it
        (dim, dim + 2 * keys, 0),
        (config.sequence, dim, SCALE * config.heads),
        (dim, dim, 0),
        (dim, 2 * ffn, 0),
        (ffn, dim, 0),
    ]
    size = BF16 * dim + sum(BF16 * elements + more for length, elements, more in results if length >= keep)
    flops = sum(length * elements for length, elements, _ in results)
    return size, sum(length * elements for length, elements, _ in results if length < keep) / flops
