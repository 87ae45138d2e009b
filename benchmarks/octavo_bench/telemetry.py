"""Cost of telemetry: steps with it and without it, in turns, on the same model."""

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
from octavo.nn import telemetry_ops
from octavo.nn.telemetry import Telemetry
from octavo.train.timing import milliseconds, warm_up
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
"""Functions in which telemetry spends its time beside the products."""
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

    A round is a pair: a step without and one with telemetry, as close to each other as can be, so that whatever slows
    the machine slows both; which comes first alternates. `overhead_percent` is the median over the pairs of how much
    longer the second kind takes, and `low_percent` to `high_percent` the interval that holds the true median in 95 of
    100 such benches (`interval`).

    A GPU's steps are timed by its own events. On a CPU it is the processor time of the thread that trains, and that
    does all of telemetry: others that use the machine take wall time away, but less of that. There `own_percent` is
    counted, too: the time that this thread spends in telemetry's own code, of a step's without. It hardly depends on
    what else the machine does, but leaves out the cost of cache lines that telemetry evicts. The process keeps its
    memory from now on: without, a step takes tens of thousands of page faults, and never as many as the one before.

    Args:
        every: as of `Telemetry`; each of the `steps` of a round begins a count of its own.
        histograms_every: the same.
        steps: of each kind in a round; their median counts.
        rounds: pairs.
    """
    training = build(workload, implementations()[IMPLEMENTATION], device, compile=device == "cuda")
    telemetry: Telemetry | None = None

    def step() -> None:
        training.forward_backward()
        if telemetry is not None and not workload.vocab:  # no optimizer closes a step, and the gradients go now
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
    """Return the two of these values between which the median of where they come from lies, at 95 %.

    Whatever the distribution: how many of n values lie below its median is binomial, within n / 2 ± 0.98 sqrt(n). Of
    fewer than six no two values are that far apart, and it is the range.
    """
    ordered = sorted(values)
    first = max(round(len(ordered) / 2 - 0.98 * len(ordered) ** 0.5) - 1, 0)
    return ordered[first], ordered[len(ordered) - 1 - first]


@contextmanager
def _own_time() -> Iterator[list[float]]:
    """Count in the one element of a list the milliseconds that threads spend in `OWN` while the block runs."""
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

    plain = [getattr(where, name) for where, name in OWN]
    try:
        for (where, name), call in zip(OWN, plain, strict=True):
            setattr(where, name, counted(call))
        yield spent
    finally:
        for (where, name), call in zip(OWN, plain, strict=True):
            setattr(where, name, call)


def _keep_memory() -> None:
    """Let malloc, where it is glibc's, give nothing back to the system. It shortens steps, and hides nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for name, value in ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_THRESHOLD, 2**25)) if mallopt else ():
        mallopt(name, value)  # type: ignore[misc]


def _times(step: Callable[[], object], device: str, steps: int) -> list[float]:
    """Return the milliseconds of steps: of a GPU, or of this thread on a processor."""
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
    """Time steps with telemetry and without, in turns.

    Examples:

        octavo bench telemetry
        octavo bench telemetry --workload tiny --device cpu

    Parameters
    ----------
    workload
        Stacks among the workloads of `octavo bench step`, or `demo`, the model of `octavo train --preset demo`; by
        default `llama-8b-stack` on a GPU and `demo` on a CPU.
    every
        Sample each step whose number this divides.
    histograms_every
        Sample the exponents, too, in each step whose number this divides; 0: never.
    device
        cuda or cpu; auto takes the GPU if there is one.
    steps
        Steps of each kind in a round; their median counts.
    rounds
        Pairs of steps without telemetry and with it, which take turns to be first; the median counts.
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
