"""Matrix products behind calls of PyTorch's operators: a parser per operator, called with PyTorch's arguments.

M rows, N columns, K terms of a sum. A parser returns a `MatmulCall`, or the reason why there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.conv import as_images, convolution, window_from
from octavo.nn.functional import linear as fp8_linear
from octavo.nn.matmul import matmul as fp8_matmul
from octavo.recipes import Recipe

Compute = Callable[[Recipe, torch.dtype], Tensor]
"""Computes the operator's result by a recipe, rounded to a dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulCall:
    """A matrix product, or a batch of them."""

    compute: Compute
    tensors: tuple[Tensor, ...]
    """All tensors that are read, the input first."""
    sizes: tuple[int, int, int]
    """(M, N, K) of each product."""
    features: int
    """The smaller of the input and output features that a layer of this product would have."""
    batch: int = 1
    """Number of products of two matrices: 1 if the right operand is a single matrix."""
    taps: int = 0
    """Pixels of a convolution's patch; 0 for all others."""
    weight: Tensor | None = None
    """The parameter among the operands."""


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> MatmulCall | str:
    """Parse `F.linear`."""
    if weight.dim() != 2 or input.dim() == 0:
        return _SHAPES
    if not is_parameter(weight):
        return _product(input, weight.t(), lambda y: y if bias is None else y + bias.to(y.dtype), _given(bias))
    return MatmulCall(
        compute=lambda recipe, dtype: fp8_linear(input, weight, bias, recipe, dtype),
        tensors=(input, weight, *_given(bias)),
        sizes=(math.prod(input.shape[:-1]), *weight.shape),
        features=min(weight.shape),
        weight=weight,
    )


def matmul(input: Tensor, other: Tensor, **options: Any) -> MatmulCall | str:
    """Parse `torch.matmul` and `@`."""
    if input.dim() == 2 and other.dim() == 1:
        return mv(input, other, **options)
    if other.dim() < 2 or (input.dim() < 2 and other.dim() > 2):
        return "a vector is no matrix"
    return _called_with(options) or _product(input, other)


def mv(input: Tensor, vec: Tensor, **options: Any) -> MatmulCall | str:
    """Parse `torch.mv`: the product of a matrix (N, K) and a vector (K,) is a linear layer of one token."""
    fits = input.dim() == 2 and vec.dim() == 1
    return (_called_with(options) or linear(vec, input)) if fits else _SHAPES


def mm(input: Tensor, mat2: Tensor, **options: Any) -> MatmulCall | str:
    """Parse `torch.mm`."""
    return matmul(input, mat2, **options) if input.dim() == mat2.dim() == 2 else _SHAPES


def bmm(input: Tensor, mat2: Tensor, **options: Any) -> MatmulCall | str:
    """Parse `torch.bmm`."""
    fits = input.dim() == mat2.dim() == 3 and input.shape[0] == mat2.shape[0]
    return matmul(input, mat2, **options) if fits else _SHAPES


def addmm(
    input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **options: Any
) -> MatmulCall | str:
    """Parse `torch.addmm`."""
    fits = mat1.dim() == mat2.dim() == 2
    return (_called_with(options) or _product(mat1, mat2, *_plus(input, beta, alpha))) if fits else _SHAPES


def baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1, **options: Any
) -> MatmulCall | str:
    """Parse `torch.baddbmm`."""
    fits = batch1.dim() == batch2.dim() == 3 and batch1.shape[0] == batch2.shape[0]
    return (_called_with(options) or _product(batch1, batch2, *_plus(input, beta, alpha))) if fits else _SHAPES


def einsum(equation: str, *operands: Any) -> MatmulCall | str:
    """Parse `torch.einsum` of two operands, if both have every letter that is summed over."""
    if len(operands) == 1 and isinstance(operands[0], Sequence):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return "an einsum of other than two operands"
    terms = _terms(equation)
    if terms is None:
        return "an einsum with dots or with a letter twice in a term"
    a, b, out = terms
    left, right = operands
    if (left.dim(), right.dim()) != (len(a), len(b)):
        return _SHAPES
    sizes = dict(zip(a + b, (*left.shape, *right.shape), strict=True))
    if tuple(sizes[letter] for letter in a) != tuple(left.shape):
        return _SHAPES
    batch, summed = [c for c in a if c in b and c in out], [c for c in a if c in b and c not in out]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
    kept = [*batch, *rows, *columns]
    if not summed or sorted(kept) != sorted(out):
        return "an einsum that is no matrix product"

    def arranged(x: Tensor, term: str, *groups: list[str]) -> Tensor:
        x = x.permute([term.index(letter) for group in groups for letter in group])
        return x.reshape(
            [math.prod(sizes[letter] for letter in group) for group in groups if group or group is not batch]
        )

    def restored(y: Tensor) -> Tensor:
        return y.reshape([sizes[letter] for letter in kept]).permute([kept.index(letter) for letter in out])

    return _product(arranged(left, a, batch, rows, summed), arranged(right, b, batch, summed, columns), restored)


def _terms(equation: str) -> tuple[str, str, str] | None:
    """Return the letters of both operands and of the result, which may be implied; None if there are others."""
    terms, arrow, out = equation.replace(" ", "").partition("->")
    a, _, b = terms.partition(",")
    if not arrow:
        out = "".join(sorted(letter for letter in a + b if (a + b).count(letter) == 1))
    is_plain = "." not in equation and all(len(set(term)) == len(term) for term in (a, b, out))
    return (a, b, out) if is_plain else None


def conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> MatmulCall | str:  # fmt: skip
    """Parse `F.conv2d`."""
    return _convolution(input, weight, bias, stride, padding, dilation, groups, 2)


def conv1d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> MatmulCall | str:  # fmt: skip
    """Parse `F.conv1d`: a convolution of images that are one pixel high."""
    return _convolution(input, weight, bias, stride, padding, dilation, groups, 1)


PARSERS: dict[str, Callable[..., MatmulCall | str]] = {
    "linear": linear,
    "matmul": matmul,
    "mm": mm,
    "mv": mv,
    "bmm": bmm,
    "addmm": addmm,
    "baddbmm": baddbmm,
    "einsum": einsum,
    "conv1d": conv1d,
    "conv2d": conv2d,
}
"""Operator name -> parser of its calls; these operators can be white."""
_SHAPES = "the shapes do not fit"


def is_parameter(x: Tensor) -> bool:
    """Return whether x is a leaf that an optimizer changes, and not the result of a computation."""
    return isinstance(x, nn.Parameter) or (x.requires_grad and x.is_leaf)


def _product(
    left: Tensor, right: Tensor, finish: Callable[[Tensor], Tensor] = lambda y: y, others: tuple[Tensor, ...] = ()
) -> MatmulCall | str:
    """Return finish(left right) for left (..., M, K) and right (..., K, N). `others`: tensors that `finish` reads."""
    *leading, terms = left.shape
    if terms != right.shape[-2]:
        return _SHAPES
    one = right.dim() == 2
    weight = _parameter_behind(right)

    def compute(recipe: Recipe, dtype: torch.dtype) -> Tensor:
        if weight is not None:
            return finish(fp8_linear(left, weight, None, recipe, dtype))
        return finish(fp8_matmul(left, right, recipe, dtype))

    return MatmulCall(
        compute=compute,
        tensors=(left, right, *others),
        sizes=(math.prod(leading) if one else leading[-1], right.shape[-1], terms),
        features=min(right.shape[-2:]),
        batch=1 if one else math.prod(torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])),
        weight=weight,
    )


def _parameter_behind(right_KN: Tensor) -> Tensor | None:
    """Return the parameter (N, K) whose transpose this is, as in `x @ w.t()`; None for anything else."""
    if torch.compiler.is_compiling() or right_KN.dim() != 2:
        return None
    base = right_KN._base
    if base is None or not is_parameter(base) or base.requires_grad != (right_KN.grad_fn is not None):
        return None  # a view from under `no_grad` has a gradient of its own
    same = base.shape == right_KN.shape[::-1] and base.stride() == right_KN.stride()[::-1]
    return base if same and base.data_ptr() == right_KN.data_ptr() else None


def _plus(input: Tensor, beta: float, alpha: float) -> tuple[Callable[[Tensor], Tensor], tuple[Tensor, ...]]:
    """Return a function that gives beta * input + alpha * y for y, and the tensors that it reads."""
    if beta == 0:  # then a NaN in it does not count
        return (lambda y: y * alpha), ()
    return (lambda y: input.to(y.dtype) * beta + y * alpha), (input,)


def _convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int, dims: int
) -> MatmulCall | str:
    """Parse a convolution over the last `dims` dimensions."""
    if weight.dim() != dims + 2 or input.dim() not in (dims + 1, dims + 2) or 0 in (*input.shape, *weight.shape):
        return _SHAPES
    if groups > 1:
        return "groups: each is a small product of its own"
    if not is_parameter(weight):
        return "its weight is no parameter"
    padding = padding if isinstance(padding, str) else _each(padding, dims)
    window = window_from(weight.shape[2:], _each(stride, dims), padding, _each(dilation, dims))
    if isinstance(window, str):
        return window
    images = as_images(input, dims)
    output = window.output(*images.shape[2:])
    if images.shape[1] != weight.shape[1] or 0 in output:
        return _SHAPES
    return MatmulCall(
        compute=lambda recipe, dtype: convolution(input, weight, bias, window, recipe, dtype),
        tensors=(input, weight, *_given(bias)),
        sizes=(images.shape[0] * math.prod(output), weight.shape[0], math.prod(weight.shape[1:])),
        features=min(weight.shape[:2]),
        taps=window.taps,
        weight=weight,
    )


def _each(given: Any, dims: int) -> tuple[int, ...]:
    """Return one number per dimension for an argument of PyTorch: a number, or a sequence of one or all of them."""
    numbers = tuple(given) if isinstance(given, Sequence) else (given,)
    return numbers * dims if len(numbers) == 1 else numbers


def _given(bias: Tensor | None) -> tuple[Tensor, ...]:
    return () if bias is None else (bias,)


def _called_with(options: dict[str, Any]) -> str | None:
    given = [name for name, value in options.items() if value is not None]
    return f"called with {' and '.join(given)}" if given else None
