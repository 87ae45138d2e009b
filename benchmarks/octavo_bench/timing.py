"""Shared parts of measurements: median of calls after a warm-up, peak memory, rows with the error of a failed case."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from octavo.lab.memory.forecast import GIB
from octavo.lab.train.timing import milliseconds, warm_up
from octavo_bench.results import Row, failure


def median_ms(
    call: Callable[[], Any],
    device: str,
    repeats: int,
    *,
    calls: int = 3,
    seconds: float = 0.05,
    queued: bool = True,
    cold: bool = False,
) -> float:
    """Return the median milliseconds of a call.

    Args:
        calls, seconds: of the warm-up, as for `octavo.lab.train.timing.warm_up`.
        queued, cold: as for `octavo.lab.train.timing.milliseconds`.
    """
    warm_up(call, device, calls=calls, seconds=seconds)
    return statistics.median(milliseconds(call, device, repeats, queued=queued, cold=cold))


def peak_gib(device: str) -> float:
    """Return the peak of allocated GiB on the GPU since its reset; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0


Case = tuple[Row, Callable[[], Row]]
"""The keys that name a row, and a call that measures its figures."""


def attempt(row: Row, measure: Callable[[], Row], device: str | None = None) -> Row:
    """Return the row with its figures, or with `error`, so that a failed case does not lose the others.

    Args:
        device: if given, compiled code and memory of the case are freed there.
    """
    try:
        return row | measure()
    except Exception as error:
        return row | {"error": failure(error)}
    finally:
        if device is not None:
            free(device)


def attempts(cases: Iterable[Case], device: str | None = None) -> Iterator[Row]:
    """Yield a row per case; arguments as for `attempt`."""
    return (attempt(about, measure, device) for about, measure in cases)


def beside_first(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows, each with its speed relative to the first."""
    baseline: Row | None = None
    for row in rows:
        baseline = baseline or row
        yield beside(row, baseline)


def beside(row: Row, baseline: Row) -> Row:
    """Return the row with its speed relative to the baseline; if that failed, with an error beside its figures."""
    if "error" in row:
        return row
    if "ms" not in baseline:
        return row | {"error": f"BF16 failed; {row['ms']:.2f} ms without a ratio"}
    return row | {"ratio_to_bf16": round(baseline["ms"] / row["ms"], 3)}


@contextmanager
def made_in_bf16(device: str) -> Iterator[None]:
    """Make parameters on a device, in BF16 from the start: in FP32, a model that just fits could not be built."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def free(device: str) -> None:
    """Free compiled code and cached memory, and reset the peak of memory."""
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
