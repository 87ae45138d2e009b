"""Which twin of a kernel runs: Triton's on a GPU that has FP8, the reference elsewhere. On a GPU, that is loud."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from octavo.kernels import ledger


def uses_triton(x: Tensor, operation: str, refused: str | None = None) -> bool:
    """Return whether `operation` on x runs in Triton. On a GPU, a reason why not is entered as a fallback.

    Args:
        refused: what the Triton kernel itself has against these operands, or None.
    """
    if not x.is_cuda:
        return False
    reason = why_not(x.device) or refused
    if reason is not None:
        ledger.fall_back(f"{operation} ran as reference: {reason}")
    return reason is None


@cache
def why_not(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on this device, or None. `OCTAVO_TRITON=0` switches them off."""
    if device.type != "cuda":
        return f"Triton kernels run on NVIDIA GPUs, this is {device.type}"
    if os.environ.get("OCTAVO_TRITON") == "0":
        return "OCTAVO_TRITON=0 switches Triton kernels off"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"compute capability {capability[0]}.{capability[1]} has no FP8 (8.9 is the first)"
    return None


def launches_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a block in which Triton launches on this device: by itself it takes the current one, and its stream."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)
