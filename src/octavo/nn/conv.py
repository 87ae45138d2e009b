"""`octavo.nn.Conv1d` and `Conv2d`: convolutions whose GEMMs run in FP8. Their parameters stay the master weights.

    fprop   Y  (M, N) = patches (M, K) . W (N, K)^T        M = B H_out W_out output pixels, K = kh kw C
    dgrad   dX = fold(dY (M, N) . W)                       every patch is added to the pixels that it was read from
    wgrad   dW (N, K) = dY^T . patches

The recipe is applied to the matrix of patches as it is to the input of a linear layer: `row` is one scale an output
pixel. Images are channels last. What is kept for backward is the input, never its patches: making their codes a second
time, transposed at once and with the scales of the first, costs the write that a transposition would. A 1x1
convolution of stride 1 is a linear layer on the images as they lie. GEMMs that a recipe leaves in BF16 are PyTorch's
convolutions.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from octavo import kernels
from octavo._util.autograd import first_order
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.patches import Pair, Window, fold, quantize_patches, unfold
from octavo.nn import functional
from octavo.nn.functional import compute_dtype, quantize_operand, spec_of
from octavo.nn.operands import check_dtypes
from octavo.nn.telemetry_ops import StatsSlot, patches_of, stats_buffer_of
from octavo.numerics import Quantized
from octavo.recipes import Operand, Recipe, RecipeLike, load

AnyConvolution = _ConvNd
"""Every convolution of PyTorch, of one to three dimensions and transposed too."""


def convolution(
    x: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    window: Window,
    recipe: Recipe,
    dtype: torch.dtype,
    stats: Tensor | None = None,
) -> Tensor:
    """Return the convolution of images with a weight, with the three GEMMs of `recipe`.

    Args:
        x: (B, C, H, W) of any strides.
        weight: (N, C, kh, kw), or (N, C, kw) where the window is one high; channels last, it is read as it lies.
        bias_N: (N,) or None; added in `dtype`.
        dtype: of the result and of GEMMs in high precision.
        stats: FP32 (3, WIDTH), where telemetry goes (`octavo.nn.telemetry_ops`).

    Returns:
        (B, N, H_out, W_out): contiguous if x is, channels last otherwise.

    Raises:
        ConfigError: x has other channels than the weight, is smaller than the window, or no real number.
    """
    check_dtypes(x, weight)
    if x.dim() != 4 or x.shape[1] != weight.shape[1]:
        raise ConfigError(
            f"a convolution with a weight of shape {tuple(weight.shape)} takes {weight.shape[1]} channels, "
            f"got an input of shape {tuple(x.shape)}."
        )
    if 0 in window.output(*x.shape[2:]):
        raise ConfigError(f"images of {x.shape[2]} x {x.shape[3]} pixels are smaller than the kernel: {window}.")
    y: Tensor = _Convolution.apply(x.movedim(1, -1), weight, window, recipe, dtype, stats)  # type: ignore[no-untyped-call]
    y = (y if bias_N is None else y + bias_N.to(y.dtype)).movedim(-1, 1)
    return y.contiguous() if x.is_contiguous() else y


class _Convolution(torch.autograd.Function):
    """Images (B, H, W, C) to (B, H_out, W_out, N). Saves its input as it is, and the weight."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, weight, window, recipe, dtype, stats = inputs
        x = x.contiguous()
        ctx.set_materialize_grads(False)
        ctx.window, ctx.recipe, ctx.dtype, ctx.stats, ctx.folds = window, recipe, dtype, stats, False
        if not recipe.fprop.is_fp8:
            ctx.save_for_backward(x, weight)
            return _high_precision(x, weight, window, dtype)
        patches = _quantize(x, window, recipe.fprop.input)
        folds = recipe.wgrad.is_fp8 and recipe.wgrad.input.is_folded
        w = functional.read_weights([weight], recipe)
        assert w is not None
        ctx.folds = folds
        saved_weight = functional.kept_weights(w, [weight], recipe) if ctx.needs_input_grad[0] else ()
        ctx.save_for_backward(x, weight, *((patches.scale,) if folds else ()), *saved_weight)
        y_MN = functional.fprop_of([x], patches, w, [weight], recipe, dtype, stats, patches_of(window))[0]
        return y_MN.view(x.shape[0], *window.output(x.shape[1], x.shape[2]), weight.shape[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        (x, weight, *rest), window, recipe, dtype = ctx.saved_tensors, ctx.window, ctx.recipe, ctx.dtype
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dys = [dy.to(dtype).reshape(-1, dy.shape[-1])]
        by_fp8 = needs_weight and recipe.wgrad.is_fp8
        scale, saved_weight = (rest[0], rest[1:]) if ctx.folds else (None, rest)
        w = functional.Kept(saved_weight or [weight], (weight.shape[0],)) if needs_x else None
        patches = _quantize(x, window, recipe.wgrad.input, transposed=True, scale=scale) if by_fp8 else None
        g, h = functional.read_gradient(dys, scale, w, recipe, needs_weight)
        by_torch = needs_x and g is None, needs_weight and h is None
        dx, dw = _high_precision_gradients(dy, x, weight, window, dtype, by_torch)
        if g is not None and w is not None:
            dx = fold(functional.dgrad(dys, g, w, recipe, dtype, ctx.stats), window, tuple(x.shape))
        if patches is not None and h is not None:
            right = kernels.without_scale(patches) if recipe.wgrad.input.is_folded else patches
            dw = _like(kernels.gemm(h, right, dtype, recipe.wgrad.accumulate), weight)
        gradients = None if dx is None else dx.to(x.dtype), None if dw is None else dw.to(weight.dtype)
        return *gradients, None, None, None, None


def _quantize(
    x: Tensor, window: Window, operand: Operand, transposed: bool = False, scale: Tensor | None = None
) -> Quantized:
    """Return the patches of x (B, H, W, C) in FP8, (M, K), or transposed, (K, M). scale: see `quantize_patches`."""
    if operand.rounding == "stochastic":
        patches = unfold(x, window)
        return quantize_operand(patches.t() if transposed else patches, operand)
    target = spec_of(operand)
    rows, columns = quantize_patches(x, window, None if transposed else target, target if transposed else None, scale)
    result = columns if transposed else rows
    assert result is not None
    return result


def _like(dw_NK: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a weight (N, C, *kernel) from that of its matrix, whose channels are last."""
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
    """Return dX (B, H, W, C) and dW as PyTorch computes them, each where it is wanted."""
    if not any(wanted):
        return None, None
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy.movedim(-1, 1).to(dtype), x.movedim(-1, 1).to(dtype), _as_4d(weight, dtype), None,
        window.stride, window.padding, window.dilation, False, (0, 0), 1, (*wanted, False),
    )  # fmt: skip
    return dx if dx is None else dx.movedim(1, -1), dw if dw is None else dw.view(weight.shape)


class Convolution(nn.Module):
    """What the FP8 convolutions have in common: beside their PyTorch parent."""

    recipe: Recipe
    enabled: bool
    """False: compute as the parent does, for an evaluation in high precision."""
    watch: StatsSlot | None = None
    """Where telemetry of this layer goes, while there is any (`octavo.nn.telemetry`)."""

    @classmethod
    def adopt(cls, module: nn.Module, recipe: Recipe) -> None:
        """Turn a convolution of PyTorch into this class in place; everything attached to it stays.

        Raises:
            UnsupportedError: it cannot be computed in FP8 (`unsupported_reason`).
        """
        if (reason := unsupported_reason(module) or unsupported_reason_recipe(recipe)) is not None:
            raise UnsupportedError(f"{type(module).__name__} cannot compute in FP8: {reason}.")
        module.__class__ = cls
        assert isinstance(module, cls)
        module.recipe, module.enabled = recipe, True

    def release(self) -> None:
        """Turn this layer back into its PyTorch parent in place."""
        for name in Convolution.__annotations__:
            self.__dict__.pop(name, None)
        self.__class__ = type(self).__bases__[1]

    def extra_repr(self) -> str:
        """Return what `print(model)` shows of this layer."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}" + ("" if self.enabled else ", disabled")


class Conv2d(Convolution, nn.Conv2d):
    """An `nn.Conv2d` computed by a recipe. Parameters, names, state_dict, hooks and flags are its own."""

    def __init__(self, *args: Any, recipe: RecipeLike = "folded", **options: Any) -> None:
        """Take what `nn.Conv2d` takes, and a recipe.

        Raises:
            UnsupportedError: groups, a padding mode or a recipe that FP8 convolutions do not have.
        """
        nn.Conv2d.__init__(self, *args, **options)
        self.adopt(self, load(recipe))

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of (B, C, H, W) or (C, H, W), in x's dtype, or in autocast's where that is on."""
        if not self.enabled:
            return super().forward(input)
        x = input if input.dim() == 4 else input[None]
        window, dtype = window_of(self), compute_dtype(input)
        y = convolution(x, self.weight, self.bias, window, self.recipe, dtype, stats_buffer_of([self]))
        return y if input.dim() == 4 else y[0]


class Conv1d(Convolution, nn.Conv1d):
    """An `nn.Conv1d` computed by a recipe: a convolution of images that are one pixel high."""

    def __init__(self, *args: Any, recipe: RecipeLike = "folded", **options: Any) -> None:
        """Take what `nn.Conv1d` takes, and a recipe.

        Raises:
            UnsupportedError: groups, a padding mode or a recipe that FP8 convolutions do not have.
        """
        nn.Conv1d.__init__(self, *args, **options)
        self.adopt(self, load(recipe))

    def forward(self, input: Tensor) -> Tensor:
        """Return the convolution of (B, C, L) or (C, L), in x's dtype, or in autocast's where that is on."""
        if not self.enabled:
            return super().forward(input)
        x = input if input.dim() == 3 else input[None]
        window, dtype = window_of(self), compute_dtype(input)
        stats = stats_buffer_of([self])
        y = convolution(x.unsqueeze(2), self.weight, self.bias, window, self.recipe, dtype, stats).squeeze(2)
        return y if input.dim() == 3 else y[0]


def unsupported_reason(module: nn.Module) -> str | None:
    """Return why a convolution cannot compute in FP8, or None."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return f"{type(module).__name__} has no FP8 layer, nn.Conv1d and nn.Conv2d have"
    if module.groups > 1:
        return f"{module.groups} groups: each is a small GEMM of its own"
    if module.padding_mode != "zeros":
        return f"padding_mode '{module.padding_mode}': patches are padded with zeros"
    if module.padding == "same" and any(d * (k - 1) % 2 for d, k in _spans(module)):
        return "padding 'same' of an even kernel is not the same on both sides"
    return None


def unsupported_reason_recipe(recipe: Recipe) -> str | None:
    """Return why no convolution computes by a recipe, or None."""
    if recipe.has_stored_scales:
        return f"recipe '{recipe.name}' keeps scales from step to step, which only linear layers can"
    return None


def window_of(module: nn.Conv1d | nn.Conv2d) -> Window:
    """Return how the kernel of a convolution moves; that of an `nn.Conv1d` is one pixel high."""
    padding = module.padding
    if isinstance(padding, str):  # valid or same
        padding = tuple(0 if padding == "valid" else d * (k - 1) // 2 for d, k in _spans(module))
    sizes = (module.kernel_size, 1), (module.stride, 1), (padding, 0), (module.dilation, 1)
    return Window(*(cast(Pair, (flat, *given)[-2:]) for given, flat in sizes))


def _spans(module: nn.Conv1d | nn.Conv2d) -> list[tuple[int, int]]:
    return list(zip(module.dilation, module.kernel_size, strict=True))
