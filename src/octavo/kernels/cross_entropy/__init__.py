"""The cross-entropy contract: loss per row of a chunk of logits, and their gradient in place.

    loss_t = lse_t - z_target + z_loss * lse_t^2                           lse = log(sum(exp(z)))
    dz_tv  = softmax(z)_tv * (1 + 2 * z_loss * lse_t) - [v = target_t]

With a soft cap, z = softcap * tanh(logits / softcap) (Gemma 2, arXiv 2408.00118, section 2), included in the gradient.
`z_loss` keeps lse near zero (PaLM, arXiv 2204.02311, section 5). FP32 arithmetic, at most two reads of each row.

In-place, hence a plain function rather than a custom operator: an operator calls it (`octavo.nn.cross_entropy`).
"""

from __future__ import annotations

from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.runtime.dispatch import run_kernel


def cross_entropy_(
    logits_MV: Tensor,
    targets_M: Tensor,
    *,
    ignore_index: int = -100,
    gradient: bool = True,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the loss per row, FP32 (M,), and overwrite the logits with the gradient of the sum, in their dtype.

    A row with target `ignore_index` has loss 0 and gradient 0. On a GPU, where a check would synchronise, a row with
    any other target outside the vocabulary has NaN for both.

    Args:
        logits_MV: (M, V), FP32, BF16 or FP16, rows contiguous.
        targets_M: int64 (M,).
        gradient: False to leave the logits unchanged.
        softcap: 0 for none.

    Raises:
        ConfigError: on a CPU, a target is outside the vocabulary.
    """
    if not targets_M.is_cuda:
        _check(targets_M, logits_MV.shape[1], ignore_index)
    arguments = logits_MV, targets_M, ignore_index, gradient, softcap, z_loss
    loss_M: Tensor = run_kernel("cross_entropy.cross_entropy_", logits_MV, arguments, "cross_entropy")
    return loss_M


def _check(targets_M: Tensor, vocab: int, ignore_index: int) -> None:
    outside = ((targets_M < 0) | (targets_M >= vocab)) & (targets_M != ignore_index)
    if bool(outside.any()):
        raise ConfigError(
            f"target {int(targets_M[outside][0])} is outside the vocabulary of {vocab} tokens. "
            f"Targets are 0 to {vocab - 1}, or {ignore_index} for an ignored token."
        )
