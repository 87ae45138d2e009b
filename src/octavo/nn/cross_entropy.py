"""The output head fused with its loss: logits exist for a chunk of tokens at a time, and are not saved for backward.

M: tokens, V: vocabulary, K: width of the model.

The logits of a chunk become its loss and, in the same memory, their gradient, which is multiplied into dX and dW at
once, in forward. Backward only multiplies by the gradient of the loss (as in Liger Kernel's fused linear cross-entropy,
arXiv 2410.10989, section 3.3). Saved for backward are dX, and dW if it is needed.

dW is summed over chunks in FP32: for BF16 GEMMs on a GPU inside the GEMM, otherwise from each chunk's result in the
dtype of the GEMM. Reading and writing it is the cost of many small chunks: a few percent with 4096 tokens.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from octavo import kernels
from octavo._util.autograd import first_order
from octavo.errors import ConfigError
from octavo.kernels.cross_entropy import cross_entropy_
from octavo.kernels.product import product
from octavo.kernels.runtime.dispatch import on_gpu
from octavo.kernels.runtime.operation import operation
from octavo.nn.first_call import note_weight
from octavo.nn.fp8_weights import values
from octavo.nn.functional import (
    InputSource,
    SavedInput,
    compute_dtype,
    fprop,
    read_gradient,
    read_input,
    read_weights,
    save_weights,
    transposed_input,
    transposed_weight,
)
from octavo.nn.lora import has_update
from octavo.nn.operands import check_dtypes
from octavo.numerics import Granularity, Quantized, Scaling
from octavo.recipes import LinearPlan, RecipeLike, load, names, plan_by
from octavo.tensor import FP8Tensor, implements

CHUNK_BYTES = {"cuda": 2**30, "cpu": 2**26}
"""Bytes that the logits of one chunk may take."""


IGNORED = -100
"""Target of a token that does not count, as in PyTorch."""


class LossOptions(NamedTuple):
    """Options beyond those of `torch.nn.functional.cross_entropy`."""

    softcap: float = 0.0
    """Logits become softcap * tanh(logits / softcap); 0 for none."""
    z_loss: float = 0.0
    """Adds z_loss * log(sum(exp(logits)))^2 to each token's loss."""
    chunk: int | None = None
    """Tokens whose logits exist at a time; None: as many as fit in `CHUNK_BYTES`."""


def linear_cross_entropy(
    x: Tensor,
    weight_VK: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    recipe: RecipeLike = "bf16",
    ignore_index: int = IGNORED,
    reduction: Literal["mean", "sum"] = "mean",
    **options: Any,
) -> Tensor:
    """Return `F.cross_entropy(x W^T + b, targets)` in FP32, shape (), with the three GEMMs of `recipe`.

    The GEMMs compute in autocast's dtype if it is on, otherwise in that of x; gradients have the dtypes of their
    tensors. They are computed in forward, for tensors that require them only; there is no second derivative.

    Args:
        x: (..., K), with any leading dimensions.
        weight_VK: (V, K), any floating-point dtype.
        targets: int64, the shape of x without its last dimension.
        bias: (V,) or None.
        ignore_index: target of tokens that do not count.
        reduction: `mean` over the tokens that count (NaN if none does, as in PyTorch), or `sum`.
        options: fields of `LossOptions`: `softcap`, `z_loss`, `chunk`.

    Raises:
        ConfigError: shapes or options that do not fit, a recipe that stores scales from step to step, the weight of a
            layer with a LoRA update; on a CPU, a target outside the vocabulary. On a GPU such a target makes the loss
            NaN, because a check would wait for the device.
    """
    softcap, z_loss, chunk = how = LossOptions(**options)
    _check(x, weight_VK, targets, bias, reduction, how)
    note_weight(weight_VK)
    dtype = compute_dtype(x)
    x_MK, targets_M = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(-1)
    differentiated = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight_VK, bias)]
    if chunk is None:
        chunk = chunk_of(weight_VK.shape[0], dtype, "cuda" if on_gpu(x) else x.device.type)
    packed = _Options(_plan_key(recipe), dtype, ignore_index, float(softcap), float(z_loss), chunk, differentiated)
    total: Tensor = _LinearCrossEntropy.apply(x_MK, weight_VK, bias, targets_M, packed)  # type: ignore[no-untyped-call]
    if reduction == "sum":
        return total
    count = (targets_M != ignore_index).sum()
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def count_targets(targets: Tensor, parts: int) -> Tensor:
    """Return the number of targets per part of a batch that are not `IGNORED`, FP32 (parts,).

    The mean loss of a batch is the sum of those of its parts, `weighted` by their shares of all targets that count.

    Args:
        targets: (B, ...), of which `targets.chunk(parts)` are the parts.
    """
    return torch.stack([part.ne(IGNORED).sum() for part in targets.chunk(parts)]).float()


def weighted(loss: Tensor, share: Tensor | float) -> Tensor:
    """Return a mean loss times its share of all targets.

    Args:
        share: a tensor if it may be 0: the mean over no targets is NaN, and counts as 0.
    """
    return torch.where(share > 0, loss * share, share) if isinstance(share, Tensor) else loss * share


def chunk_of(vocab: int, dtype: torch.dtype, device: str) -> int:
    """Return how many tokens' logits fit in `CHUNK_BYTES`: a multiple of 1024, or of 128 if that is too many."""
    tokens = CHUNK_BYTES.get(device, CHUNK_BYTES["cpu"]) // (vocab * dtype.itemsize)
    step = 1024 if tokens >= 1024 else 128
    return max(tokens // step * step, step)


def _check(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, reduction: str, options: LossOptions
) -> None:
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:] or x.shape[:-1] != targets.shape:
        raise ConfigError(
            f"linear_cross_entropy takes x (..., K), weight (V, K) and targets (...), "
            f"got {tuple(x.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}."
        )
    check_dtypes(x, weight)
    if has_update(weight):
        raise ConfigError(
            "linear_cross_entropy: the weight is that of a layer with a LoRA update, which only a call of the layer "
            "adds: the loss would be without it. Compute F.cross_entropy(layer(x), targets), or give add_lora a "
            "pattern without this layer, or call merge_lora(model) first."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"bias has shape {tuple(bias.shape)}, the weight has {weight.shape[0]} rows.")
    if targets.dtype != torch.int64:
        raise ConfigError(f"targets are {targets.dtype}: make them int64 with targets.long().")
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"unknown reduction '{reduction}': it is 'mean' or 'sum'.")
    if (options.chunk is not None and options.chunk < 1) or options.softcap < 0:
        raise ConfigError(f"chunk {options.chunk} must be at least 1 and softcap {options.softcap} not negative.")


def _plan_key(recipe: RecipeLike) -> str:
    """Return the key of a recipe's plan.

    Raises:
        ConfigError: it stores scales from step to step.
    """
    if isinstance(recipe, str) and recipe in _PRESETS:
        return _PRESETS[recipe]
    loaded = load(recipe)
    if loaded.has_stored_scales:
        raise ConfigError(
            f"recipe '{loaded.name}' keeps scales from step to step, and a loss has no layer to keep them in. Use a "
            "recipe with current scales, or call the head as a layer."
        )
    return loaded.plan.key


_PRESETS = {name: preset.plan.key for name in names() if not (preset := load(name)).has_stored_scales}
"""Keys of the plans of named recipes: Dynamo cannot trace the construction of a recipe."""


class _Options(NamedTuple):
    plan: str
    """`LinearPlan.key`."""
    dtype: torch.dtype
    """Dtype of the GEMMs."""
    ignore_index: int
    softcap: float
    z_loss: float
    chunk: int
    needed: list[bool]
    """Whether the gradients of x, weight and bias are needed."""


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses. Its gradients are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_VK: Tensor, bias_V: Tensor | None, targets_M: Tensor, options: _Options
    ) -> Tensor:
        loss_M, *gradients = _linear_cross_entropy(x_MK, weight_VK, bias_V, targets_M, options)
        ctx.save_for_backward(*gradients)
        ctx.set_materialize_grads(False)
        total: Tensor = loss_M.sum()
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_outputs[0] is None:
            return (None,) * 5
        scaled = (None if made is None else _scaled(made, grad_outputs[0]) for made in ctx.saved_tensors)
        return *scaled, None, None


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """Return gradient * factor: in place, since it may take gigabytes, unless backward may run again."""
    if torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph():
        return gradient * factor
    return gradient.mul_(factor)


class _Gradient(NamedTuple):
    """Gradient of a chunk's logits, as the GEMMs read it."""

    values_MV: Tensor | None
    """None where no GEMM reads them: the codes replace them."""
    dgrad: Quantized | None
    wgrad: Quantized | None


class _Head:
    """The three GEMMs of the head by its recipe, for one chunk after another."""

    def __init__(self, weight_VK: Tensor, plan: LinearPlan, dtype: torch.dtype, chunks: int) -> None:
        self.plan, self.dtype = plan, dtype
        self._is_fp8 = any(target is not None for target in (plan.x, plan.dy, plan.dy_t))
        self.weight_VK = weight_VK if self._is_fp8 else values(weight_VK, dtype)
        self.dw_VK: Tensor | None = None
        """Sum over the chunks so far, FP32 or in the dtype of the weight."""
        # The sum of two results is rounded once in their own dtype too: the same bits as in FP32, in half the memory.
        self._sum_dtype = dtype if chunks <= 2 and weight_VK.dtype == dtype else torch.float32
        self._w = read_weights([weight_VK], self.plan)
        self._saved = save_weights(self._w, [weight_VK], self.plan, are_codes_kept=True)
        self._dgrad_KV: Quantized | None = None

    def logits(self, x_MK: Tensor, bias_V: Tensor | None, needs_weight: bool) -> tuple[Tensor, SavedInput]:
        """Return the logits, and x as wgrad reads it."""
        x_MK = x_MK if self._is_fp8 else x_MK.to(self.dtype)
        x, saved = read_input(InputSource(x_MK), self.plan, self.dtype, needs_weight)
        logits_MV = fprop([x_MK], x, self._w, [self.weight_VK], self.plan, self.dtype)[0]
        return logits_MV if bias_V is None else logits_MV.add_(bias_V.to(self.dtype)), saved

    def gradient(self, d_MV: Tensor, x: SavedInput, needs_x: bool, needs_weight: bool) -> _Gradient:
        """Return the gradient of the logits as the needed GEMMs read it."""
        saved = self._saved if needs_x else None
        g, h = read_gradient([d_MV], x.scale, saved, self.plan, needs_weight)
        are_values_read = (needs_x and g is None) or (needs_weight and h is None)
        return _Gradient(d_MV if are_values_read else None, g, h)

    def dgrad(self, d: _Gradient) -> Tensor:
        """Return dX."""
        if d.dgrad is None:
            assert d.values_MV is not None
            return product(d.values_MV, values(self.weight_VK, self.dtype))
        if self._dgrad_KV is None:  # made once for all chunks
            self._dgrad_KV = transposed_weight(self._saved, self.plan, d.dgrad.codes)
        return kernels.gemm(d.dgrad, self._dgrad_KV, self.dtype, self.plan.accumulate[1])

    def add_wgrad(self, d: _Gradient, saved: SavedInput) -> None:
        """Add this chunk's dW to `dw_VK`."""
        total, x = self.dw_VK, saved.values
        if d.wgrad is not None:
            right = transposed_input(saved, self.plan, d.wgrad.codes)
            part = kernels.gemm(d.wgrad, right, self.dtype, self.plan.accumulate[2])
        else:
            assert x is not None and d.values_MV is not None
            d_VM = d.values_MV.t()
            if on_gpu(x) and x.dtype in (torch.bfloat16, torch.float16):  # FP32 sums inside the GEMM
                self.dw_VK = _added(total, d_VM, x)
                return
            part = product(d_VM, x)
        self.dw_VK = part.to(self._sum_dtype) if total is None else total.add_(part)


def _added(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left @ right, FP32, in the memory of `total`."""
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


class _OwnCodes(NamedTuple):
    """The parts of an FP8 weight, as arguments of `FP8Tensor`."""

    codes: Tensor
    scale: Tensor
    granularity: Granularity
    dtype: torch.dtype
    scaling: Scaling


def _like(x: Tensor, of: Tensor) -> Tensor:
    """Return memory for a gradient; that of an FP8 weight is a plain tensor."""
    return x.new_empty(of.shape, dtype=of.dtype)


def _fake(
    x_MK: Tensor, weight: Tensor | _OwnCodes, bias_V: Tensor | None, _targets_M: Tensor, options: _Options
) -> list[Tensor | None]:
    like = weight if isinstance(weight, Tensor) else weight.codes.new_empty(weight.codes.shape, dtype=weight.dtype)
    gradients = (
        _like(x_MK, of) if is_needed and of is not None else None
        for of, is_needed in zip((x_MK, like, bias_V), options.needed, strict=True)
    )
    return [x_MK.new_empty(x_MK.shape[0], dtype=torch.float32), *gradients]


@operation(fake=_fake, results=lambda *arguments: [True, *arguments[4].needed])
def _linear_cross_entropy(
    x_MK: Tensor, weight: Tensor | _OwnCodes, bias_V: Tensor | None, targets_M: Tensor, options: _Options
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the loss of each token, FP32 (M,), and the gradients of their sum that are needed.

    Args:
        weight: (V, K), or the parts of an FP8 weight.
    """
    weight_VK = weight if isinstance(weight, Tensor) else FP8Tensor(*weight)
    key, dtype, ignore_index, softcap, z_loss, chunk, needed = options
    needs_x, needs_weight, needs_bias = needed
    loss_M = x_MK.new_empty(x_MK.shape[0], dtype=torch.float32)
    dx_MK = _like(x_MK, x_MK) if needs_x else None
    db_V = None if bias_V is None or not needs_bias else torch.zeros_like(bias_V, dtype=torch.float32)
    with torch.no_grad(), torch.autocast(x_MK.device.type, enabled=False):
        head = _Head(weight_VK, plan_by(key), dtype, chunks=-(-x_MK.shape[0] // chunk))
        for start in range(0, x_MK.shape[0], chunk):
            part = slice(start, start + chunk)
            d_MV, x = head.logits(x_MK[part], bias_V, needs_weight)  # d_MV: the logits, until the next line
            loss_M[part] = cross_entropy_(
                d_MV, targets_M[part], ignore_index=ignore_index, softcap=softcap, z_loss=z_loss, gradient=any(needed)
            )
            if db_V is not None:
                db_V += d_MV.sum(dim=0, dtype=torch.float32)
            d = head.gradient(d_MV, x, needs_x, needs_weight)
            del d_MV  # freed before dW is allocated, where codes replace it
            if dx_MK is not None:
                dx_MK[part] = head.dgrad(d)
            if needs_weight:
                head.add_wgrad(d, x)
            del d, x  # before the next chunk's logits are allocated
    dw_VK = None
    if needs_weight:
        dw_VK = _like(x_MK, weight_VK).zero_() if head.dw_VK is None else head.dw_VK.to(weight_VK.dtype)
    return loss_M, dx_MK, dw_VK, None if db_V is None or bias_V is None else db_V.to(bias_V.dtype)


@implements(_linear_cross_entropy.operator)
def _with_own_codes(*arguments: Any, code: str = "") -> list[Tensor]:
    """Compute the operator for an FP8 weight as compilers see it: codes and scales are inputs like any other."""
    x_MK, weight, *others = _linear_cross_entropy.decode(arguments)
    parts = _OwnCodes(weight.codes, weight.scale, weight.granularity, weight.dtype, weight.scaling)
    made = _linear_cross_entropy(x_MK, parts, *others)
    return [tensor for tensor in made if tensor is not None]
