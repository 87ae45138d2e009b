"""Time calls on a device, and the kernels in them. A GPU is timed by its own events, a CPU by the clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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
    if filler is not None:
        filler.sum()  # loads its kernel, which may take longer than the host is given to get ahead
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


class Stopwatch:
    """The time between marks: by events of a GPU, which no step waits for, or by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.mark("")

    def mark(self, name: str) -> None:
        """End the part of this name, which began with the mark before."""
        now: Any = torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter()
        if self._cuda:
            now.record()
        self._marks.append((name, now))

    def milliseconds(self) -> dict[str, float]:
        """Return the time of each part, summed over marks of one name. On CUDA this waits for the work to finish."""
        found: dict[str, float] = {}
        if self._cuda:
            self._marks[-1][1].synchronize()
        for (_, start), (name, end) in pairwise(self._marks):
            taken = start.elapsed_time(end) if self._cuda else 1e3 * (end - start)
            found[name] = found.get(name, 0.0) + taken
        return found


class Kernel(NamedTuple):
    """One kernel that ran, in microseconds on the GPU's clock."""

    name: str
    start: float
    end: float


PROFILES = 3
"""Profiles to try: beside other processes on the GPU, PyTorch 2.11's profiler at times records no kernel."""


def kernels_of(step: Callable[[], Any], steps: int, trace: Path | None = None) -> list[Kernel]:
    """Run some steps under the profiler and return the kernels that ran on the GPU; again, if it saw none.

    Args:
        trace: a file for a Chrome trace of these steps, of the host and of the GPU.
    """
    return next((seen for _ in range(PROFILES) if (seen := _profiled(step, steps, trace))), [])


def _profiled(step: Callable[[], Any], steps: int, trace: Path | None) -> list[Kernel]:
    os.environ.setdefault("TEARDOWN_CUPTI", "1")  # else each launch of what is timed later takes a third longer
    host = [] if trace is None else [torch.profiler.ProfilerActivity.CPU]
    kinds = [*host, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:  # without it, 2.11 warns
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == gpu and not getattr(event, "is_user_annotation", False)
    ]


def busy(kernels: Sequence[Kernel]) -> float:
    """Return the microseconds in which at least one kernel ran: what overlaps counts once."""
    total, reached = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(kernel.end - max(kernel.start, reached), 0.0)
        reached = max(reached, kernel.end)
    return total
