"""The floor of a step: what remains when nothing but the unavoidable is left, at the rates measured in the same run.

    floor = GEMMs at the rate of their precision + attention as BF16 has it + unavoidable bytes at the rate of a copy

The GEMMs and the attention are taken as they are: calls into cuBLAS and cuDNN that read their operands from memory and
write their results to it. What lies between two of them is one pass that reads each of its operands once and writes
each of its results once; `block_bytes` and `model_bytes` say which. So the floor does not count launches, a second
read where a scale needs a maximum first, the scales themselves (a hundredth of the codes) and the cosines of the
rotation. A fusion into the GEMMs themselves, which vendors' GEMMs do not offer, could go below it.
"""

from __future__ import annotations

from octavo_bench.implementations import BF16, Implementation
from octavo_bench.rates import Rates
from octavo_bench.workloads import Workload


def floor_ms(workload: Workload, implementation: Implementation, rates: Rates, attention_ms: float) -> float:
    """Return the floor of an implementation in milliseconds."""
    moved = step_bytes(workload, fp8=implementation.is_fp8)
    return gemm_ms(workload, implementation, rates) + attention_ms + moved / rates.copy_gb_per_s / 1e6


def gemm_ms(workload: Workload, implementation: Implementation, rates: Rates) -> float:
    """Return the time of all GEMMs at the rates of their precision: a third of them each for fprop, dgrad, wgrad."""
    head = workload.vocab * workload.dim
    head_gemms = implementation.gemms if implementation.fp8_head else (BF16, BF16, BF16)
    teraflops = 2e-12 * workload.tokens
    return 1e3 * sum(
        teraflops * weights / rates.tflops[precision]
        for weights, gemms in ((workload.weights - head, implementation.gemms), (head, head_gemms))
        for precision in gemms
    )


def step_bytes(workload: Workload, *, fp8: bool) -> int:
    """Return the bytes that the passes of a step must move."""
    return workload.layers * block_bytes(workload, fp8=fp8) + (model_bytes(workload) if workload.vocab else 0)


def block_bytes(workload: Workload, *, fp8: bool) -> int:
    """Return the bytes that the passes of one block must move, forward and backward.

    T tokens, D width, E width of keys (and of values), F hidden width. BF16 has two bytes, a code one, and FP8 needs
    the codes of each operand twice: as it lies, and transposed, the transposed ones written in the pass that reads.

    | pass | reads | writes |
    | --- | --- | --- |
    | residual add and norm, twice | stream, branch | stream, GEMM operand |
    | rotation, forward | Q, K | Q, K |
    | attention's result (FP8 only) | it | GEMM operand |
    | SwiGLU, forward | gate, up | GEMM operand |
    | SwiGLU, backward | its gradient, gate, up | both gradients as GEMM operands |
    | norm and residual add, backward, twice | its gradient, stream, stream's gradient | that; a GEMM operand (FP8) |
    | rotation, backward | gradients of Q, K; of V (FP8 only) | the same as GEMM operands |
    | weights (FP8 only) | each weight | both codes |

    Where gate and up are kept in FP8, SwiGLU writes them in its forward, and reads as much less in its backward.
    """
    tokens, dim, ffn = workload.tokens, workload.dim, workload.ffn
    keys = dim // workload.heads * workload.kv_heads
    operand = 2  # bytes an element: BF16, or two codes
    norms = 2 * dim * (2 + 2 + 2 + operand)
    norms_backward = 2 * dim * (2 + 2 + 2 + 2 + (operand if fp8 else 0))
    rotation = (dim + keys) * (2 + 2)
    rotation_backward = (dim + keys + (keys if fp8 else 0)) * (2 + operand)
    attention = dim * (2 + operand) if fp8 else 0
    swiglu = ffn * (2 + 2 + operand) + ffn * (2 + 2 + 2 + 2 * operand)
    weights = sum(n * k for n, k in workload.block_gemms) * (2 + operand) if fp8 else 0
    return tokens * (norms + norms_backward + rotation + rotation_backward + attention + swiglu) + weights


def model_bytes(workload: Workload) -> int:
    """Return the bytes that a whole model moves beside its blocks.

    Embedding: rows read and written, forward and backward. Loss: logits read, their gradient written. Last norm: stream
    read and operand written; backward, gradient and stream read, gradient written. AdamW with BF16 states: parameter,
    gradient and both moments read, parameter and moments written; the norm for clipping reads the gradient once more.
    """
    tokens, dim, vocab = workload.tokens, workload.dim, workload.vocab
    parameters = workload.weights + vocab * dim  # the embedding is not multiplied
    embedding, last_norm = tokens * dim * 2 * 4, tokens * dim * 2 * 5
    return embedding + last_norm + tokens * vocab * 2 * 2 + parameters * 2 * (7 + 1)
