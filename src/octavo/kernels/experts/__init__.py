"""The experts contract: the passes around the grouped GEMMs of a mixture of experts.

T: tokens. S: experts per token. R = T S: rows, one per (token, expert) pair, sorted by expert. E: experts. D: width.
F: hidden width of an expert.

    route                 ids (T, S) -> source and destination of each row, and end offsets of the experts
    quantize_tokens       x (T, D) -> codes of the tokens, and codes gathered into sorted rows, in one pass
    combine               y (R, D) -> (T, D), FP32 sum over the rows of each token, in a fixed order
    activation_backward   backward of `kernels.activation` for experts, including the routing weights

Row counts per expert stay on the device. All but `route`, which sorts by PyTorch, are custom operators: Triton on a
GPU; `reference.py`, the definition, elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.activation import Factors, Targets
from octavo.kernels.experts import reference
from octavo.kernels.grouped import Padded
from octavo.kernels.grouped.padding import padded_length
from octavo.kernels.quant_spec import QuantSpec, empty
from octavo.kernels.runtime.dispatch import run_kernel
from octavo.kernels.runtime.operation import is_direct, operation
from octavo.numerics import PER_ROW, Quantized

LONGEST_ROW = 16384
"""Maximum row length of the Triton kernels, which hold one row per program."""


class Routing(NamedTuple):
    """Permutation between tokens and rows sorted by expert."""

    source: Tensor
    """int32 (R,): token of each row."""
    place: Tensor
    """int32 (T, S): rows of each token, one per expert it is routed to."""
    ends: Tensor
    """int32 (E,): end offset of each expert's rows."""


def route(ids: Tensor, experts: int) -> Routing:
    """Return the routing of tokens to experts. The sort is stable: rows of an expert are in token order.

    Args:
        ids: (T, S), any integer dtype, from 0 to E - 1.
        experts: E.

    Raises:
        ConfigError: an id is out of range. On a GPU and in compiled code its rows are sorted after all groups, which
            the grouped GEMMs reject.
    """
    if ids.device.type == "cpu" and is_direct(ids):
        _check_ids(ids, experts)
    keys = ids.reshape(-1).long().clamp(-1, experts).remainder(experts + 1)  # out of range: E
    sorted_keys, order = torch.sort(keys.to(_narrowest(experts)), stable=True)
    place = torch.empty_like(order, dtype=torch.int32)
    place[order] = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    expert_ids = torch.arange(experts, dtype=torch.int32, device=ids.device)
    ends = torch.searchsorted(sorted_keys.int(), expert_ids, right=True, out_int32=True)
    return Routing((order // max(ids.shape[1], 1)).int(), place.view(ids.shape), ends)


def _check_ids(ids: Tensor, experts: int) -> None:
    """Raise if an id is out of range."""
    wrong = ids[(ids < 0) | (ids >= experts)]
    if len(wrong):
        raise ConfigError(
            f"a token is routed to expert {int(wrong[0])}, but the ids of {experts} experts are 0 to {experts - 1}. "
            "Correct the router; for a slot without an expert, use an id in this range and routing weight 0."
        )


def _narrowest(largest: int) -> torch.dtype:
    """Return the narrowest dtype for integers from 0 to `largest`: radix sort makes one pass per byte."""
    return torch.uint8 if largest < 1 << 8 else torch.int16 if largest < 1 << 15 else torch.int32


def weighted(rows: Quantized, weights: Tensor) -> Quantized:
    """Return rows (R, C) times weights, FP32 (R,), applied to the scales: codes are not requantised."""
    return Quantized(rows.codes, rows.scale * weights[:, None], rows.granularity)


def _refused(x: Tensor, *_: object) -> str | None:
    width = x.shape[-1]
    return None if width <= LONGEST_ROW else f"rows of {width} elements are longer than {LONGEST_ROW}"


@operation(
    name="combine_rows",
    reference=reference.combine,
    unsupported=_refused,
    fake=lambda y, place: y.new_empty(place.shape[0], y.shape[1]),
    tags=[torch.Tag.needs_fixed_stride_order],
)
def combine(y: Tensor, place: Tensor) -> Tensor:
    """Return the sum (T, D) of the rows y (R, D) of each token, accumulated in FP32, in y's dtype."""


class Gradients(NamedTuple):
    """Results of the activation's backward; None if not requested."""

    rows: Quantized | None
    """D, codes (R, N)."""
    columns: Padded | None
    """D, in the layout of wgrad."""
    hidden: Tensor | None
    """Forward codes of h, in the layout of wgrad: (F, P)."""
    weights: Tensor
    """FP32 (R,), gradients of the routing weights."""


def _tokens_fake(x: Tensor, place: Tensor, target: QuantSpec, second: QuantSpec | None) -> tuple[Quantized, Quantized]:
    tokens, rows = (second or target, x.shape[0]), (target, place.numel())
    return empty(*tokens, x.shape[1], x.device), empty(*rows, x.shape[1], x.device)


@operation(
    fake=_tokens_fake,
    results=lambda _x, _place, target, second: (second or target, target),
    tags=[torch.Tag.needs_fixed_stride_order],
)
def quantize_tokens(
    x: Tensor, place: Tensor, target: QuantSpec, second: QuantSpec | None = None
) -> tuple[Quantized, Quantized]:
    """Quantise x (T, D) for wgrad, and gathered into sorted rows for fprop, from one read.

    Args:
        place: `Routing.place`.
        target: of fprop, one scale per row.
        second: of wgrad, one scale per row, if it reads a second set of codes.

    Returns:
        The codes of the tokens (T, D), as wgrad reads them, and of the rows (R, D), as fprop does.
    """
    first, arguments = x if place.numel() else place, (x, place, target, second)
    tokens, rows = run_kernel("experts.quantize_tokens", first, arguments, "quantize_tokens", _refused(x))
    return tokens, rows


def _backward_fake(
    _kind: str, dh: Tensor, _gate: object, up: object, weights: Tensor, ends: Tensor, targets: Targets, _: Factors
) -> list[Any]:
    (rows, width), (row, column, hidden) = dh.shape, targets
    wide, padded = width if up is None else 2 * width, padded_length(rows, len(ends))
    codes = [
        spec and dh.new_empty(shape, dtype=spec.fmt.dtype)
        for spec, shape in ((row, (rows, wide)), (column, (wide, padded)), (hidden, (width, padded)))
    ]
    scales = [weights.new_empty(shape) for shape in ((rows, 1), (len(ends), wide))]
    pairs = (pair for pair in zip(codes, scales, strict=False) if pair[0] is not None)
    return [*pairs, codes[2], weights.new_empty(rows)]


@operation(
    name="expert_activation_backward",
    fake=_backward_fake,
    results=lambda *given: (given[6].rows, given[6].columns and Padded, given[6].hidden is not None, True),
    tags=[torch.Tag.needs_fixed_stride_order],
)
def activation_backward(
    kind: str,
    dh: Tensor,
    gate: Tensor | Quantized,
    up: Tensor | Quantized | None,
    weights: Tensor,
    ends: Tensor,
    targets: Targets,
    factors: Factors,
) -> Gradients:
    """Return the gradients of an activation between two grouped GEMMs, with routing weights applied to the result.

    D, (R, 2 F) or (R, F), is [d gate | d up] times the routing weights, FP32, quantised as by `quantize_groups`.

    Args:
        kind: one of `kernels.activation.KINDS`.
        dh: (R, F), gradient of h before routing weights.
        gate: (R, F), as in forward, or its codes as in `kernels.activation.INPUTS`.
        up: as gate, or None.
        weights: FP32 (R,), routing weight per row.
        ends: int32 (E,), end offset of each expert's rows.
        targets: for D per row, for D per column and expert, and for h, of which only the format is used.
        factors: FP32; for D per row (E, N), per column (R, 1); for h (R, 1), powers of two: the forward scales.
    """
    arguments, label = (kind, dh, gate, up, weights, ends, targets, factors), f"expert_activation_backward {kind}"
    row, column, hidden, made = run_kernel("experts.activation_backward", dh, arguments, label, _refused(dh))
    return Gradients(row and Quantized(row[0], row[1], PER_ROW), column and Padded(column[0], column[1]), hidden, made)
