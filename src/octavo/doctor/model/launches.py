"""Launch-bound: does the device wait for the host, which cannot launch kernels as fast as they run?"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from octavo.doctor.check import Finding, check, ok, warning
from octavo.doctor.subjects import Trial, a_gpu
from octavo.train.profile import profile

STEPS = 5
WARM_UP = 3
BUSY = 0.9
"""Share of a step in which the device has work, below which something holds it up."""
HOST = 0.9
"""Share of a step after which the host has launched all, above which it is the host."""
TRACE = "step.json"


class Timing(NamedTuple):
    """Seconds of one step, the mean of some."""

    host: float
    """Until the host had launched everything."""
    step: float
    """Until the device was done as well."""
    busy: float
    """While at least one kernel ran."""


class Clock:
    """How time passes on the host and on its device. A test has another one."""

    def now(self) -> float:
        """Return the host's time in seconds."""
        return time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has done all that was launched."""
        torch.cuda.synchronize()

    def busy(self, step: Callable[[], Any], trace: Path | None) -> float:
        """Return the mean seconds of some steps in which at least one kernel ran, and write their trace."""
        return profile(step, STEPS, None if trace is None else trace / TRACE).busy / 1e3


@check(
    "launches",
    symptom="the GPU is not fully used; a larger batch takes no more time",
    remedy="Compile (--compile on), give a step more tokens, or capture it in a CUDA graph.",
    needs=a_gpu,
)
def launches(trial: Trial) -> Finding:
    """Time a few steps on the host and on the device; with `--trace DIR`, write them as a Chrome trace."""
    return judge(measure(trial.step, Clock(), trial.trace))


def measure(step: Callable[[], Any], clock: Clock, trace: Path | None = None) -> Timing:
    """Return the timing of a step: each starts on an idle device, where the host cannot hide behind the last."""
    for _ in range(WARM_UP):
        step()
    host = whole = 0.0
    for _ in range(STEPS):
        clock.wait()
        start = clock.now()
        step()
        host += clock.now() - start
        clock.wait()
        whole += clock.now() - start
    return Timing(host / STEPS, whole / STEPS, clock.busy(step, trace))


def judge(timing: Timing) -> Finding:
    """Return the finding for a timing."""
    busy, host = timing.busy / timing.step, timing.host / timing.step
    numbers: dict[str, Any] = {"host_ms": 1e3 * timing.host, "step_ms": 1e3 * timing.step, "busy_ms": 1e3 * timing.busy}
    seen = f"a step takes {numbers['step_ms']:.2f} ms, the device is busy for {numbers['busy_ms']:.2f} ms of it"
    if busy >= BUSY:
        return ok(seen, **numbers)
    if host >= HOST:
        return warning(f"launch-bound: {seen}, the host launches for {numbers['host_ms']:.2f} ms", **numbers)
    remedy = "Between kernels it waits for something else than launches: look at a trace (--trace DIR)."
    return warning(f"{seen}, and the host is not what it waits for", remedy=remedy, **numbers)
