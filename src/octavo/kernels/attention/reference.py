"""Reference attention in FP32, with the score matrix materialised.

Shapes are (B, H, T, E), and (B, G, T, E) for k and v; see `octavo.kernels.attention`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.kernels.product import product


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return y (B, H, T, E) in q's dtype and the logsumexp (B, H, T) in FP32."""
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    y = product((scores - lse[..., None]).exp(), _heads(v, q))
    return y.to(q.dtype), lse


def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq (B, H, T, E), dk and dv (B, G, T, E) in q's dtype."""
    dy = dy.float()
    p = (_scores(q, k, causal, scale) - lse[..., None]).exp()
    delta = (dy * y.float()).sum(-1, keepdim=True)
    ds = p * (product(dy, _heads(v, q).mT) - delta) * _scale(q, scale)
    dk, dv = (_grouped(x, k) for x in (product(ds.mT, q.float()), product(p.mT, dy)))
    return product(ds, _heads(k, q)).to(q.dtype), dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    scores = product(q.float(), _heads(k, q).mT) * _scale(q, scale)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf) if causal else scores


def _scale(q: Tensor, scale: float | None) -> float:
    return scale if scale is not None else 1 / math.sqrt(max(q.shape[-1], 1))


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """Return k or v in FP32, repeated to the query heads."""
    return x.float().repeat_interleave(q.shape[1] // max(x.shape[1], 1), dim=1)


def _grouped(gradient: Tensor, k: Tensor) -> Tensor:
    """Sum the gradient over the query heads of each key head, in the dtype of k."""
    batch, groups, *rest = k.shape
    return gradient.reshape(batch, groups, gradient.shape[1] // max(groups, 1), *rest).sum(2).to(k.dtype)
