"""Reference cross-entropy and its gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_(
    logits_MV: Tensor, targets_M: Tensor, ignore_index: int, gradient: bool, softcap: float, z_loss: float
) -> Tensor:
    """See `octavo.kernels.cross_entropy.cross_entropy_`."""
    z_MV = logits_MV.float()
    if softcap:
        z_MV = softcap * torch.tanh(z_MV / softcap)
    counted_M = targets_M != ignore_index
    valid_M = counted_M & (targets_M >= 0) & (targets_M < logits_MV.shape[1])
    fill_M = torch.where(counted_M, torch.nan, 0.0)  # loss and gradient of rows without a valid target
    index_M1 = targets_M.where(valid_M, 0)[:, None]
    log_p_MV = z_MV.log_softmax(dim=1)
    loss_M = -log_p_MV.gather(1, index_M1)[:, 0]
    lse_M = z_MV.logsumexp(dim=1) if z_loss else None
    if lse_M is not None:
        loss_M = loss_M + z_loss * lse_M.square()
    if gradient:
        d_MV = log_p_MV.exp_()
        if lse_M is not None:
            d_MV *= (1 + 2 * z_loss * lse_M)[:, None]
        d_MV.scatter_add_(1, index_M1, d_MV.new_full(index_M1.shape, -1.0))
        if softcap:
            d_MV *= 1 - (z_MV / softcap).square()
        logits_MV.copy_(d_MV)
        logits_MV[~valid_M] = fill_M[~valid_M, None].to(logits_MV.dtype)
    return torch.where(valid_M, loss_M, fill_M)
