"""Products in high precision that Octavo computes itself."""

from __future__ import annotations

import torch
from torch import Tensor

_BY_DIM = {2: torch.ops.aten.mm.default, 3: torch.ops.aten.bmm.default, 4: torch.ops.aten.matmul.default}


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return A B of matrices, or of batches of them. `octavo.autocast` takes `A @ B` as a user's, and not this."""
    result: Tensor = _BY_DIM[a.dim()](a, b)
    return result
