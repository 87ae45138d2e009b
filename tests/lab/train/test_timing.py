"""Calls are timed as often as they are asked for, after a warm-up."""

from __future__ import annotations

import time

import pytest
import torch

from octavo.lab.train import timing
from octavo.lab.train.timing import Kernel, Stopwatch, milliseconds, warm_up


class Clock:
    """A clock of the host that only `sleep` moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_every_call_is_timed_on_its_own(clock: Clock) -> None:
    pauses = iter([0.5, 2.0, 0.25])
    assert milliseconds(lambda: clock.sleep(next(pauses)), "cpu", 3) == [500, 2000, 250]


@pytest.mark.parametrize(
    ("calls", "seconds", "made"), [(3, 0.0, 3), (0, 2.0, 4), (3, 2.0, 4), (5, 2.0, 5), (0, 1.75, 4)]
)
def test_a_warm_up_lasts_for_its_calls_and_its_seconds(clock: Clock, calls: int, seconds: float, made: int) -> None:
    pauses: list[float] = []

    def call() -> None:
        pauses.append(0.5 if pauses else 60.0)
        clock.sleep(pauses[-1])

    warm_up(call, "cpu", calls=calls, seconds=seconds)
    assert len(pauses) == 1 + made  # the first, which may compile, does not count


@pytest.mark.gpu
def test_a_launch_slower_than_its_kernel_does_not_count() -> None:
    x = torch.zeros(1024, device="cuda")

    def slow_launch() -> None:
        time.sleep(2e-4)
        x.add_(1)

    slow_launch()  # loads the kernel
    # The fastest: other processes that use the GPU take it for milliseconds at a time.
    assert min(milliseconds(slow_launch, "cuda", 9, queued=True, cold=True)) < 0.1


def test_a_stopwatch_sums_the_parts_of_one_name(clock: Clock) -> None:
    watch = Stopwatch(torch.device("cpu"))
    for name, seconds in (("a", 0.5), ("b", 0.25), ("a", 1.0)):
        clock.sleep(seconds)
        watch.mark(name)
    assert watch.milliseconds() == {"a": 1500, "b": 250}


@pytest.mark.gpu
def test_a_stopwatch_of_a_gpu_measures_its_own_work() -> None:
    watch = Stopwatch(torch.device("cuda"))
    for name, cycles in (("a", 100_000_000), ("b", 0), ("a", 100_000_000)):  # longer than another process's turn
        if cycles:
            torch.cuda._sleep(cycles)
        watch.mark(name)
    found = watch.milliseconds()
    assert found.keys() == {"a", "b"} and found["a"] > found["b"] >= 0


@pytest.mark.parametrize(("empty", "seen"), [(0, 1), (2, 1), (3, 0)])
def test_a_profile_without_kernels_is_repeated(monkeypatch: pytest.MonkeyPatch, empty: int, seen: int) -> None:
    profiles = iter([*[[]] * empty, [Kernel("one", 0.0, 1.0)]])
    monkeypatch.setattr(timing, "_profiled", lambda step, steps, trace: next(profiles))
    assert len(timing.kernels_of(lambda: None, 1)) == seen
