"""Cost of telemetry: alternating steps with and without it, on the same model."""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from octavo.kernels.sample import STATS
from octavo.lab.train.timing import milliseconds, warm_up
from octavo.nn import telemetry_ops
from octavo.nn.telemetry import Telemetry
from octavo_bench.implementations import implementations
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, device_named, known, positive
from octavo_bench.render import figures
from octavo_bench.results import Row
from octavo_bench.workloads import WORKLOADS, Workload, build

IMPLEMENTATION = "octavo folded"
DEMO = Workload(name="demo", dim=128, ffn=352, heads=4, kv_heads=4, layers=4, batch=8, sequence=256, vocab=272)
"""For a CPU: the model of `octavo train --preset demo`, with its head and its optimizer."""
OWN: tuple[tuple[Any, str], ...] = (
    *((telemetry_ops, name) for name in ("sampling_off", "sample_input", "sample_weights", "sample_gradients")),
    *((Telemetry, name) for name in ("step", "snapshot")),
)
"""Functions of telemetry outside the GEMMs."""
KIND: Kind = Kind(
    name="telemetry",
    keys={"workload": str, "overhead_percent": float},
    columns=(
        ("workload", "{workload}"),
        ("on", "{device}"),
        ("tokens", "{tokens:,}"),
        ("tensors", "{tensors}"),
        ("ms without", "{ms:.2f}"),
        ("ms with", "{ms_watched:.2f}"),
        ("overhead", "{overhead_percent:+z.2f} %"),
        ("95 % interval", "{low_percent:+z.2f} to {high_percent:+z.2f} %"),
        ("own code", "{own_percent:.2f} %"),
    ),
    names=2,
    told=(("pairs", "{pairs}"),),
    show=lambda rows: figures(KIND.columns, rows, every=True),
    session=("hardware",),
    may_fail=False,
)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def bench_telemetry(
    workload: Workload,
    *,
    device: str = "cuda",
    every: int = 1,
    histograms_every: int = 0,
    steps: int = 1,
    rounds: int = 60,
) -> Row:
    """Return the row of a workload.

    A round is a pair of adjacent steps, without and with telemetry in alternating order, so that disturbances of the
    machine slow both. `overhead_percent` is the median over the pairs of the relative slowdown, and `low_percent` to
    `high_percent` its 95 % confidence interval (`interval`).

    GPU steps are timed by CUDA events. CPU steps are timed by the processor time of the training thread, which does all
    of telemetry: other processes affect it less than wall time. On a CPU `own_percent` is measured, too: the time that
    this thread spends in telemetry's own code, relative to a step without. It hardly depends on the machine's load,
    but leaves out the cost of cache lines evicted by telemetry. The process keeps its memory from now on: otherwise a
    step takes tens of thousands of page faults, in varying numbers.

    Args:
        every: as for `Telemetry`; the steps of each round start a new count.
        histograms_every: the same.
        steps: steps of each kind per round; their median is used.
        rounds: number of pairs.
    """
    training = build(workload, implementations()[IMPLEMENTATION], device, compile=device == "cuda")
    telemetry: Telemetry | None = None

    def step() -> None:
        training.forward_backward()
        if telemetry is not None and not workload.vocab:  # no optimizer ends a step, and the gradients are freed now
            telemetry.step()
        training.update()
        if telemetry is not None:
            for _ in iter(telemetry.snapshot, None):
                pass

    def timed(watched: bool) -> float:
        nonlocal telemetry
        telemetry = Telemetry(training.model, every, histograms_every=histograms_every) if watched else None
        try:
            return statistics.median(_times(step, device, steps))
        finally:
            if telemetry is not None:
                telemetry.detach()

    if device == "cpu":
        _keep_memory()
    warm_up(step, device)
    timed(True)  # compiles
    plain, watched, own = [], [], []
    with _own_time() if device == "cpu" else nullcontext([0.0]) as spent:
        for number in range(rounds):
            before = spent[0]
            if number % 2:
                watched.append(timed(True))
            plain.append(timed(False))
            if not number % 2:
                watched.append(timed(True))
            own.append(100 * (spent[0] - before) / steps / plain[-1])
    overheads = [100 * (ours / theirs - 1) for ours, theirs in zip(watched, plain, strict=True)]
    low, high = interval(overheads)
    with Telemetry(training.model, every) as counted:
        return {
            "workload": workload.name,
            "overhead_percent": round(statistics.median(overheads), 3),
            "low_percent": round(low, 3),
            "high_percent": round(high, 3),
            "own_percent": round(statistics.median(own), 3) if device == "cpu" else None,
            "pairs": rounds,
            "ms": round(statistics.median(plain), 3),
            "ms_watched": round(statistics.median(watched), 3),
            "device": device,
            "threads": torch.get_num_threads() if device == "cpu" else None,
            "every": every,
            "histograms_every": histograms_every,
            "tensors": len(counted.rows),
            "statistics": len(STATS),
            "tokens": workload.tokens,
            "compiled": device == "cuda",
        }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median of the distribution, between two of its values.

    For any distribution the number of n values below its median is binomial, within n / 2 ± 0.98 sqrt(n). For fewer
    than six values no two are that far apart, and the interval is the range.
    """
    ordered = sorted(values)
    first = max(round(len(ordered) / 2 - 0.98 * len(ordered) ** 0.5) - 1, 0)
    return ordered[first], ordered[len(ordered) - 1 - first]


@contextmanager
def _own_time() -> Iterator[list[float]]:
    """Yield a list with one element, which counts the milliseconds that threads spend in `OWN` within the context."""
    spent, depth = [0.0], 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth, start = depth + 1, time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                depth -= 1
                spent[0] += 0.0 if depth else 1e3 * (time.thread_time() - start)

        return run

    plain = [getattr(owner, name) for owner, name in OWN]
    try:
        for (owner, name), call in zip(OWN, plain, strict=True):
            setattr(owner, name, counted(call))
        yield spent
    finally:
        for (owner, name), call in zip(OWN, plain, strict=True):
            setattr(owner, name, call)


def _keep_memory() -> None:
    """Keep glibc's malloc from returning memory to the system, which shortens steps and hides no overhead."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for name, value in ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_THRESHOLD, 2**25)) if mallopt else ():
        mallopt(name, value)  # type: ignore[misc]


def _times(step: Callable[[], object], device: str, steps: int) -> list[float]:
    """Return the milliseconds of steps: GPU time, or processor time of this thread."""
    if device == "cuda":
        return milliseconds(step, device, steps, queued=True)
    times = [time.thread_time()]
    for _ in range(steps):
        step()
        times.append(time.thread_time())
    return [1e3 * (end - start) for start, end in pairwise(times)]


def command(
    *,
    workload: Names = (),
    every: int = 1,
    histograms_every: int = 0,
    device: str = "auto",
    steps: int = 1,
    rounds: int = 60,
    output: Output = TO_STDOUT,
) -> int:
    """Time alternating steps with and without telemetry.

    Examples:

        octavo bench telemetry
        octavo bench telemetry --workload tiny --device cpu

    Parameters
    ----------
    workload
        Stacks among the workloads of `octavo bench step`, or `demo`, the model of `octavo train --preset demo`; by
        default `llama-8b-stack` on a GPU and `demo` on a CPU.
    every
        Sample every N-th step.
    histograms_every
        Sample the exponents, too, in every N-th step; 0: never.
    device
        cuda or cpu; auto takes the GPU if there is one.
    steps
        Steps of each kind per round; their median is used.
    rounds
        Pairs of steps without and with telemetry, in alternating order; the median is reported.
    """
    device = device_named(device)
    stacks = {DEMO.name: DEMO} | {name: shape for name, shape in WORKLOADS.items() if not shape.vocab}
    names = workload or (("llama-8b-stack",) if device == "cuda" else (DEMO.name,))
    chosen = [stacks[known("--workload", name, list(stacks), "stack")] for name in names]
    settings: dict[str, Any] = {
        "device": device,
        "every": positive("--every", every),
        "histograms_every": histograms_every,
        "steps": positive("--steps", steps),
        "rounds": positive("--rounds", rounds),
    }
    rows = (bench_telemetry(one, **settings) for one in chosen)
    return output.finish(KIND, rows, f"--device {device}", workload=names, **settings)
