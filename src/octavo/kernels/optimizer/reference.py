"""Reference optimizer step in plain PyTorch. Values are in groups, (G, 128); see `storage`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.gradient.reference import load_gradient
from octavo.kernels.optimizer import Control, Layout, Slot
from octavo.kernels.storage import E4M3, Storage, groups_of
from octavo.kernels.storage import reference as codec
from octavo.numerics import random_words

_LARGEST = torch.finfo(torch.bfloat16).max
"""Bound of a second moment, the largest that every tier stores: FP32's would round to infinity in BF16, for good."""
_SIGN = -(2**31)


def update(slots: Sequence[Slot], layout: Layout, control: Control, *_unused: object) -> None:
    """See `octavo.kernels.optimizer.update`."""
    for slot in [] if bool(control.skip) else slots:
        if slot.weight.numel():
            _update(slot, layout, control)


def momentum(
    slots: Sequence[Slot], layout: Layout, control: Control, updates: Sequence[Tensor], _unused: object, nesterov: bool
) -> None:
    """See `octavo.kernels.optimizer.momentum`."""
    for slot, update in [] if bool(control.skip) else zip(slots, updates, strict=True):
        if slot.gradient.numel():
            _momentum(slot, layout, control, update, nesterov)


def _update(slot: Slot, layout: Layout, control: Control) -> None:
    c = control.coefficients[slot.row].unbind()
    random = _random(slot, control) if layout.draws else (None, None, None)
    weight = read_weight(slot, layout)
    gradient = _gradient(slot) * c[0]
    first = _moment(slot.first, slot.first_scale, layout.first)
    second = _moment(slot.second, slot.second_scale, layout.second)
    weight, first, second, update = RULES[layout.rule](weight, gradient, first, second, c)
    control.clamped.add_((update.abs() > c[10]).sum())
    weight = weight - c[7] * update.clamp(-c[10], c[10])
    _write_moment(first, slot.first, slot.first_scale, layout.first, random[0])
    _write_moment(second, slot.second, slot.second_scale, layout.second, random[1])
    write_weight(weight, slot, layout, random[2])


def _momentum(slot: Slot, layout: Layout, control: Control, update: Tensor, nesterov: bool) -> None:
    c = control.coefficients[slot.row].unbind()
    gradient = _gradient(slot) * c[0]
    before = _moment(slot.first, slot.first_scale, layout.first)
    assert before is not None
    first = before * c[11] + gradient
    result = gradient + c[11] * first if nesterov else first
    random = _random(slot, control)[0] if layout.stochastic else None
    _write_moment(first, slot.first, slot.first_scale, layout.first, random)
    update.copy_(codec.from_groups(result, *update.shape))


def _gradient(slot: Slot) -> Tensor:
    if slot.gradient_scale is None:
        return codec.to_groups(slot.gradient.float())
    return codec.to_groups(load_gradient(slot.gradient, slot.gradient_scale))


def _moment(codes: Tensor | None, scale: Tensor | None, storage: Storage | None) -> Tensor | None:
    return None if codes is None or storage is None else read(codes, scale, storage)


def _write_moment(
    values: Tensor | None, codes: Tensor | None, scale: Tensor | None, storage: Storage | None, random: Tensor | None
) -> None:
    if values is not None and codes is not None and storage is not None:
        write(values, codes, scale, storage, random)


Coefficients = tuple[Tensor, ...]
Result = tuple[Tensor, Tensor | None, Tensor | None, Tensor]
"""Decayed weight before the update, both moments, update."""


def _adamw(w: Tensor, g: Tensor, m: Tensor | None, v: Tensor | None, c: Coefficients) -> Result:
    assert m is not None and v is not None
    m = m + c[1] * (g - m)
    v = (v * c[2] + c[3] * (g * g)).clamp(max=_LARGEST)
    return w * c[8], m, v, codec.quotient(m * c[4], codec.root(v) * c[5] + c[6])


def _adam(w: Tensor, g: Tensor, m: Tensor | None, v: Tensor | None, c: Coefficients) -> Result:
    return _adamw(w, g + c[9] * w, m, v, c)


def _lion(w: Tensor, g: Tensor, m: Tensor | None, v: Tensor | None, c: Coefficients) -> Result:
    assert m is not None
    difference = g - m
    return w * c[8], m + c[3] * difference, None, (m + c[1] * difference).sign()


def _given(w: Tensor, g: Tensor, m: Tensor | None, v: Tensor | None, c: Coefficients) -> Result:
    return w * c[8], None, None, g


RULES: dict[str, Callable[..., Result]] = {"adamw": _adamw, "adam": _adam, "lion": _lion, "given": _given}


def _random(slot: Slot, control: Control) -> tuple[Tensor, Tensor, Tensor]:
    """Return 16 random bits per value for first moment, second moment and weight."""
    rows, cols = slot.weight.shape
    counter = torch.arange(rows * groups_of(cols) * 32, device=slot.weight.device)
    words = random_words(control.seed, counter, slot.number, control.steps[slot.row].long())
    word = torch.stack(words, dim=1).reshape(-1, 128)
    third = (word * 0x9E3779B9 & 0xFFFFFFFF) >> 16
    return (word & 0xFFFF).int(), (word >> 16).int(), third.int()


def read(codes: Tensor, scale: Tensor | None, storage: Storage) -> Tensor:
    """Decode stored values to FP32, in groups."""
    if storage.format == "fp32":
        values = codec.to_groups(codes)
    else:
        values = codec.decode(codec.to_groups(codec.bits_in(codes)), storage.float)
    if scale is not None:
        values = values * codec.scale_of(scale.int()).reshape(-1, 1)
    return values * values if storage.root else values


def write(values: Tensor, codes: Tensor, scale: Tensor | None, storage: Storage, random: Tensor | None) -> None:
    """Store FP32 values, in groups."""
    never_zero = not storage.float.signed
    if storage.root:
        values = codec.root(values)
    if scale is not None:
        amax = codec.largest(values)
        if storage.scaling == "tensor":
            amax = F.pad(amax, (0, 0, 0, 1)).amax().reshape(1, 1)  # pads a row of zeros, for an empty tensor
        code = codec.scale_code(amax, storage.float)
        scale.copy_(code.reshape(scale.shape))
        values = values * codec.inverse_of(code)
    if storage.format == "fp32":
        codes.copy_(codec.from_groups(values, *codes.shape))
    else:
        codec.store(codec.encode(values, storage.float, random, never_zero, storage.root), codes)


def read_weight(slot: Slot, layout: Layout) -> Tensor:
    """Return the FP32 master of a weight, in groups."""
    if layout.master is not None:
        assert slot.master is not None
        return read(slot.master, slot.master_scale, layout.master)
    if layout.split is None:
        return codec.to_groups(slot.weight.float())
    fmt, dropped = layout.split
    assert slot.master is not None
    code, low = codec.to_groups(codec.bits_in(slot.weight)), codec.to_groups(slot.master.int())
    sign = 1 << (fmt.bits - 1)
    magnitude = codec.join(code & (sign - 1), low, layout.remainder_bits, dropped)
    value = (magnitude | ((code & sign) != 0).int() * _SIGN).view(torch.float32) * (1 / fmt.shift)
    return value if slot.weight_scale is None else value * slot.weight_scale.repeat_interleave(_across(slot), 0)


def write_weight(weight: Tensor, slot: Slot, layout: Layout, random: Tensor | None) -> None:
    """Store an FP32 master, in groups, and the weight derived from it."""
    if layout.master is not None:
        assert slot.master is not None
        write(weight, slot.master, slot.master_scale, layout.master, random)
        weight, random = read(slot.master, slot.master_scale, layout.master), None
    if slot.weight_scale is not None:
        amax = codec.largest(codec.from_groups(weight, *slot.weight.shape))
        exponent = codec.scale_code(amax, E4M3)
        slot.weight_scale.copy_(codec.scale_of(exponent))
        weight = weight * codec.inverse_of(exponent).repeat_interleave(_across(slot), 0)
    if layout.split is not None:
        _write_split(weight, slot, layout, random)
    elif slot.weight.dtype in _ROUNDED:
        write(weight, slot.weight, None, Storage(_ROUNDED[slot.weight.dtype]), random)
    else:
        slot.weight.copy_(codec.from_groups(weight, *slot.weight.shape))


_ROUNDED = {torch.bfloat16: "bf16", torch.float16: "fp16", E4M3.dtype: "e4m3"}


def _write_split(weight: Tensor, slot: Slot, layout: Layout, random: Tensor | None) -> None:
    assert layout.split is not None and slot.master is not None
    fmt, dropped = layout.split
    bits = codec.bits_of(weight, fmt)
    high, low = codec.split(bits & 0x7FFFFFFF, layout.remainder_bits, dropped, random)
    codec.store(high | ((bits >> 31 & 1) << (fmt.bits - 1)), slot.weight)
    slot.master.copy_(codec.from_groups(low, *slot.master.shape))


def _across(slot: Slot) -> int:
    return groups_of(slot.weight.shape[1])
