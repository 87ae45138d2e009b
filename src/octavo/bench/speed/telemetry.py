"""What telemetry costs: steps with it and without it, in turns, on the same model."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from octavo.bench.implementations import implementations
from octavo.bench.timing import milliseconds, warm_up
from octavo.bench.workloads import Workload, build
from octavo.kernels.sample import STATS
from octavo.nn.telemetry import Telemetry

Row = dict[str, Any]

IMPLEMENTATION = "octavo folded"
SMALL = Workload(name="small", dim=512, ffn=1536, heads=8, kv_heads=4, layers=2, batch=4, sequence=512)
"""For a CPU: blocks in which products, not calls, are what takes time."""


def bench_telemetry(
    workload: Workload,
    *,
    device: str = "cuda",
    every: int = 1,
    histograms_every: int = 0,
    steps: int = 5,
    rounds: int = 4,
    report: Callable[[Row], None] = lambda row: None,
) -> Row:
    """Return the row of a workload, as the result kind `telemetry` has it.

    Steps with and without take turns, so that a machine that warms up slows both. `overhead_percent` is the median over
    the rounds of how much longer a step is with telemetry, every snapshot read; `spread_percent` is the range.

    Args:
        every: as of `Telemetry`.
        histograms_every: the same.
        steps: of each kind in a round.
        rounds: of steps without and with; every other one begins with the second.
        report: called with the row.
    """
    training = build(workload, implementations()[IMPLEMENTATION], device, compile=device == "cuda")
    telemetry: Telemetry | None = None

    def step() -> None:
        training.forward_backward()
        if telemetry is not None:  # it looks at the gradients, too
            telemetry.step()
            for _ in iter(telemetry.snapshot, None):
                pass
        training.update()

    def timed(watched: bool, calls: int) -> list[float]:
        nonlocal telemetry
        telemetry = Telemetry(training.model, every, histograms_every=histograms_every) if watched else None
        try:
            return milliseconds(step, device, calls)
        finally:
            if telemetry is not None:
                telemetry.detach()

    warm_up(step, device)
    timed(True, every)  # compiles
    pairs: list[tuple[list[float], list[float]]] = []
    for number in range(rounds):
        if number % 2:
            watched = timed(True, steps)
            pairs.append((timed(False, steps), watched))
        else:
            pairs.append((timed(False, steps), timed(True, steps)))
    overheads = [100 * (statistics.median(watched) / statistics.median(plain) - 1) for plain, watched in pairs]
    with Telemetry(training.model, every) as counted:
        row = {
            "workload": workload.name,
            "overhead_percent": round(statistics.median(overheads), 3),
            "spread_percent": round(max(overheads) - min(overheads), 3),
            "ms": round(statistics.median(ms for plain, _ in pairs for ms in plain), 3),
            "ms_watched": round(statistics.median(ms for _, watched in pairs for ms in watched), 3),
            "device": device,
            "every": every,
            "histograms_every": histograms_every,
            "tensors": len(counted.rows),
            "statistics": len(STATS),
            "tokens": workload.tokens,
            "compiled": device == "cuda",
        }
    report(row)
    return row
