"""`octavo.nn.Conv1d` and `Conv2d`: convolutions whose GEMMs run in FP8. Their parameters are the master weights.

    fprop   Y  (M, N) = patches (M, K) . W (N, K)^T        M = B H_out W_out output pixels, K = kh kw C
    dgrad   dX = fold(dY (M, N) . W)                       each patch is added to the pixels that it was read from
    wgrad   dW (N, K) = dY^T . patches

The recipe applies to the matrix of patches as it does to the input of a linear layer: `row` is one scale per output
pixel. Images are channels last. The input is saved for backward, never its patches: making their codes again,
transposed at once and with the scales of fprop, costs no more writes than a transpose would. A 1x1 convolution of
stride 1 is a linear layer on the images. GEMMs that a recipe leaves in BF16 are PyTorch's convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from octavo import kernels
from octavo._util.autograd import first_order
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.patches import fold, quantize_patches, unfold
from octavo.kernels.patches.window import Pair, Window
from octavo.nn import functional
from octavo.nn.adopted import Adopted
from octavo.nn.first_call import AWAITS_CALL
from octavo.nn.functional import SavedWeights, compute_dtype, quantize_operand
from octavo.nn.operands import check_dtypes
from octavo.nn.telemetry_ops import StatsSlot, patches_of, stats_buffer_of
from octavo.numerics import Quantized
from octavo.recipes import FALLBACK, QuantSpec, Recipe, RecipeLike, Transposed, load

AnyConvolution = _ConvNd
"""All convolutions of PyTorch, of one to three dimensions, transposed ones included."""


def convolution(
    x: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    window: Window,
    recipe: Recipe,
    dtype: torch.dtype,
    stats: Tensor | None = None,
) -> Tensor:
    """Return the convolution of images, or of lines, with a weight, with the three GEMMs of `recipe`.

    Args:
        x: (B, C, H, W) of any strides, or (B, C, L) for a weight of one extent; B may be left out.
        weight: (N, C, kh, kw) or (N, C, kw); if channels last, it is read without a copy.
        bias_N: (N,) or None; added in `dtype`.
        window: movement of the kernel; for lines it is one high.
        dtype: dtype of the result and of GEMMs in high precision.
        stats: FP32 (3, WIDTH), telemetry buffer (`octavo.nn.telemetry_ops`).

    Returns:
        (B, N, H_out, W_out), or of lines (B, N, L_out): contiguous if x is, channels last otherwise.

    Raises:
        ConfigError: x has other channels than the weight, is smaller than the window, or is not real floating-point.
    """
    check_dtypes(x, weight)
    extents = weight.dim() - 2
    if x.dim() - extents not in (1, 2) or x.shape[-1 - extents] != weight.shape[1]:
        raise ConfigError(
            f"a convolution with a weight of shape {tuple(weight.shape)} takes {weight.shape[1]} channels, "
            f"got an input of shape {tuple(x.shape)}."
        )
    images = as_images(x, extents)
    if 0 in window.output(*images.shape[2:]):
        raise ConfigError(
            f"images of {images.shape[2]} x {images.shape[3]} pixels are smaller than the kernel: {window}."
        )
    y: Tensor = _Convolution.apply(images.movedim(1, -1), weight, window, recipe, dtype, stats)  # type: ignore[no-untyped-call]
    y = (y if bias_N is None else y + bias_N.to(y.dtype)).movedim(-1, 1)
    y = y.contiguous() if images.is_contiguous() else y
    y = y if extents == 2 else y.squeeze(2)
    return y if x.dim() == extents + 2 else y[0]


def as_images(x: Tensor, extents: int) -> Tensor:
    """Return images (C, H, W) or lines (C, L), batched or not, as images (B, C, H, W); lines are one pixel high."""
    batch = x if x.dim() == extents + 2 else x[None]
    return batch if extents == 2 else batch.unsqueeze(2)


class _Convolution(torch.autograd.Function):
    """Images (B, H, W, C) to (B, H_out, W_out, N). Saves its input unchanged, and the weight."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, weight, window, recipe, dtype, stats = inputs
        x = x.contiguous()
        ctx.set_materialize_grads(False)
        ctx.window, ctx.recipe, ctx.dtype, ctx.stats = window, recipe, dtype, stats
        plan = recipe.plan
        if plan.x is None:
            ctx.save_for_backward(x, weight, None, None, None)
            return _high_precision(x, weight, window, dtype).detach()
        patches = _quantize(x, window, plan.x)
        w = functional.read_weights([weight], plan)
        assert w is not None
        saved = SavedWeights()
        if ctx.needs_input_grad[0]:
            saved = functional.save_weights(w, [weight], plan)
        scale = patches.scale if plan.x_back is Transposed.FOLDED else None
        ctx.save_for_backward(x, weight, scale, saved.codes, saved.scale)
        y_MN = functional.fprop([x], patches, w, [weight], plan, dtype, stats, patches_of(window))[0]
        y = y_MN.view(x.shape[0], *window.output(x.shape[1], x.shape[2]), weight.shape[0])
        return y.detach()  # a view made here could not be written to, as `nn.ReLU(inplace=True)` does

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        x, weight, scale, w_codes, w_scale = ctx.saved_tensors
        window, recipe, dtype = ctx.window, ctx.recipe, ctx.dtype
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dys = [dy.to(dtype).reshape(-1, dy.shape[-1])]
        plan, by_fp8 = recipe.plan, needs_weight and recipe.wgrad.is_fp8
        w = SavedWeights(w_codes, w_scale, [weight], (weight.shape[0],)) if needs_x else None
        patches = _quantize(x, window, plan.x_t, transposed=True, scale=scale) if by_fp8 else None
        g, h = functional.read_gradient(dys, scale, w, plan, needs_weight)
        by_torch = needs_x and g is None, needs_weight and h is None
        dx, dw = _high_precision_gradients(dy, x, weight, window, dtype, by_torch)
        if g is not None and w is not None:
            dx = fold(functional.dgrad(dys, g, w, plan, dtype, ctx.stats), window, tuple(x.shape))
        if patches is not None and h is not None:
            right = kernels.without_scale(patches) if plan.x_back is Transposed.FOLDED else patches
            dw = _like(kernels.gemm(h, right, dtype, recipe.wgrad.accumulate), weight)
        gradients = None if dx is None else dx.to(x.dtype), None if dw is None else dw.to(weight.dtype)
        return *gradients, None, None, None, None


def _quantize(
    x: Tensor, window: Window, target: QuantSpec, transposed: bool = False, scale: Tensor | None = None
) -> Quantized:
    """Return the patches of x (B, H, W, C) in FP8, (M, K), or transposed, (K, M). scale: see `quantize_patches`."""
    if target.rounding == "stochastic":
        patches = unfold(x, window)
        return quantize_operand(patches.t() if transposed else patches, target)
    rows, columns = quantize_patches(x, window, None if transposed else target, target if transposed else None, scale)
    result = columns if transposed else rows
    assert result is not None
    return result


def _like(dw_NK: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a weight (N, C, *kernel) from that of its matrix, in which channels are last."""
    n, c, *kernel = weight.shape
    return dw_NK.view(n, *kernel, c).movedim(-1, 1)


def _as_4d(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (weight if weight.dim() == 4 else weight.unsqueeze(2)).to(dtype)


def _high_precision(x: Tensor, weight: Tensor, window: Window, dtype: torch.dtype) -> Tensor:
    y = nn.functional.conv2d(
        x.movedim(-1, 1).to(dtype), _as_4d(weight, dtype), None, window.stride, window.padding, window.dilation
    )
    return y.movedim(1, -1).contiguous()


def _high_precision_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, window: Window, dtype: torch.dtype, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return dX (B, H, W, C) and dW as PyTorch computes them, each if it is wanted."""
    if not any(wanted):
        return None, None
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy.movedim(-1, 1).to(dtype), x.movedim(-1, 1).to(dtype), _as_4d(weight, dtype), None,
        window.stride, window.padding, window.dilation, False, (0, 0), 1, (*wanted, False),
    )  # fmt: skip
    return dx if dx is None else dx.movedim(1, -1), dw if dw is None else dw.view(weight.shape)


class Convolution(Adopted):
    """Base of the FP8 convolutions, mixed into PyTorch's class."""

    fields = ("recipe", "enabled", "stats_slot", AWAITS_CALL)
    recipe: Recipe
    enabled: bool
    """False: compute like the parent, for an evaluation in high precision."""
    stats_slot: StatsSlot | None = None
    """Telemetry buffer of this layer, while telemetry is on (`octavo.nn.telemetry`)."""
    weight: Tensor
    bias: Tensor | None

    def __init__(self, *args: Any, recipe: RecipeLike = FALLBACK, **options: Any) -> None:
        """Take the parent's arguments and a recipe.

        Raises:
            UnsupportedError: groups, a padding mode or a recipe that FP8 convolutions do not support.
        """
        super().__init__(*args, **options)
        self.adopt(self, load(recipe))

    @classmethod
    def adopt(cls, module: nn.Module, recipe: Recipe) -> None:
        """Turn a convolution of PyTorch into this class in place; everything attached to it stays.

        Raises:
            UnsupportedError: it cannot be computed in FP8 (`unsupported_reason`).
        """
        if (reason := unsupported_reason(module) or unsupported_reason_recipe(recipe)) is not None:
            raise UnsupportedError(f"{type(module).__name__} cannot compute in FP8: {reason}.")
        cls.take(module, recipe=recipe, enabled=True)

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of a batch or of one image, in x's dtype, or in autocast's dtype if it is on."""
        if not self.enabled:
            return cast(Tensor, super().forward(input))
        how = window_of(cast(nn.Conv2d, self)), self.recipe, compute_dtype(input), stats_buffer_of([self])
        return convolution(input, self.weight, self.bias, *how)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}" + ("" if self.enabled else ", disabled")


class Conv2d(Convolution, nn.Conv2d):
    """An `nn.Conv2d` computed by a recipe, with its parameters, names, state_dict, hooks and flags."""

    parent = nn.Conv2d


class Conv1d(Convolution, nn.Conv1d):
    """An `nn.Conv1d` computed by a recipe: a convolution of images that are one pixel high."""

    parent = nn.Conv1d


def unsupported_reason(module: nn.Module) -> str | None:
    """Return why a convolution cannot compute in FP8, or None."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return f"{type(module).__name__} has no FP8 layer, nn.Conv1d and nn.Conv2d have"
    if module.groups > 1:
        return f"{module.groups} groups: each is a small GEMM of its own"
    if module.padding_mode != "zeros":
        return f"padding_mode '{module.padding_mode}': patches are padded with zeros"
    window = window_from(module.kernel_size, module.stride, module.padding, module.dilation)
    return None if isinstance(window, Window) else window


def unsupported_reason_recipe(recipe: Recipe) -> str | None:
    """Return why convolutions cannot compute by a recipe, or None."""
    if recipe.has_stored_scales:
        return f"recipe '{recipe.name}' keeps scales from step to step, which only linear layers can"
    if recipe.has_integer_fprop:
        return f"recipe '{recipe.name}' multiplies INT8 or rotated codes, which only linear layers can"
    return None


def window_of(module: nn.Conv1d | nn.Conv2d) -> Window:
    """Return how the kernel of a convolution moves."""
    window = window_from(module.kernel_size, module.stride, module.padding, module.dilation)
    assert isinstance(window, Window)  # otherwise there is no FP8 layer of it
    return window


def window_from(
    kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int] | str, dilation: Sequence[int]
) -> Window | str:
    """Return how a kernel moves, or why there is no FP8 layer for it.

    Args:
        kernel, stride, padding, dilation: one or two numbers each; a kernel of one extent is one pixel high.
    """
    if isinstance(padding, str):  # valid or same
        spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if padding == "same" and any(span % 2 for span in spans):
            return "padding 'same' of an even kernel is not the same on both sides"
        padding = [span // 2 if padding == "same" else 0 for span in spans]
    given = (kernel, 1), (stride, 1), (padding, 0), (dilation, 1)
    return Window(*[cast(Pair, (flat, *numbers)[-2:]) for numbers, flat in given])
