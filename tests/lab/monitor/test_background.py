from __future__ import annotations

import threading
import time
import warnings

import pytest

from octavo.lab.monitor.background import Background


def test_actions_are_carried_out_in_order_in_another_thread() -> None:
    done: list[tuple[int, int]] = []
    background = Background("test")
    for i in range(100):
        background.submit(lambda i=i: done.append((i, threading.get_ident())), may_drop=False)
    background.close()
    assert [i for i, _ in done] == list(range(100))
    assert {thread for _, thread in done}.isdisjoint({threading.get_ident()})


def test_what_is_too_much_is_dropped_and_counted_and_nobody_waits() -> None:
    gate, done = threading.Event(), []
    background = Background("test", capacity=4)
    background.submit(gate.wait)
    while background._queue.qsize():  # until the thread waits at the gate
        time.sleep(0.001)
    taken = [background.submit(lambda i=i: done.append(i)) for i in range(10)]
    assert background.submit(lambda: done.append("kept"), may_drop=False)  # who waited would wait forever
    gate.set()
    background.close()
    assert taken == [True] * 4 + [False] * 6 and background.dropped == 6
    assert done == [0, 1, 2, 3, "kept"]
    assert not background.submit(lambda: done.append("late")) and background.dropped == 6


def test_a_failure_is_said_once_and_costs_only_itself() -> None:
    done: list[int] = []
    background = Background("the thread")
    with pytest.warns(UserWarning, match="the thread: no space left") as said:
        for i in range(3):
            background.submit(lambda: (_ for _ in ()).throw(OSError("no space left")))
            background.submit(lambda i=i: done.append(i))
        background.close()
    assert (len(said), background.failed, done) == (1, 3, [0, 1, 2])


def test_a_warning_that_is_an_error_does_not_end_the_thread(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    background = Background("the thread")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        background.submit(lambda: 1 / 0)
        background.submit(lambda: done.append("kept"))
        background.close(lambda: done.append("last"))
    assert done == ["kept", "last"]
    assert "the thread: division by zero" in capsys.readouterr().err


def test_nothing_is_called_after_the_last_action() -> None:
    calls: list[str] = []
    background = Background("test", idle=lambda: calls.append("idle"), every=0.0)
    background.submit(lambda: calls.append("action"), may_drop=False)
    background.close(lambda: calls.append("last"))
    assert "action" in calls and calls[-1] == "last" and calls.count("last") == 1


def test_idle_work_goes_on_between_and_during_other_work() -> None:
    calls: list[float] = []
    background = Background("test", idle=lambda: calls.append(time.monotonic()), every=0.02)
    time.sleep(0.15)
    idle = len(calls)
    for _ in range(15):
        background.submit(lambda: time.sleep(0.01))
    background.close()
    assert 3 <= idle <= 8
    assert len(calls) > idle


def test_closing_does_not_wait_for_ever() -> None:
    gate = threading.Event()
    background = Background("stuck")
    background.submit(gate.wait)
    with pytest.warns(UserWarning, match="stuck: not done"):
        background.close(timeout=0.05)
    gate.set()
    background.close()
