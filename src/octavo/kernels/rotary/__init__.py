"""The rotary contract: rotation of channel pairs by token position (RoPE).

    y_i       = x_i       * cos_i       - x_(i+E/2) * sin_i            i < E/2
    y_(i+E/2) = x_(i+E/2) * cos_(i+E/2) + x_i       * sin_(i+E/2)

B: batch. T: tokens. H: heads. E: channels per head; channel i is paired with i + E/2, as in Hugging Face's weights.
Tables of E/2 columns are read twice: y is then a rotation. FP32 arithmetic, rounded once to x's dtype. The gradient is
the transposed map, the inverse of a rotation: `conjugate` swaps the halves of sin and negates them.

A custom operator: Triton on a GPU; `reference.py`, the definition, elsewhere.
"""

from __future__ import annotations

from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.rotary import reference
from octavo.kernels.runtime.operation import operation


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, conjugate: bool = False) -> Tensor:
    """Rotate x into (B, T, H, E) in x's dtype, contiguous, so that `y.flatten(2)` is a view.

    Args:
        x: (B, T, H, E), BF16, FP16 or FP32, any strides: pass a (B, H, T, E) tensor as `x.transpose(1, 2)`.
        cos: (T, E/2), (1, T, E/2), or (B, T, E/2) for positions per sequence, any of these dtypes; or of width E, as in
            Hugging Face, where the second half repeats the first.
        sin: as cos.
        conjugate: the transposed map.

    Raises:
        ConfigError: mismatched shapes.
    """
    if x.dim() != 4 or x.shape[-1] % 2:
        raise ConfigError(f"rotate takes (B, T, H, E) with E even, got shape {tuple(x.shape)}.")
    return _rotate(x, _table(cos, x, "cos"), _table(sin, x, "sin"), conjugate)


def _table(table: Tensor, x: Tensor, name: str) -> Tensor:
    """Return a table in the shape (1 or B, T, E/2 or E)."""
    batch, length, _, width = x.shape
    given = tuple(table.shape)
    table = table[None] if table.dim() == 2 else table
    if table.dim() != 3 or table.shape[0] not in (1, batch) or table.shape[1] != length:
        raise ConfigError(f"{name} has shape {given}, but x {tuple(x.shape)} wants ({length}, {width // 2}).")
    if table.shape[2] not in (width // 2, width):
        raise ConfigError(
            f"{name} has {table.shape[2]} columns for {width} channels: {width // 2} or {width} are read."
        )
    return table


def _unsupported_reason(x: Tensor, *_: object) -> str | None:
    return "the row count exceeds 32 bits" if x.numel() >= 2**31 * x.shape[-1] else None


@operation(reference=reference.rotate, unsupported=_unsupported_reason, fake=lambda x, *_: x.new_empty(x.shape))
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, conjugate: bool) -> Tensor: ...
