"""The attention contract: softmax attention, whose backward takes the output as codes.

    P = softmax(q k^T scale), causal: over tokens up to and including the query's         y = P v
    dv = P^T dy    dP = dy v^T    dS = P (dP - delta), delta = rowsum(dy y)    dq = dS k scale    dk = dS^T q scale

B: batch. T: tokens. H: query heads. G: key and value heads, a divisor of H, each read by H / G query heads. E: channels
per head. Layout is that of linear layers, (B, T, H, E), so that y is (B, T, H E) without a copy.

Backward needs y only for delta, one sum per token and head (Dao et al., FlashAttention, 2022, section B.2). So y is
passed as codes and decoded inside the operator, where no compiler can move the decoding into forward.

On a GPU, PyTorch's fused kernels, selected as by `scaled_dot_product_attention` under the same settings
(`torch.nn.attention.sdpa_kernel`); all return the same logsumexp per row. On a CPU, PyTorch's flash attention.
`reference.py`, the definition, covers all else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from octavo.errors import ConfigError
from octavo.kernels.attention import reference
from octavo.kernels.runtime import ledger
from octavo.kernels.runtime.operation import operation
from octavo.numerics import Quantized, dequantize

_LSE_ALIGNMENT = 32
"""Row alignment of the logsumexp of memory-efficient attention."""


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    if not fits or (q.shape[2] % k.shape[2] if k.shape[2] else q.shape[2]):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ConfigError(f"attention takes q (B, T, H, E), k and v (B, T, G, E), with G a divisor of H; got {shapes}.")
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigError(f"attention takes q, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}.")


def _backend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> SDPBackend:
    """Return the SDPA backend, MATH for the reference. q: (B, H, T, E); k, v: (B, G, T, E)."""
    if not (q.numel() and k.numel()) or q.device.type not in ("cpu", "cuda"):
        return SDPBackend.MATH
    chosen: int = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    backend = SDPBackend(chosen)
    known = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    fused = backend in known and (q.device.type == "cpu" or q.shape[3] % 8 == 0)
    if not fused and q.is_cuda:
        ledger.fall_back(f"attention of {tuple(q.shape)} {q.dtype} ran as reference: PyTorch has no fused kernel")
    return backend if fused else SDPBackend.MATH


def _attention_fake(q: Tensor, *_others: object) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=torch.float32)


@operation(fake=_attention_fake)
def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, H, E), contiguous, in q's dtype, and the logsumexp of each row, FP32 (B, H, T).

    Args:
        q: (B, T, H, E), BF16, FP16 or FP32, last dimension contiguous.
        k: (B, T, G, E), as q.
        v: (B, T, G, E), as q.
        causal: attend to the same and earlier tokens only.
        scale: factor of the scores; default 1 / sqrt(E).

    Raises:
        ConfigError: mismatched shapes or dtypes.
    """
    _check(q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    backend, aten = _backend(q, k, v, causal, scale), torch.ops.aten
    if backend == SDPBackend.MATH:
        y, lse = reference.attention(q, k, v, causal, scale)
    elif q.device.type == "cpu":
        y, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, *_repeated(q, k, v), 0.0, causal, scale=scale)
    elif backend == SDPBackend.CUDNN_ATTENTION:
        y, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    elif backend == SDPBackend.FLASH_ATTENTION:
        y, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        y, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    rows = lse.flatten(2)[..., : q.shape[2]]  # drops a last dimension of 1 or padding rows
    return y.transpose(1, 2).contiguous(), rows.contiguous()


@operation(fake=lambda _dy, q, k, v, *_: [x.new_empty(x.shape) for x in (q, k, v)])
def attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Quantized,
    lse: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq (B, T, H, E), dk and dv (B, T, G, E), contiguous, in q's dtype.

    Args:
        dy: (B, T, H, E), in q's dtype.
        y: forward's output, codes (B T, H E).
        lse: FP32 (B, H, T), from forward.

    Other arguments and errors as for `attention`.
    """
    _check(q, k, v)
    decoded = decode(y, q.dtype).view(q.shape)
    dy, decoded, q, k, v = (x.transpose(1, 2) for x in (dy, decoded, q, k, v))
    backend = _backend(q, k, v, causal, scale)
    if backend == SDPBackend.MATH:
        gradients: Sequence[Tensor] = reference.attention_backward(dy, q, k, v, decoded, lse, causal, scale)
    elif q.device.type == "cpu":
        dq, *repeated = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, *_repeated(q, k, v), decoded, lse, 0.0, causal, scale=scale
        )
        gradients = dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in repeated)
    else:
        gradients = _backward_on_cuda(backend, dy, (q, k, v), decoded, lse, causal, scale)
    dq, dk, dv = (gradient.transpose(1, 2).contiguous() for gradient in gradients)
    return dq, dk, dv


def _backward_on_cuda(
    backend: SDPBackend, dy: Tensor, qkv: Sequence[Tensor], y: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> Sequence[Tensor]:
    aten, q, length = torch.ops.aten, qkv[0], qkv[0].shape[2]
    unused = q.new_empty((), dtype=torch.int64)  # dropout seed and offset; dropout is off
    if backend == SDPBackend.CUDNN_ATTENTION:
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            dy, *qkv, y, lse[..., None], unused, unused, None, None, None, length, length, 0.0, causal, scale=scale
        )
    elif backend == SDPBackend.FLASH_ATTENTION:
        rng_state = q.new_empty(2, dtype=torch.uint64)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            dy, *qkv, y, lse, None, None, length, length, 0.0, causal, rng_state, unused, scale=scale
        )
    else:
        padded = F.pad(lse, (0, -length % _LSE_ALIGNMENT), value=torch.inf)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            dy, *qkv, None, y, padded, unused, unused, 0.0, [True, True, True, False], causal, scale=scale
        )
    return dq, dk, dv


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v repeated to H heads: older PyTorch versions have no GQA on a CPU."""
    times = q.shape[1] // k.shape[1]
    return k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)


def decode(x: Quantized, dtype: torch.dtype) -> Tensor:
    """Return `numerics.dequantize(x, dtype)` without an FP32 copy: products are rounded when stored."""
    rows, cols = x.codes.shape
    tile_cols = x.granularity.cols or cols
    if x.granularity.rows not in (1, None) or not x.codes.numel() or cols % tile_cols or dtype == torch.float32:
        return dequantize(x, dtype)
    values = x.codes.to(dtype)  # exact: BF16 and FP16 represent all E4M3 and E5M2 values
    values.view(rows, -1, tile_cols).mul_(x.scale[..., None])
    return values
