"""Calls are timed as often as they are asked for, after a warm-up."""

from __future__ import annotations

import time

import pytest
import torch

from octavo.train.timing import Stopwatch, milliseconds, warm_up


def test_every_call_is_timed_on_its_own() -> None:
    pauses = iter([0.0, 0.02, 0.0])
    times = milliseconds(lambda: time.sleep(next(pauses)), "cpu", 3)
    assert len(times) == 3 and times[1] > 15 > max(times[0], times[2])


@pytest.mark.parametrize(("calls", "seconds", "least"), [(3, 0.0, 3), (0, 0.05, 4)])
def test_a_warm_up_lasts_for_its_calls_and_its_seconds(calls: int, seconds: float, least: int) -> None:
    done: list[None] = []

    def call() -> None:
        done.append(time.sleep(0.01))

    start = time.perf_counter()
    warm_up(call, "cpu", calls=calls, seconds=seconds)
    assert time.perf_counter() - start >= seconds
    assert least < len(done) < 10  # the first, which may compile, does not count


@pytest.mark.gpu
def test_a_launch_slower_than_its_kernel_does_not_count() -> None:
    x = torch.zeros(1024, device="cuda")

    def slow_launch() -> None:
        time.sleep(2e-4)
        x.add_(1)

    slow_launch()  # loads the kernel
    assert sorted(milliseconds(slow_launch, "cuda", 9, queued=True, cold=True))[4] < 0.1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_stopwatch_sums_the_parts_of_one_name(device: str) -> None:
    watch = Stopwatch(torch.device(device))
    for name, seconds in (("a", 0.02), ("b", 0.0), ("a", 0.02)):
        time.sleep(seconds)
        watch.mark(name)
    found = watch.milliseconds()
    assert found.keys() == {"a", "b"} and 35 < found["a"] < 2000
