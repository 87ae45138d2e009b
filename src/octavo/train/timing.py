"""Time calls on a device. A GPU is timed by its own events, a CPU by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

EVICTING = 256 * 2**20
"""Bytes to read until nothing useful is left in a cache; an H200's L2 has 50 MiB."""
CYCLES_A_CALL = 1_000_000
"""GPU cycles, about half a millisecond: longer than the host takes to launch a call."""


def warm_up(call: Callable[[], Any], device: str, *, calls: int = 3, seconds: float = 1.0) -> None:
    """Call until both have passed; the first call, which may compile, does not count."""
    call()
    synchronize(device)
    start, done = time.perf_counter(), 0
    while done < calls or time.perf_counter() - start < seconds:
        call()
        synchronize(device)
        done += 1


def milliseconds(
    call: Callable[[], Any], device: str, repeats: int, *, queued: bool = False, cold: bool = False
) -> list[float]:
    """Return the milliseconds of each call, one after another, with no wait between them.

    Args:
        queued: let the host get ahead first, so that a launch that takes longer than the kernel does not count.
        cold: empty the cache before each call, outside the time.
    """
    if device != "cuda":
        return [_by_clock(call) for _ in range(repeats)]
    filler = torch.zeros(EVICTING // 4, device=device) if cold else None
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    if queued:
        torch.cuda._sleep(CYCLES_A_CALL * repeats)
    for start, end in events:
        if filler is not None:
            filler.sum()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def synchronize(device: str) -> None:
    """Wait until the device has done all it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def _by_clock(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3
