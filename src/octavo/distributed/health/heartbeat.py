"""Heartbeat of ranks: detects dead or hung ranks, names the culprit and ends all processes.

Every half second a thread of each rank writes its progress into a store, and reads that of the others; the main thread
may be blocked in a collective. The first rank to detect a fault (`octavo.distributed.health.watch`) records and prints
the reason; all ranks then end their processes.

torchrun sends SIGTERM to all ranks once one has died: the dead one is then named within seconds.

A store call never returns if the host of the store has stopped, so that a second thread watches the first.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from octavo._util.terminal import printable
from octavo.distributed.health.watch import BEAT, UNHURRIED, RankFailure, RankMonitor, Report, at
from octavo.errors import ConfigError, DataError, OctavoError, RunError

_VERDICT = "verdict"


class Heartbeat:
    """Context manager around the work of a rank, which runs its heartbeat.

    It ends the process with exit code 1 once a rank is dead or hung, which nothing else can do by then. In the main
    thread it also handles SIGTERM, and ends the process with exit code 143 if no rank is to blame.

    An error inside is reported to the other ranks, which end too, unless one of them caused it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        *,
        timeout: float,
        groups: Sequence[dist.ProcessGroup] = (),
        host: int | None = None,
    ) -> None:
        """Prepare the heartbeat of a rank.

        Args:
            store: store of these ranks only, on its own connection: a waiting call blocks the connection.
            timeout: seconds without a report of a rank, or without progress of any, after which all stop.
            groups: process groups whose collectives are counted.
            host: rank that hosts the store; None if torchrun does.
        """
        self.step = 0
        """Step in progress, counted from 1."""
        self.saves_on_signal = False
        """Whether the main thread stops all ranks after SIGTERM, once it has saved a checkpoint."""
        self.rank, self.ranks = rank, ranks
        self._store, self._groups, self._host = store, groups, host
        beat = max(BEAT, ranks / 100)  # limits the load of the store
        self._monitor = RankMonitor(ranks=ranks, timeout=timeout, beat=beat)
        self._beats = self._rounds = 0
        self._all_began = self._is_failing = False
        self._closing, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo heartbeat", daemon=True)
        self._watcher = threading.Thread(target=self._watch_store, name="octavo heartbeat watcher", daemon=True)
        self._signal = _Signal()

    @property
    def where(self) -> str:
        """Rank and step as text."""
        return f"rank {self.rank} of {self.ranks}, {at(self.step)}"

    def at(self, step: int) -> None:
        """Report at once that a step begins, counted from 1; 0: none yet; `UNHURRIED`: hangs are not detected."""
        self.step = step
        self._beat()

    def __enter__(self) -> Heartbeat:
        self._watcher.start()
        self._beat()
        self._signal.catch()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop the heartbeat.

        Raises:
            OctavoError: the one raised inside, with rank and step; RunError for any other exception.
            SystemExit: another rank has failed first, and reported it.
        """
        try:
            if isinstance(error, Exception):
                self._fail(error)
        finally:
            self._closing.set()
            self._thread.join()
            # After an error keep SIGTERM: torchrun sends it once other ranks end, maybe before this one has reported.
            if error is None:
                self._signal.release()
            with suppress(RuntimeError):  # the store may have ended before
                self._beat(left=True)
            self._closed.set()
            self._watcher.join()

    def _fail(self, error: Exception) -> None:
        self._is_failing = True
        # Errors of input are the same on all ranks. Others may come from a collective in which a rank was missing: then
        # the thread ends this process meanwhile.
        if not isinstance(error, ConfigError | DataError):
            self._monitor.alarm = time.monotonic()
            self._closing.wait(self._monitor.patience + 3 * self._monitor.beat)
        self._closing.set()
        self._thread.join()
        is_ours = isinstance(error, OctavoError)
        text = f"{self.where}: {error}" if is_ours else f"{self.where}: {type(error).__name__}: {error}"
        if not self._record(RankFailure(text, (self.rank,))):
            raise SystemExit(1)
        raise (type(error) if is_ours else RunError)(text) from error

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._signal.wait(self._monitor.beat) and self._monitor.alarm is None:
                self._monitor.alarm = time.monotonic()
            try:
                self._beat()
                self._monitor.update(self._reports(), time.monotonic())
                self._judge()
                self._rounds += 1
            except RuntimeError:
                if not self._closing.is_set():
                    end(self._store_failure("is closed"))

    def _watch_store(self) -> None:
        """End the process if a round of the heartbeat takes longer than the timeout."""
        rounds, since = -1, time.monotonic()
        checked = since
        while not self._closed.wait(self._monitor.beat):
            before, checked = checked, time.monotonic()
            was_paused = checked - before > self._monitor.patience / 2  # this process itself
            if rounds != self._rounds or was_paused:
                rounds, since = self._rounds, checked
            elif checked - since > self._monitor.timeout:
                end(self._store_failure(f"has not answered for {checked - since:.0f} s"))

    def _store_failure(self, what: str) -> str:
        """Return why this rank ends that cannot reach the store, with the step that its host was in."""
        if self._host is None:
            return f"torchrun is gone: the ranks' store, which it hosts, {what}, {at(self.step)}."
        known = self._monitor.seen.get(self._host)
        # Its last report may be older than its step; this rank cannot have been ahead by more than a collective.
        step = max(self.step, known.report.step if known is not None else 0)
        return f"rank {self._host} of {self.ranks} is gone: the ranks' store, which it hosts, {what}, {at(step)}."

    def _judge(self) -> None:
        """End the process if a rank has recorded a failure, or if this one reaches one."""
        if self._store.check([_VERDICT]):
            self._stop(RankFailure(**json.loads(self._store.get(_VERDICT))["verdict"]))
        failure = self._monitor.diagnose()
        if failure is not None:
            self._stop(failure, prints=self._record(failure))
        elif self._signal.came and self._monitor.is_sure and not self.saves_on_signal:
            reason = "terminated by SIGTERM."
            end(reason if self._record(RankFailure(reason)) else "", code=128 + signal.SIGTERM)

    def _stop(self, failure: RankFailure, *, prints: bool = False) -> None:
        if self._closing.is_set():
            return  # the main thread has failed itself, and reports it
        note = ""
        if self.rank in failure.blamed:
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            note = "".join([f"{self.where}, is here:\n", *traceback.format_stack(frame)[-6:]])
        end(failure.text if prints else "", note=note)

    def _record(self, failure: RankFailure) -> bool:
        """Record why all ranks stop. Return whether it is the first failure, which is the one to print."""
        mine = json.dumps({"verdict": {"text": failure.text, "blamed": failure.blamed}, "by": self.rank})
        try:
            return bool(self._store.compare_set(_VERDICT, "", mine) == mine.encode())
        except RuntimeError:
            return True  # the store is gone: no other rank can read it

    def _beat(self, *, left: bool = False) -> None:
        self._beats += 1
        step = UNHURRIED if self._is_failing else self.step
        self._store.set(str(self.rank), json.dumps(Report(self._beats, step, _begun(self._groups), left)))

    def _reports(self) -> dict[int, Report]:
        """Return the reports of all ranks that have one."""
        keys = [str(rank) for rank in range(self.ranks)]
        if not self._all_began:
            keys = [key for key in keys if self._store.check([key])]
            self._all_began = len(keys) == self.ranks
        return {
            int(key): Report(*json.loads(value)) for key, value in zip(keys, self._store.multi_get(keys), strict=True)
        }


class _Signal:
    """SIGTERM for a thread: Python's own handlers run only once the main thread leaves a collective."""

    def __init__(self) -> None:
        self.came = False
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._before: Any = None

    def catch(self) -> None:
        """Install the handler; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._ends = socket.socketpair()
        for one in self._ends:
            one.setblocking(False)
        self._before = signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)

    def wait(self, seconds: float) -> bool:
        """Wait until the signal arrives, at most that long, and return whether it has arrived."""
        if self._ends is None:
            time.sleep(seconds)
        elif select.select([self._ends[0]], [], [], seconds)[0]:
            self.came = self.came or signal.SIGTERM in self._ends[0].recv(64)
        return self.came

    def release(self) -> None:
        """Restore the previous handler."""
        if self._ends is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._before)
            for one in self._ends:
                one.close()


def _begun(groups: Iterable[dist.ProcessGroup]) -> int:
    """Return the number of collectives that this rank has begun; 0 for a backend that does not count them."""
    begun = 0
    for group in groups:
        backends: set[Any] = {group._get_backend(device) for device in group._device_types}
        for backend in backends:
            with suppress(RuntimeError):
                begun += backend._get_sequence_number_for_group()
    return begun


def end(error: str, code: int = 1, *, note: str = "") -> None:
    """Print an error and end this process at once, whatever its other threads do."""
    words = [f"octavo: error: {error}"] if error else []
    words += [note.rstrip()] if note else []
    if words:
        cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a live table hides it
        print(cursor + "\n".join(map(printable, words)), file=sys.stderr, flush=True)
    os._exit(code)
