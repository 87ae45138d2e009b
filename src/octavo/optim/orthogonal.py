"""Newton and Schulz's iteration: the same singular vectors, singular values near one; many matrices at a time."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration, chosen for its slope at zero: singular values end between about 0.7 and 1.2.

Source: kellerjordan.github.io/posts/muon."""
STEPS = 5
EPS = 1e-7


def orthogonalise(
    x_BRC: Tensor, *, coefficients: tuple[float, float, float] = COEFFICIENTS, steps: int = STEPS, eps: float = EPS
) -> Tensor:
    """Return matrices near U V^T, where x = U S V^T: BF16 (B, R, C), contiguous. `x_BRC` is written over.

        x = x / max(|x|, eps)                  Frobenius norm, so that no singular value is above one
        repeat: x = a x + (b G + c G^2) x      G = x x^T; for tall matrices G = x^T x, multiplied from the right

    The products are BF16 with FP32 sums, as in `torch.optim.Muon`, but a whole batch in a launch: launches are what
    takes the time of small matrices.

    Args:
        x_BRC: BF16, contiguous.
        coefficients: a, b, c.
    """
    a, b, c = coefficients
    x = x_BRC.div_(x_BRC.norm(dim=(1, 2), keepdim=True).clamp(min=eps))
    is_tall = x.shape[1] > x.shape[2]
    for _ in range(steps):
        gram = x.mT @ x if is_tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, polynomial, beta=a) if is_tall else torch.baddbmm(x, polynomial, x, beta=a)
    return x
