"""Time spent on a device, without making it wait."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Times one stretch of work. On CUDA it leaves two marks in the stream; only reading them waits."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def __enter__(self) -> Stopwatch:
        self._marks, self._times = [], []
        self._mark()
        return self

    def __exit__(self, *_: object) -> None:
        self._mark()

    def milliseconds(self) -> float:
        """Return the time between entering and leaving. On CUDA this waits for the work to end."""
        if self._cuda:
            start, end = self._marks
            end.synchronize()
            return float(start.elapsed_time(end))
        return 1e3 * (self._times[1] - self._times[0])

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._times.append(time.perf_counter())
