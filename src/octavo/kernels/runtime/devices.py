"""Devices: FP8 products per architecture (native, emulated or refused), and the rates of known GPUs.

The only table of hardware. `dispatch` reads it for the present device, `octavo.plan` for an absent one, and the
documentation shows it. Operator support is taken from PyTorch's source (ATen/native/cuda/ScaledBlas.cpp and
RowwiseScaledMM.cu, PyTorch 2.11); only `measured` architectures were run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Mode = Literal["tensor", "row", "block", "mx"]
"""Kind of FP8 product, by operand scales: per tensor, per row, 1x128 and 128x128 blocks, 1x32 groups."""
MODES: tuple[Mode, ...] = ("tensor", "row", "block", "mx")


def mode_of(granularities: Collection[str]) -> Mode:
    """Return the mode of a product from the granularities of its operands, with `column` for a folded one."""
    kinds = {*granularities}
    if "1x32" in kinds:
        return "mx"
    if kinds <= {"tensor"}:
        return "tensor"
    return "row" if kinds <= {"row", "column", "tensor"} else "block"


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A device generation and its FP8 support."""

    name: str
    backend: str
    """`cuda`, `hip` (both are `cuda` devices to PyTorch), or another device type of PyTorch."""
    since: tuple[int, int] = (0, 0)
    """Lowest compute capability; the next row of the same backend bounds it from above."""
    gpus: str = ""
    """Examples."""
    refused: str = ""
    """Reason why nothing runs in FP8, one line; empty if something does."""
    unsupported: Mapping[Mode, str] = field(default_factory=dict)
    """Reason per unsupported mode. `mx` is emulated instead."""
    no_triton: str = ""
    """Reason why Octavo's Triton kernels do not run."""
    grouped: bool = False
    """Whether grouped FP8 GEMMs are supported."""
    integer: bool = False
    """Whether Octavo's INT8 GEMM compiles for it; its grouped form where `grouped` too."""
    measured: bool = False
    """Whether Octavo was run on this architecture."""

    def support(self, mode: Mode) -> tuple[Literal["native", "emulated", "refused"], str]:
        """Return how products of a mode run, and the reason if not natively."""
        if self.refused:
            return "refused", self.refused
        if why := self.unsupported.get(mode):
            return ("emulated" if mode == "mx" else "refused"), why
        return "native", ""


_BLOCK = "cuBLAS has 1x128 and 128x128 scales on Hopper (compute capability 9.0) only"
_MX = "products with 1x32 scales are Blackwell's"
_PTX = "Octavo's Triton kernels contain PTX, which only NVIDIA's GPUs run: all but the products run as the reference"

ARCHITECTURES = (
    Architecture(name="CPU", backend="cpu", measured=True,
                 unsupported={"block": "PyTorch has no block-scaled GEMM for a CPU", "mx": _MX}),
    Architecture(name="Ampere and older", backend="cuda", gpus="A100, RTX 3090",
                 refused="no FP8 tensor cores (compute capability 8.9 has the first)"),
    Architecture(name="Ada", backend="cuda", since=(8, 9), gpus="L40S, RTX 4090",
                 unsupported={"block": _BLOCK, "mx": _MX}, integer=True),
    Architecture(name="Hopper", backend="cuda", since=(9, 0), gpus="H100, H200", unsupported={"mx": _MX},
                 grouped=True, integer=True, measured=True),
    Architecture(name="Blackwell", backend="cuda", since=(10, 0), gpus="B200, GB300", unsupported={"block": _BLOCK}),
    Architecture(name="Blackwell, consumer", backend="cuda", since=(12, 0), gpus="RTX 5090, RTX PRO 6000",
                 unsupported={"block": _BLOCK}),
    Architecture(name="before CDNA 3", backend="hip", gpus="MI250",
                 refused="no FP8 matrix cores (MI300 has the first)"),
    Architecture(name="CDNA 3", backend="hip", since=(9, 4), gpus="MI300X, MI325X",
                 refused="its FP8 is FNUZ (E4M3 to 240, another bias), and Octavo's codes are OCP (E4M3 to 448)"),
    Architecture(name="CDNA 4", backend="hip", since=(9, 5), gpus="MI350X, MI355X", no_triton=_PTX,
                 unsupported={"block": _BLOCK, "mx": "its scale layout (SWIZZLE_32_8) is not Octavo's"}),
    Architecture(name="other AMD", backend="hip", since=(9, 6), gpus="RX 9070",
                 refused="Octavo does not know its FP8 formats, and has no kernels for it"),
    Architecture(name="Intel GPU", backend="xpu", gpus="Max 1550, Arc B580",
                 refused="Octavo has no FP8 kernels for XPU, neither products nor passes"),
)  # fmt: skip
"""All architectures, ascending by `since` within a backend."""


class Rates(NamedTuple):
    """Sustained rates of a GPU on normal random data: TFLOP/s for GEMMs, GB/s (read plus written) for a copy."""

    bf16: float
    tensor: float
    row: float
    block: float
    small_batched: float
    """Batched GEMMs with small M, N or K."""
    copy: float
    grouped: float
    """Grouped GEMMs of experts, with row scales and some thousand rows per expert."""
    fast: float = 1.0
    """Speedup of fast over slow accumulation for tensor and row scales, over whole training steps."""
    derived: str = ""
    """Origin of the rates, unless measured on this GPU."""


H200 = Rates(670.0, 1190.0, 1160.0, 880.0, 760.0, 4200.0, 920.0, fast=1.1)
H100 = H200._replace(
    copy=H200.copy * 3.35 / 4.8,
    derived="rates measured on an H200: the same TFLOP/s by their data sheets, copies at 3.35 of 4.8 TB/s",
)


class Gpu(NamedTuple):
    """A GPU to plan for, present or not."""

    backend: str
    capability: tuple[int, int]
    device_name: str = ""
    """Name reported by the driver."""
    rates: Rates | None = None


GPUS = {
    "a100": Gpu("cuda", (8, 0)),
    "l40s": Gpu("cuda", (8, 9)),
    "h100": Gpu("cuda", (9, 0), "NVIDIA H100 80GB HBM3", H100),
    "h200": Gpu("cuda", (9, 0), "NVIDIA H200", H200),
    "b200": Gpu("cuda", (10, 0)),
    "rtx5090": Gpu("cuda", (12, 0)),
    "mi300x": Gpu("hip", (9, 4)),
    "mi355x": Gpu("hip", (9, 5)),
    "max1550": Gpu("xpu", (0, 0)),
}
"""GPUs by name. Gains are predicted only for those with rates."""


def architecture_of(backend: str, capability: tuple[int, int] = (0, 0)) -> Architecture:
    """Return the architecture of a device; for an unknown backend, one that refuses everything."""
    known = [arch for arch in ARCHITECTURES if arch.backend == backend and arch.since <= capability]
    return known[-1] if known else Architecture(name=backend, backend=backend, refused=f"no FP8 kernels for {backend}")


def rates_named(device_name: str) -> Rates | None:
    """Return the rates of a GPU by its driver name; None if unknown."""
    return next((gpu.rates for gpu in GPUS.values() if gpu.device_name and gpu.device_name == device_name), None)
