"""Softmax attention that can save its result in FP8, as the same codes that the next layer reads.

PyTorch's attention saves its output y for backward, and an FP8 linear layer that reads y saves codes of it. Backward of
attention needs y only for one sum per token and head, `rowsum(dy y)`. So the codes serve both: y is quantised here as
its reader would, and the codes are attached to it (`octavo.nn.attached_codes`).

The forward is unchanged, bit for bit, and so are the gradients of the reader. Those of q, k and v see the rounded y.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import kernels
from octavo._util.autograd import first_order, refuse_transforms
from octavo.errors import UnsupportedError
from octavo.kernels import QuantSpec
from octavo.kernels.attention import attention, attention_backward
from octavo.kernels.quant_spec import spec_of
from octavo.kernels.runtime import ledger
from octavo.kernels.runtime.dispatch import is_plain
from octavo.nn import documents
from octavo.nn.attached_codes import attach_codes
from octavo.nn.documents import Mask
from octavo.nn.operands import autocast_dtype
from octavo.nn.switch import Switchable
from octavo.numerics import Quantized
from octavo.recipes import Recipe

OWN = QuantSpec("e4m3", "row", "power_of_two")
"""Format of the saved output if its reader's codes cannot be made in advance."""


class ScaledDotProduct(Switchable):
    """`scaled_dot_product_attention` as a child module, so that a policy finds it and the layer that reads it.

    It has no parameters, so that state dicts do not change. Until `keep_codes` is called it is PyTorch's function.
    """

    enabled: bool
    """False: save the output as PyTorch does."""
    target: QuantSpec | None
    """Quantisation of the saved output; None: it is saved unchanged."""
    shares: bool
    """Whether the reader uses the same codes."""
    context: Any = None
    """Ranks with other tokens of the same sequences, over which this attends (`octavo.distributed.Context`)."""

    def __init__(self, reader: str, *, causal: bool = True) -> None:
        """Create the attention of a module.

        Args:
            reader: name of the sibling, a linear layer, that alone reads the output.
            causal: whether a token attends only to itself and those before it.
        """
        super().__init__()
        self.reader, self.causal = reader, causal
        self.keep_values()

    def keep_values(self) -> None:
        """Save the output for backward unchanged."""
        self.enabled, self.target, self.shares = True, None, False

    def keep_codes(self, recipe: Recipe) -> None:
        """Save the output for backward in FP8.

        Args:
            recipe: recipe of the reader.
        """
        self.enabled, self.shares = True, shares_codes(recipe)
        self.target = spec_of(recipe.fprop.input) if self.shares else OWN

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
        """Return (B, T, H E), in q's dtype or autocast's, for q (B, T, H, E), k and v (B, T, G, E), G dividing H.

        B: batch, T: tokens, H: query heads, G: key and value heads, E: channels of a head. A mask
        (`octavo.nn.documents`) replaces the causal one; the output is then saved as in PyTorch.
        """
        outside = "it has a mask" if mask is not None else "it is of several ranks" if self.context is not None else ""
        if outside and self.target is not None and not torch.compiler.is_compiling():
            ledger.fall_back(f"attention kept its output as it is, not in FP8: {outside}")
        if outside or self.target is None or not self.enabled or not torch.is_grad_enabled() or not _takes(q, k, v):
            return self._as_pytorch(q, k, v, mask)
        if (dtype := autocast_dtype(q.device.type)) is not None:
            q, k, v = (x.to(dtype) for x in (q, k, v))
        refuse_transforms()
        y_BTD, codes, scale = _Function.apply(q, k, v, self.causal, self.target)  # type: ignore[no-untyped-call]
        if self.shares:
            attach_codes(y_BTD, (Quantized(codes, scale, self.target.tile), self.target))
        result: Tensor = y_BTD
        return result

    def _as_pytorch(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        if self.context is not None:
            if mask is not None:
                raise UnsupportedError("attention over the tokens of several ranks takes no mask.")
            y_BTHE: Tensor = self.context.attend(q, k, v, self.causal)
            return y_BTHE.flatten(2)
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        else:
            y = documents.attend(q, k, v, mask)
        return y.transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this module."""
        kept = "" if self.target is None else f"output kept as {self.target}"
        return ", ".join(filter(None, (f"reader={self.reader}", "causal" if self.causal else "", kept)))


def shares_codes(recipe: Recipe) -> bool:
    """Return whether layers of this recipe read codes that follow from their input alone, the same each time."""
    return recipe.fprop.is_fp8 and recipe.fprop.input.is_repeatable and not recipe.second("input")


def unsupported_reason(recipe: Recipe | None, keeps_input: bool) -> str | None:
    """Return why codes of the output would save nothing, or None.

    Args:
        recipe: recipe of the reader; None if it stays in BF16.
        keeps_input: whether the reader saves its input unchanged (`Policy.requantise`).
    """
    if recipe is None or not recipe.wgrad.is_fp8:
        return "it keeps its input in BF16 for its own backward"
    return "`requantise` has it keep its input as it is" if keeps_input else None


def _takes(*tensors: Tensor) -> bool:
    """Return whether these are tensors that the operators take; others, such as a DTensor, are left to PyTorch."""
    plain = all(is_plain(x) and x.dim() == 4 for x in tensors)
    if not plain and not torch.compiler.is_compiling():
        kinds = ", ".join(type(x).__name__ for x in tensors)
        ledger.fall_back(f"attention kept its output as it is, not in FP8: q, k and v are {kinds}")
    return plain


class _Function(torch.autograd.Function):
    """y (B, T, H E), with its codes and scales, which backward reads in its place."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, target: QuantSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, lse = attention(q, k, v, causal, None)
        y_BTD = y.flatten(2).detach()  # a view made here could not be written to
        codes, scale, _ = kernels.quantize_matrix(y_BTD.flatten(0, 1), target)
        ctx.save_for_backward(q, k, v, codes, scale, lse)
        ctx.causal, ctx.target = causal, target
        ctx.mark_non_differentiable(codes, scale)
        ctx.set_materialize_grads(False)  # otherwise backward gets zeros for the codes
        return y_BTD, codes, scale

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, codes, scale, lse = ctx.saved_tensors
        if grad_outputs[0] is None:
            return (None,) * 5
        dy, y = grad_outputs[0].reshape(q.shape), Quantized(codes, scale, ctx.target.tile)
        return *attention_backward(dy, q, k, v, y, lse, ctx.causal, None), None, None
