"""Storage tiers of optimizer states by name, and their memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo.errors import ConfigError, did_you_mean
from octavo.kernels.optimizer import Layout, Rule
from octavo.kernels.storage import E4M3, FP32, Storage

RuleName = Literal["adamw", "adam", "lion", "muon"]
"""Update rule of a parameter. The kernels know Muon's rule as `given`."""

_FP32, _BF16 = Storage("fp32"), Storage("bf16")
_SCALED_8, _SCALED_FP16 = Storage(E4M3.name, "tensor"), Storage("fp16", "tensor")
_FIRST_8, _SECOND_8 = Storage(E4M3.name, "group"), Storage("ue4m4", "group", root=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """Storage of the moments, and of the master of a weight that is not FP32. An FP32 weight is its own master."""

    name: str
    about: str
    """One line for tables."""
    first: Storage
    second: Storage
    remainder_bits: int = 0
    """Bits of the master stored beside a BF16 weight: 16 (lossless), 8, or 0."""
    fp8_remainder_bits: int = 0
    """Bits of the master stored beside an FP8 weight."""
    master: Storage | None = None
    """Storage of a separate master."""
    gradient: Storage = _FIRST_8
    """Storage of a gradient with `gradients="fp8"`."""

    def layout(self, rule: RuleName, weight: torch.dtype, gradient: torch.dtype, stochastic: bool) -> Layout:
        """Return the layout of a weight of that dtype, its gradient and its state.

        FP16 lacks the exponent range for a remainder: such a weight has a separate FP32 master. So has an FP8 weight
        where the tier has neither a remainder nor a master for it.
        """
        second = None if rule in ("lion", "muon") else self.second
        kernel: Rule = "given" if rule == "muon" else rule
        scaling = self.gradient.scaling if gradient == self.gradient.float.dtype else "none"
        bits = {torch.bfloat16: self.remainder_bits, E4M3.dtype: self.fp8_remainder_bits}.get(weight, 0)
        master = None if weight == torch.float32 else self.master
        if not bits and master is None and weight in (torch.float16, E4M3.dtype):
            master = _FP32
        return Layout(kernel, weight, gradient, self.first, second, bits, master, stochastic, scaling)


TIERS = {
    states.name: states
    for states in (
        States(
            name="fp32",
            about="FP32 moments and master, that of a BF16 weight bit for bit as the weight and 16 bits",
            first=_FP32,
            second=_FP32,
            remainder_bits=16,
        ),
        States(
            name="exact",
            about="the FP32 master bit for bit, as a BF16 weight and 16 bits; BF16 moments",
            first=_BF16,
            second=_BF16,
            remainder_bits=16,
        ),
        States(
            name="fp8-lm",
            about="FP8-LM's: FP16 master, FP8 and FP16 moments, one scale per tensor (arXiv 2310.18313, section 2.2)",
            first=_SCALED_8,
            gradient=_SCALED_8,
            second=_SCALED_FP16,
            master=_SCALED_FP16,
        ),
        States(
            name="fp8",
            about="moments of one byte, one scale per 128; a BF16 weight and 8 bits, or an FP8 weight and 16",
            first=_FIRST_8,
            second=_SECOND_8,
            remainder_bits=8,
            fp8_remainder_bits=16,
        ),
        States(
            name="fp8-min",
            about="moments of one byte; an FP8 weight and 8 bits, or a BF16 weight rounded stochastically",
            first=_FIRST_8,
            second=_SECOND_8,
            fp8_remainder_bits=8,
        ),
    )
}
"""Tiers by name. To add one, add an entry."""

DEFAULT = "fp8"


def states_named(states: str | States) -> States:
    """Return the tier of that name; a `States` is returned unchanged.

    Raises:
        ConfigError: there is no such tier.
    """
    if isinstance(states, States):
        return states
    if states not in TIERS:
        known = ", ".join(TIERS)
        near = did_you_mean(states, TIERS)
        raise ConfigError(f"optimizer states: there is no tier '{states}'.{near} Tiers: {known}.")
    return TIERS[states]


SMALL = 4096
"""Number of elements below which compression is not worthwhile."""
_SENSITIVE = re.compile(r"(^|[._])(embed\w*|\w*embeddings?|wte|wpe|lm_head|head|router|gate_router)([._]|$)")


def keep_small(name: str, parameter: Tensor) -> str | None:
    """Return the tier of a parameter that should not have one-byte states, or None: the default of `keep`.

    Norms, biases and other small parameters have FP32 moments, at negligible cost. Embeddings, heads and routers,
    recognised by name, are `exact`: most rows of an embedding receive gradients only rarely.
    """
    if parameter.dim() < 2 or parameter.numel() < SMALL:
        return "fp32"
    return "exact" if _SENSITIVE.search(name) else None


def hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon steps a parameter: a matrix other than an embedding, head or router. The default."""
    return parameter.dim() == 2 and not _SENSITIVE.search(name)


def keep_none(name: str, parameter: Tensor) -> str | None:
    """Return None, so that every parameter has the tier of its group."""
    return None


def state_tensors(layout: Layout, rows: int, cols: int) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    """Return name, shape and dtype of each state tensor of a matrix (rows, cols), except `step`."""
    shapes: dict[str, tuple[tuple[int, int], torch.dtype]] = {}
    if layout.remainder_bits:
        shapes["remainder"] = (rows, cols), {8: torch.int8, 16: torch.int16}[layout.remainder_bits]
    for name, storage in (("master", layout.master), ("exp_avg", layout.first), ("exp_avg_sq", layout.second)):
        if storage is not None:
            shapes[name] = (rows, cols), storage.float.dtype
            if (scales := storage.scale_shape(rows, cols)) is not None:
                shapes[f"{name}_scale"] = scales, torch.uint8
    return shapes


def kind_of(name: str) -> str:
    """Return the kind of a state tensor of that name; scales count with their tensors."""
    kinds = {"remainder": "master", "master": "master", "exp_avg": "first", "exp_avg_sq": "second"}
    return kinds[name.removesuffix("_scale")]


def bytes_per_parameter(
    states: str | States,
    *,
    rule: RuleName = "adamw",
    weight: torch.dtype = torch.bfloat16,
    gradient: torch.dtype | None = torch.bfloat16,
    shape: tuple[int, int] = (4096, 4096),
) -> dict[str, float]:
    """Return the bytes per parameter of a matrix, by kind, and in `total`; scales count with their tensors.

    Args:
        gradient: None where gradients are released as soon as they are computed; float8_e4m3fn where they are stored
            in FP8.
    """
    layout = states_named(states).layout(rule, weight, gradient or torch.bfloat16, stochastic=True)
    count = shape[0] * shape[1]
    taken = {"weight": float(weight.itemsize), "gradient": float(gradient.itemsize if gradient else 0)}
    if layout.gradient_scaling != "none":
        scales = states_named(states).gradient.scale_shape(*shape) or (0, 0)
        taken["gradient"] += scales[0] * scales[1] / count
    if weight == E4M3.dtype:
        taken["weight"] += shape[0] * FP32.dtype.itemsize / count
    for name, (extent, dtype) in state_tensors(layout, *shape).items():
        kind = kind_of(name)
        taken[kind] = taken.get(kind, 0.0) + extent[0] * extent[1] * dtype.itemsize / count
    return {**taken, "total": sum(taken.values())}
