"""Kernel dispatch: Triton on a GPU with FP8, the reference elsewhere. On a GPU, the reference is a logged fallback."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octavo.errors import UnsupportedError
from octavo.kernels.runtime import host_state, ledger
from octavo.kernels.runtime.devices import GPUS, H200, Architecture, Rates, architecture_of, rates_named
from octavo.kernels.runtime.host_state import switched


def on_gpu(where: Tensor | torch.device) -> bool:
    """Return whether to compute as on a GPU: the tensor or device is CUDA, or `fake_mode` is active."""
    is_cuda = where.type == "cuda" if isinstance(where, torch.device) else where.is_cuda
    return is_cuda or host_state.now.fake


PLAIN = (Tensor, torch.nn.Parameter)
"""Tensor types whose memory kernels may read: no subclasses."""


def is_plain(x: Tensor) -> bool:
    """Return whether x is a plain tensor, not a subclass with a memory layout of its own."""
    return type(x) in PLAIN or (host_state.now.fake and isinstance(x, torch._subclasses.FakeTensor))


@contextmanager
def fake_mode() -> Iterator[None]:
    """Make `on_gpu` true for all tensors inside the block, and treat fake tensors, which have no data, as plain."""
    with switched(fake=True):
        yield


def uses_triton(x: Tensor, operation: str, refused: str | None = None) -> bool:
    """Return whether `operation` on x runs in Triton. On a GPU, the reason against it is recorded as a fallback.

    Args:
        refused: reason why the Triton kernel does not support these operands, or None.
    """
    if not x.is_cuda:
        return False
    reason = triton_unsupported_reason(x.device) or refused
    if reason is not None:
        ledger.fall_back(f"{operation} ran as reference: {reason}")
    return reason is None


def run_kernel(
    name: str, x: Tensor, arguments: Sequence[Any], operation: str, refused: str | None = None, triton: str = "triton"
) -> Any:
    """Call a function of `<name>/<triton>.py` if `operation` on x runs in Triton, else of `<name>/reference.py`.

    Args:
        name: folder and function, such as `rotary.rotate`. Empty tensors always go to the reference.
        operation, refused: as for `uses_triton`.
    """
    kind = triton if x.numel() and uses_triton(x, operation, refused) else "reference"
    file, _, function = name.partition(".")
    with launches_on(x.device):
        return getattr(implementation(kind, file), function)(*arguments)


@cache
def implementation(kind: str, name: str) -> ModuleType:
    """Return `kernels/<name>/<kind>.py`; `kind` is `reference`, or `triton` or another file of Triton kernels."""
    return importlib.import_module(f"octavo.kernels.{name}.{kind}")  # lazily: Triton may be missing


def triton_unsupported_reason(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on this device, or None. `OCTAVO_TRITON=0` disables them."""
    return _triton_unsupported_reason(device, host_state.now.planning)


def gains_by_kernels(device: torch.device) -> bool:
    """Return whether kernels in the place of eager operators gain time: on a GPU that runs Triton, or pretends to."""
    return on_gpu(device) and (device.type != "cuda" or triton_unsupported_reason(device) is None)


@cache
def _triton_unsupported_reason(device: torch.device, planning: str | None) -> str | None:
    if device.type != "cuda":
        return f"Triton kernels run on NVIDIA GPUs, this is {device.type}"
    if is_triton_off():
        return "OCTAVO_TRITON=0 switches Triton kernels off"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    arch = architecture(device)
    return arch.refused or arch.no_triton or None


@cache
def is_triton_off() -> bool:
    """Return whether `OCTAVO_TRITON=0` switches Triton kernels off. Read once: compiled code has the answer in it."""
    return os.environ.get("OCTAVO_TRITON") == "0"


def runs_triton(x: Tensor) -> bool:
    """Return whether x is on a GPU that runs Triton kernels."""
    return x.is_cuda and triton_unsupported_reason(x.device) is None


def architecture(device: torch.device) -> Architecture:
    """Return the architecture of a device, or of the GPU in `planning_for`."""
    if (planning := host_state.now.planning) is not None:
        return architecture_of(GPUS[planning].backend, GPUS[planning].capability)
    return _own_architecture(device)


@cache
def _own_architecture(device: torch.device) -> Architecture:
    if device.type != "cuda":
        return architecture_of(device.type)
    check_present(device)
    return architecture_of("hip" if torch.version.hip else "cuda", torch.cuda.get_device_capability(device))


def check_present(device: torch.device) -> None:
    """Check that there is such a device: the kernels of another one are unknown.

    Raises:
        UnsupportedError: it is a CUDA device, and there is none.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            f"no CUDA device is available. Plan for the CPU, or for a GPU by name: {', '.join(GPUS)}."
        )


def rates(device: torch.device) -> Rates | None:
    """Return the rates of a GPU, or of the GPU in `planning_for`; None if unknown.

    In `fake_mode`, which forecasts memory: rates of the present GPU, or of an H200 if there is none.
    """
    state = host_state.now
    if state.planning is not None:
        return GPUS[state.planning].rates
    if not torch.cuda.is_available():
        return H200 if state.fake else None
    return _own_rates(device if device.type == "cuda" else torch.device("cuda", 0)) if on_gpu(device) else None


@cache
def _own_rates(device: torch.device) -> Rates | None:
    return rates_named(torch.cuda.get_device_name(device))


def is_planning() -> bool:
    """Return whether a `planning_for` block is active."""
    return host_state.now.planning is not None


@contextmanager
def planning_for(gpu: str) -> Iterator[None]:
    """Make kernels report support as on a GPU of `GPUS`, which need not be present."""
    with switched(planning=gpu):
        yield


_CURRENT_DEVICE = nullcontext()


@cache
def _has_one_gpu() -> bool:
    return torch.cuda.device_count() == 1


def launches_on_current(x: Tensor) -> bool:
    """Return whether x is on the current GPU, on which Triton launches by default."""
    return _has_one_gpu() or x.get_device() == torch.cuda.current_device()


def launches_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which Triton launches on this device; its default is the current device and stream."""
    if device.type != "cuda" or _has_one_gpu() or device.index in (None, torch.cuda.current_device()):
        return _CURRENT_DEVICE
    return torch.cuda.device(device)
