"""Which twin of a kernel runs: Triton's on a GPU that has FP8, the reference elsewhere. On a GPU, that is loud."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import ledger
from octavo.kernels.devices import GPUS, H200, Architecture, Rates, architecture_of, rates_named

_fake_mode = False


def on_gpu(where: Tensor | torch.device) -> bool:
    """Return whether something is computed as on a GPU: it is on one, or stands for a tensor that will be."""
    is_cuda = where.type == "cuda" if isinstance(where, torch.device) else where.is_cuda
    return is_cuda or _fake_mode


PLAIN = (Tensor, torch.nn.Parameter)
"""Tensors that are not subclasses: kernels may read their memory."""


def is_plain(x: Tensor) -> bool:
    """Return whether x is a tensor and nothing more, not a subclass that lies in memory as only it knows."""
    return type(x) in PLAIN or (_fake_mode and isinstance(x, torch._subclasses.FakeTensor))


@contextmanager
def fake_mode() -> Iterator[None]:
    """Let `on_gpu` be true of every tensor inside the block, and fake ones be plain: they have shapes and no data."""
    global _fake_mode
    before, _fake_mode = _fake_mode, True
    try:
        yield
    finally:
        _fake_mode = before


def uses_triton(x: Tensor, operation: str, refused: str | None = None) -> bool:
    """Return whether `operation` on x runs in Triton. On a GPU, a reason why not is entered as a fallback.

    Args:
        refused: what the Triton kernel itself has against these operands, or None.
    """
    if not x.is_cuda:
        return False
    reason = triton_unsupported_reason(x.device) or refused
    if reason is not None:
        ledger.fall_back(f"{operation} ran as reference: {reason}")
    return reason is None


def run_twin(twin: str, x: Tensor, arguments: Sequence[Any], operation: str, refused: str | None = None) -> Any:
    """Call a function of `kernels/triton/` where `operation` on x runs there, else its twin in `kernels/reference/`.

    Args:
        twin: file and function, as in `rotary.rotate`. Of a tensor without elements the reference takes care.
        operation, refused: as for `uses_triton`.
    """
    folder = "triton" if x.numel() and uses_triton(x, operation, refused) else "reference"
    file, _, function = twin.partition(".")
    with launches_on(x.device):
        return getattr(twin_file(folder, file), function)(*arguments)


@cache
def twin_file(folder: str, name: str) -> ModuleType:
    """Return a file of `kernels/triton/` or `kernels/reference/`."""
    return importlib.import_module(f"octavo.kernels.{folder}.{name}")  # on first use: Triton may be missing


@cache
def triton_unsupported_reason(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on this device, or None. `OCTAVO_TRITON=0` switches them off."""
    if device.type != "cuda":
        return f"Triton kernels run on NVIDIA GPUs, this is {device.type}"
    if os.environ.get("OCTAVO_TRITON") == "0":
        return "OCTAVO_TRITON=0 switches Triton kernels off"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    found = architecture(device)
    return found.refused or found.no_triton or None


def runs_triton(x: Tensor) -> bool:
    """Return whether x is on a GPU that runs Triton kernels."""
    return x.is_cuda and triton_unsupported_reason(x.device) is None


_planned: str | None = None


def architecture(device: torch.device) -> Architecture:
    """Return the architecture of a device, or that of the GPU of `planning_for`."""
    if _planned is not None:
        return architecture_of(GPUS[_planned].backend, GPUS[_planned].capability)
    return _own_architecture(device)


@cache
def _own_architecture(device: torch.device) -> Architecture:
    if device.type != "cuda":
        return architecture_of(device.type)
    return architecture_of("hip" if torch.version.hip else "cuda", torch.cuda.get_device_capability(device))


def rates(device: torch.device) -> Rates | None:
    """Return the rates of a GPU, or of that of `planning_for`; None if Octavo has none for it.

    In `fake_mode`, which forecasts memory, they are those of the GPU here, or an H200's where there is none.
    """
    if _planned is not None:
        return GPUS[_planned].rates
    if not torch.cuda.is_available():
        return H200 if _fake_mode else None
    return _own_rates(device if device.type == "cuda" else torch.device("cuda", 0)) if on_gpu(device) else None


@cache
def _own_rates(device: torch.device) -> Rates | None:
    return rates_named(torch.cuda.get_device_name(device))


def is_planning() -> bool:
    """Return True inside `planning_for`."""
    return _planned is not None


@contextmanager
def planning_for(gpu: str) -> Iterator[None]:
    """Let kernels answer what they can run as on a GPU of `GPUS`, which need not be here."""
    global _planned
    before, _planned = _planned, gpu
    triton_unsupported_reason.cache_clear()
    try:
        yield
    finally:
        _planned = before
        triton_unsupported_reason.cache_clear()


_HERE = nullcontext()


@cache
def _has_one_gpu() -> bool:
    return torch.cuda.device_count() == 1


def launches_on_current(x: Tensor) -> bool:
    """Return whether x is on the current GPU, where Triton launches by itself."""
    return _has_one_gpu() or x.get_device() == torch.cuda.current_device()


def has_launch_hooks() -> bool:
    """Return whether Triton has launch hooks, such as those of a profiler."""
    knobs = sys.modules.get("triton.knobs")
    hook = None if knobs is None else knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook is not None))


def launches_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a block in which Triton launches on this device: by itself it takes the current one, and its stream."""
    if device.type != "cuda" or _has_one_gpu() or device.index in (None, torch.cuda.current_device()):
        return _HERE
    return torch.cuda.device(device)
