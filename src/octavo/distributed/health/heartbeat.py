"""A rank that is gone, or hangs, is named by the others, which then stop.

Each rank writes into a store, every half a second, how far it is, and reads what the others have written. It does so in
a thread: a rank that waits for another one can do nothing else. Who sees first that a rank is gone or hangs
(`octavo.distributed.health.watch`) writes down the reason and prints it; all ranks end their processes.

torchrun sends SIGTERM to all ranks once one has died: it is then told within seconds which one that is.
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
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from octavo.distributed.health.watch import BEAT, UNHURRIED, Report, Verdict, Watch, at
from octavo.errors import ConfigError, DataError, OctavoError, RunError

_VERDICT = "verdict"


class Heartbeat:
    """The beats of a rank, from the beginning of its work to the end: a context manager.

    It ends the process with exit code 1 once a rank is gone or hangs: by then nothing else can. In the main thread it
    also takes over SIGTERM, and ends the process with exit code 143 where no rank is to blame for that.

    An error inside is told to the other ranks, which end too, unless one of them was the reason for it.
    """

    def __init__(
        self, store: Store, rank: int, ranks: int, *, timeout: float, groups: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        """Prepare the beats of a rank.

        Args:
            store: one that all ranks share and nobody else, on a connection of its own: a call that waits blocks it.
            rank: this one.
            ranks: how many there are.
            timeout: seconds without a sign of a rank, or without progress of any, after which all stop.
            groups: whose collectives are counted.
        """
        self.step = 0
        """In progress, counted from 1."""
        self.rank, self.ranks = rank, ranks
        self._store, self._groups = store, groups
        self._watch = Watch(ranks=ranks, timeout=timeout, beat=max(BEAT, ranks / 100))  # the store serves all of them
        self._beats = 0
        self._all_began = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo heartbeat", daemon=True)
        self._signal = _Signal()

    @property
    def where(self) -> str:
        """This rank and its step, in words."""
        return f"rank {self.rank} of {self.ranks}, {at(self.step)}"

    def at(self, step: int) -> None:
        """Say at once that a step begins, counted from 1; 0: none yet; `UNHURRIED`: no hang is looked for."""
        self.step = step
        self._beat()

    def __enter__(self) -> Heartbeat:
        self._beat()
        self._signal.catch()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave.

        Raises:
            OctavoError: the one raised inside, with rank and step; RunError for an error of another kind.
            SystemExit: another rank has failed before, and said so.
        """
        try:
            if isinstance(error, Exception):
                self._fail(error)
        finally:
            self._closing.set()
            self._thread.join()
            if (
                error is None
            ):  # or else torchrun, told by the other ranks' ends, would end this one before it has spoken
                self._signal.release()
            with suppress(RuntimeError):  # the store may have ended before
                self._beat(left=True)

    def _fail(self, error: Exception) -> None:
        where, self.step = self.where, UNHURRIED
        # What all ranks read is wrong on all of them. Anything else may come of a collective in which one was missing:
        # then the thread ends this process meanwhile.
        if not isinstance(error, ConfigError | DataError):
            self._watch.alarm = time.monotonic()
            self._closing.wait(self._watch.patience + 3 * self._watch.beat)
        self._closing.set()
        self._thread.join()
        is_ours = isinstance(error, OctavoError)
        text = f"{where}: {error}" if is_ours else f"{where}: {type(error).__name__}: {error}"
        if not self._decide(Verdict(text, (self.rank,))):
            raise SystemExit(1)
        raise (type(error) if is_ours else RunError)(text) from error

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._signal.wait(self._watch.beat) and self._watch.alarm is None:
                self._watch.alarm = time.monotonic()
            try:
                self._beat()
                self._watch.update(self._reports(), time.monotonic())
                self._judge()
            except RuntimeError as error:
                if not self._closing.is_set():
                    end(f"{self.where}: the ranks' store is gone, and torchrun or rank 0 with it ({error}).")

    def _judge(self) -> None:
        """End the process if a rank has found a reason to, or if there is one to be found."""
        if self._store.check([_VERDICT]):
            self._obey(Verdict(**json.loads(self._store.get(_VERDICT))["verdict"]))
        verdict = self._watch.verdict()
        if verdict is not None:
            self._obey(verdict, says=self._decide(verdict))
        elif self._signal.came and self._watch.is_sure:
            told = "told to end, by SIGTERM."
            end(told if self._decide(Verdict(told)) else "", code=128 + signal.SIGTERM)

    def _obey(self, verdict: Verdict, *, says: bool = False) -> None:
        if self._closing.is_set():
            return  # the main thread has failed itself, and says so
        note = ""
        if self.rank in verdict.blamed:
            frame = sys._current_frames()[threading.main_thread().ident or 0]
            note = f"{self.where}, is here:\n{_stack(frame)}"
        end(verdict.text if says else "", note=note)

    def _decide(self, verdict: Verdict) -> bool:
        """Write down why all ranks stop. Return whether it is the first reason, which is the one to print."""
        mine = json.dumps({"verdict": {"text": verdict.text, "blamed": verdict.blamed}, "by": self.rank})
        try:
            return bool(self._store.compare_set(_VERDICT, "", mine) == mine.encode())
        except RuntimeError:
            return True  # the store is gone: nobody else can know

    def _beat(self, *, left: bool = False) -> None:
        self._beats += 1
        self._store.set(str(self.rank), json.dumps(Report(self._beats, self.step, _begun(self._groups), left)))

    def _reports(self) -> dict[int, Report]:
        """Return the reports of the ranks that have made one."""
        keys = [str(rank) for rank in range(self.ranks)]
        if not self._all_began:
            keys = [key for key in keys if self._store.check([key])]
            self._all_began = len(keys) == self.ranks
        return {
            int(key): Report(*json.loads(value)) for key, value in zip(keys, self._store.multi_get(keys), strict=True)
        }


class _Signal:
    """SIGTERM, for a thread to learn of: Python's own handlers wait until the main thread leaves a collective."""

    def __init__(self) -> None:
        self.came = False
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._before: Any = None

    def catch(self) -> None:
        """Take the signal over; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._ends = socket.socketpair()
        for one in self._ends:
            one.setblocking(False)
        self._before = signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)

    def wait(self, seconds: float) -> bool:
        """Wait for so long, or until the signal comes, and return whether it has come by now."""
        if self._ends is None:
            time.sleep(seconds)
        elif select.select([self._ends[0]], [], [], seconds)[0]:
            self.came = self.came or signal.SIGTERM in self._ends[0].recv(64)
        return self.came

    def release(self) -> None:
        """Give the signal back."""
        if self._ends is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._before)
            for one in self._ends:
                one.close()


def _begun(groups: Iterable[dist.ProcessGroup]) -> int:
    """Return how many collectives this rank has begun; 0 of a backend that does not count them."""
    begun = 0
    for group in groups:
        backends: set[Any] = {group._get_backend(device) for device in group._device_types}
        for backend in backends:
            with suppress(RuntimeError):
                begun += backend._get_sequence_number_for_group()
    return begun


def end(error: str, code: int = 1, *, note: str = "") -> None:
    """End this process at once, whatever its other threads do, with last words."""
    words = [f"octavo: error: {error}"] if error else []
    words += [note.rstrip()] if note else []
    if words:
        cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a live table hides it
        print(cursor + "\n".join(words), file=sys.stderr, flush=True)
    os._exit(code)


def _stack(frame: FrameType) -> str:
    return "".join(traceback.format_stack(frame)[-6:])
