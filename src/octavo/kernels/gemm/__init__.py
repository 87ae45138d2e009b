"""The GEMM contract and kernel selection.

    gemm(a, b) = a . b^T        a (M, K), b (N, K): FP8 or INT8 codes, contiguous; result (M, N), in `out_dtype`

Scales are applied. Sums of INT8 are exact. Accumulation of FP8 is FP32, or in hardware precision if `accumulate` is
`fast`. M, N and K may be any size, including 0. `KERNELS` is in order of preference: the first that supports the
operands runs, in compiled code too, where the compiler calls the vendor's operator directly. `gemm_by` overrides the
choice, to study accumulators.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedError, did_you_mean
from octavo.kernels.gemm import accumulator, dequantized, integer, vendor
from octavo.kernels.gemm.reference import gemm as reference_gemm
from octavo.kernels.runtime import host_state, ledger
from octavo.kernels.runtime.host_state import switched
from octavo.kernels.runtime.operation import is_direct, operation
from octavo.numerics import Quantized


@dataclass(frozen=True)
class GemmKernel:
    """An implementation of the GEMM."""

    name: str
    unsupported_reason: Callable[[Quantized, Quantized], str | None]
    """Returns why these operands are unsupported, or None."""
    run: Callable[[Quantized, Quantized, torch.dtype, bool], Tensor]
    """(a, b, out_dtype, fast accumulation) -> (M, N)."""


KERNELS = (
    GemmKernel("int8", integer.unsupported_reason, integer.gemm),
    GemmKernel("scaled_mm.tensor", vendor.unsupported_reason_tensor, vendor.scaled_mm_tensor),
    GemmKernel("scaled_mm.row", vendor.unsupported_reason_row, vendor.scaled_mm_row),
    GemmKernel("scaled_mm.block", vendor.unsupported_reason_block, vendor.scaled_mm_block),
    GemmKernel("scaled_mm.mx", vendor.unsupported_reason_mx, vendor.scaled_mm_mx),
    GemmKernel("emulated.1x32", dequantized.unsupported_reason, dequantized.gemm),
    GemmKernel("reference", lambda a, b: None, lambda a, b, dtype, fast: reference_gemm(a, b, dtype)),
)

EMULATED = ("emulated.1x32",)
"""Kernels that emulate absent hardware. They are explicit choices: not a fallback, and no speedup."""


class _Accumulator(NamedTuple):
    """Overrides that `gemm_by` sets."""

    kernel: GemmKernel | None
    """None: the first of `KERNELS` that supports the operands, as by default."""
    fast: bool | None
    """None: as set by the recipe."""


_HOPPER = GemmKernel("hopper", accumulator.unsupported_reason, accumulator.gemm)
_EXACT = GemmKernel("exact", lambda a, b: None, lambda a, b, dtype, fast: accumulator.exact(a, b, dtype))
ACCUMULATORS = {
    "slow": _Accumulator(None, False),
    "hopper": _Accumulator(_HOPPER, None),
    "hopper-slow": _Accumulator(_HOPPER, False),
    "hopper-fast": _Accumulator(_HOPPER, True),
    "exact": _Accumulator(_EXACT, None),
}
"""Accumulators for `gemm_by`. `slow`: this device's kernels with slow accumulation. `hopper`: Hopper's accumulator,
emulated, slow or fast as set by the recipe; `hopper-slow` and `hopper-fast`: always so. `exact`: sums in FP64."""

_DEFAULT = _Accumulator(None, None)


def gemm_by(name: str) -> AbstractContextManager[None]:
    """Return a block in which every FP8 GEMM has an accumulator of `ACCUMULATORS`, in any thread and in compiled code.

    Grouped and batched products are computed product by product in it. Compiled code whose forward ran outside the
    block keeps its kernels in backward. Emulations are plain PyTorch: for small models on a CPU, and some hundred times
    slower than GPU kernels.

    Raises:
        ConfigError: unknown accumulator.
        UnsupportedError: raised inside the block, if Hopper has no GEMM for the operands (1x32 scales).
    """
    if name not in ACCUMULATORS:
        near = did_you_mean(name, ACCUMULATORS)
        raise ConfigError(f"unknown accumulator '{name}'.{near} Accumulators: {', '.join(ACCUMULATORS)}.")
    return switched(accumulator=name)


def accumulator_in_use() -> _Accumulator:
    """Return the overrides of the innermost `gemm_by` block."""
    return ACCUMULATORS.get(host_state.now.accumulator, _DEFAULT)


def choose(a: Quantized, b: Quantized) -> tuple[GemmKernel, dict[str, str]]:
    """Return the kernel for these operands, and the reason against each preferred one.

    Found once for all operands of these dtypes, granularities and device, under these switches: no `unsupported_reason`
    reads anything else, but for the length of sums in INT8.
    """
    x, y, switches = a.codes, b.codes, host_state.now
    is_long = x.dtype is torch.int8 and x.shape[1] > integer.LONGEST
    operands = x.dtype, y.dtype, a.granularity, b.granularity, x.device, is_long
    key = (*operands, switches.accumulator, switches.planning, switches.fake)
    return _choices.get(key) or _choices.setdefault(key, _choose(a, b))


_choices: dict[tuple[Any, ...], tuple[GemmKernel, dict[str, str]]] = {}


def _choose(a: Quantized, b: Quantized) -> tuple[GemmKernel, dict[str, str]]:
    refused: dict[str, str] = {}
    if (kernel := accumulator_in_use().kernel) is not None:
        if reason := kernel.unsupported_reason(a, b):
            raise UnsupportedError(f"the accumulator '{kernel.name}' cannot be emulated here: {reason}.")
        return kernel, refused
    for kernel in KERNELS:
        reason = kernel.unsupported_reason(a, b)
        if reason is None:
            return kernel, refused
        refused[kernel.name] = reason
    raise AssertionError("the reference kernel takes everything")


def gemm(a: Quantized, b: Quantized, out_dtype: torch.dtype, accumulate: str = "slow") -> Tensor:
    """Return a . b^T.

    Args:
        a: (M, K), codes contiguous.
        b: (N, K), codes contiguous.
        out_dtype: BF16, FP16 or FP32.
        accumulate: `slow` or `fast`; kernels without fast accumulation ignore `fast`.
    """
    multiply = _gemm.run if is_direct(a.codes) else _gemm  # the most frequent call: a frame less
    result: Tensor = multiply(a, b, out_dtype, accumulate == "fast")
    return result


def _fake(left: Quantized, right: Quantized, out_dtype: torch.dtype, _fast: bool) -> Tensor:
    return left.scale.new_empty(left.codes.shape[0], right.codes.shape[0], dtype=out_dtype)


def _in_graph(left: Quantized, right: Quantized, _out_dtype: torch.dtype, _fast: bool) -> bool:
    """Return whether to expose `torch._scaled_mm` to the compiler, which lowers it for tensor and row scales."""
    if not left.codes.is_cuda or 0 in (left.codes.shape[1], right.codes.shape[0]):
        return False
    return choose(left, right)[0].name in ("scaled_mm.tensor", "scaled_mm.row")


@operation(fake=_fake, in_graph=_in_graph, tags=[torch.Tag.needs_fixed_stride_order])
def _gemm(left: Quantized, right: Quantized, out_dtype: torch.dtype, fast: bool) -> Tensor:
    if 0 in (*left.codes.shape, right.codes.shape[0]):
        return left.scale.new_zeros(left.codes.shape[0], right.codes.shape[0], dtype=out_dtype)
    kernel, refused = choose(left, right)
    if host_state.now.ledgers:  # the most frequent call: a frame less
        ledger.count(kernel.name)
    if kernel.name == "reference" and left.codes.is_cuda:
        pair = left.granularity.name, right.granularity.name
        nearest = {"tensor": "scaled_mm.tensor", "row": "scaled_mm.row"}.get(pair[0], "scaled_mm.block")
        ledger.fall_back(f"gemm {pair[0]} x {pair[1]} ran as reference: {nearest}: {refused[nearest]}")
    override = accumulator_in_use().fast
    fast = fast if override is None else override
    device = left.codes.device.type
    if not torch.is_autocast_enabled(device):
        return kernel.run(left, right, out_dtype, fast).contiguous()
    with torch.autocast(device, enabled=False):  # autocast would round the FP32 operands of the reference to BF16
        return kernel.run(left, right, out_dtype, fast).contiguous()
