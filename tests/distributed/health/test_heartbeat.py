"""A rank of two, beside a second one that the test writes into the shared store."""

import json
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from octavo.distributed.health import heartbeat, watch
from octavo.distributed.health.heartbeat import Heartbeat
from octavo.distributed.health.watch import Report
from octavo.errors import CheckpointError, ConfigError, RunError

TIMEOUT = 0.4
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Counting:
    """The part of a process group that a heartbeat uses."""

    _device_types = ("cpu",)

    def _get_backend(self, device):
        return self

    def _get_sequence_number_for_group(self):
        return 5


class Other:
    """Rank 1."""

    def __init__(self, store):
        self.store, self.alive = store, True
        self.step, self.collectives, self.beat = 0, 5, 0
        self.thread = threading.Thread(target=self.live)
        self.say()
        self.thread.start()

    def say(self):
        self.beat += 1
        self.store.set("1", json.dumps(Report(self.beat, self.step, self.collectives, False)))

    def live(self):
        while self.alive:
            self.say()
            time.sleep(0.01)

    def die(self):
        self.alive = False
        self.thread.join()


@pytest.fixture
def ends(monkeypatch):
    """Collect what would be the last words of this process, and its exit code."""
    said = []

    def end(error, code=1, *, note=""):
        said.append((error + note, code))
        raise SystemExit  # ends the thread

    monkeypatch.setattr(heartbeat, "BEAT", 0.02)
    monkeypatch.setattr(watch, "PATIENCE", 0.15)
    monkeypatch.setattr(heartbeat, "end", end)
    return said


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def other(store):
    other = Other(store)
    yield other
    other.die()


def beating(store):
    return Heartbeat(store, 0, 2, timeout=TIMEOUT, groups=[Counting()])


def wait_for(ends, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not ends and time.monotonic() < deadline:
        time.sleep(0.01)
    return ends


def test_nothing_happens_while_both_move(store, other, ends):
    with beating(store) as beats:
        for step in range(1, 12):
            beats.at(step)
            other.step = step
            time.sleep(TIMEOUT / 8)
    assert ends == []
    assert Report(*json.loads(store.get("0"))).left


def test_a_rank_that_falls_silent_is_named_with_its_step(store, other, ends):
    with beating(store) as beats:
        beats.at(4)
        other.step = 4
        time.sleep(0.1)
        other.die()
        [(text, code)] = wait_for(ends)
    assert text.startswith("rank 1 of 2 is gone")
    assert text.endswith("at step 4.")
    assert code == 1
    assert json.loads(store.get("verdict"))["verdict"]["blamed"] == [1]


def test_a_rank_that_does_not_come_to_a_collective_is_named(store, other, ends):
    with beating(store) as beats:
        beats.at(4)
        other.step, other.collectives = 4, 3
        [(text, _)] = wait_for(ends)
    assert text.startswith("rank 1 of 2 is missing")


def test_the_rank_that_hangs_says_where_it_is(store, other, ends):
    with beating(store) as beats:
        beats.at(4)
        other.step, other.collectives = 4, 9
        [(text, _)] = wait_for(ends)
    assert "rank 0 of 2, at step 4, is here:" in text
    assert "test_the_rank_that_hangs" in text


def test_what_another_rank_has_found_is_not_said_again(store, other, ends):
    store.set("verdict", json.dumps({"verdict": {"text": "rank 1 failed.", "blamed": [1]}, "by": 1}))
    with beating(store):
        assert wait_for(ends) == [("", 1)]


def test_sigterm_while_a_rank_is_silent_names_it_long_before_the_timeout(store, other, ends):
    with Heartbeat(store, 0, 2, timeout=100) as beats:
        beats.at(4)
        time.sleep(0.05)
        other.die()
        os.kill(os.getpid(), signal.SIGTERM)
        [(text, code)] = wait_for(ends)
    assert text.startswith("rank 1 of 2 is gone")
    assert code == 1


def test_sigterm_while_all_live_is_told_as_that(store, other, ends):
    before = signal.getsignal(signal.SIGTERM)
    with beating(store) as beats:
        beats.at(watch.UNHURRIED)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(ends) == [("terminated by SIGTERM.", 143)]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (CheckpointError("no space left"), CheckpointError, "rank 0 of 2, at step 4: no space left"),
        (KeyError("w"), RunError, "rank 0 of 2, at step 4: KeyError: 'w'"),
        (ConfigError("no such recipe"), ConfigError, "rank 0 of 2, at step 4: no such recipe"),
    ],
)
def test_an_error_is_told_to_the_others_and_raised_with_its_rank_and_step(store, other, ends, error, kind, text):
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(kind) as raised, beating(store) as beats:
            beats.at(4)
            raise error
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)  # kept, so that this rank can still speak
    assert str(raised.value) == text
    assert json.loads(store.get("verdict")) == {"verdict": {"text": text, "blamed": [0]}, "by": 0}
    assert ends == []


def test_an_error_that_comes_of_a_dead_rank_is_that_ranks(store, other, ends):
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit), Heartbeat(store, 0, 2, timeout=100) as beats:
            beats.at(4)
            other.die()
            raise RuntimeError("connection closed by peer")
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
    [(text, _)] = ends
    assert text.startswith("rank 1 of 2 is gone")


class Stopping:
    """A store whose host stops: calls do not return; or dies: they fail."""

    def __init__(self, store):
        self.store, self.fault = store, None

    def __getattr__(self, name):
        call = getattr(self.store, name)

        def answer(*arguments):
            if self.fault == "stopped":
                time.sleep(60)
            if self.fault == "dead":
                raise RuntimeError("connection reset by peer")
            return call(*arguments)

        return answer if callable(call) else call


@pytest.mark.parametrize(
    ("host", "who"), [(1, "rank 1 of 2 is gone: the ranks' store, which it hosts,"), (None, "torchrun is gone: the")]
)
@pytest.mark.parametrize(("fault", "what"), [("stopped", "has not answered for 0 s"), ("dead", "is closed")])
def test_the_host_of_the_store_is_named_with_its_step(store, other, ends, host, who, fault, what):
    stopping = Stopping(store)
    beats = Heartbeat(stopping, 0, 2, timeout=TIMEOUT, groups=[Counting()], host=host)
    beats.__enter__()
    try:
        beats.step = other.step = 6
        time.sleep(0.1)
        stopping.fault = fault
        text, code = wait_for(ends)[0]
    finally:
        beats._closing.set()
        beats._closed.set()
        beats._signal.release()
    assert text.startswith(who) and what in text and text.endswith("at step 6.") and code == 1


def test_a_failing_rank_keeps_its_step_where_the_store_is_gone_too(store, other, ends):
    stopping = Stopping(store)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Exception), Heartbeat(stopping, 0, 2, timeout=100, host=1) as beats:  # noqa: B017
            beats.at(4)
            other.step = watch.UNHURRIED
            time.sleep(0.1)
            stopping.fault = "dead"
            raise RuntimeError("connection closed by peer")
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
    assert [text for text, _ in ends] == [
        "rank 1 of 2 is gone: the ranks' store, which it hosts, is closed, at step 4."
    ]


def test_a_run_that_saves_on_a_signal_is_not_ended(store, other, ends):
    with beating(store) as beats:
        beats.saves_on_signal = True
        os.kill(os.getpid(), signal.SIGTERM)
        for step in range(1, 12):
            beats.at(step)
            other.step = step
            time.sleep(TIMEOUT / 8)
    assert ends == []
