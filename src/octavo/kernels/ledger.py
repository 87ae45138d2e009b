"""What really ran: FP8 GEMMs by kernel, quantised weights and every fallback, for as long as a ledger is open."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger("octavo")


@dataclass(eq=False)
class Ledger:
    """The GEMMs counted while a `record()` block was open."""

    gemms: Counter[str] = field(default_factory=Counter)
    """FP8 GEMMs run, by kernel."""
    weights: int = 0
    """Weights quantised for fprop: once per forward, and not those whose codes are reused."""
    fallbacks: list[str] = field(default_factory=list)
    """One line for each reason a slower kernel ran on a device that has a faster one."""


# Backward runs in threads of the autograd engine, which see no context variables: hence one list for the process.
_open: list[Ledger] = []
_warned: set[str] = set()
_held: list[list[str]] = []


@contextmanager
def record() -> Iterator[Ledger]:
    """Count every FP8 GEMM that runs inside the block, in eager mode and in compiled code, in any thread."""
    ledger = Ledger()
    _open.append(ledger)
    try:
        yield ledger
    finally:
        _open.remove(ledger)


@contextmanager
def apart() -> Iterator[Ledger]:
    """Count what runs inside the block in a ledger of its own alone: a capture, in which nothing runs.

    Nothing is counted where no ledger is open: compiled code would be compiled again, amid the capture.
    """
    ledger, others = Ledger(), _open[:]
    _open[:] = [ledger] if others else []
    try:
        yield ledger
    finally:
        _open[:] = others


def is_open() -> bool:
    """Return whether any ledger is open. Compiled code is specialised on it: only counted code pays for counting."""
    return len(_open) > 0


def enter(counted: Ledger) -> None:
    """Enter all that another ledger has counted in every open one: a replay of what was captured under it."""
    for kernel, number in counted.gemms.items():
        count(kernel, number)
    count_weights(counted.weights)
    for reason in counted.fallbacks:
        fall_back(reason)


def count(kernel: str, number: int = 1) -> None:
    """Enter a GEMM, or that many in one launch, in every open ledger."""
    for ledger in _open:
        ledger.gemms[kernel] += number


def count_weights(number: int) -> None:
    """Enter weights that were quantised in every open ledger."""
    for ledger in _open:
        ledger.weights += number


def fall_back(reason: str) -> None:
    """Enter a fallback in every open ledger, and warn of it in the log, once a reason."""
    for ledger in _open:
        if reason not in ledger.fallbacks:
            ledger.fallbacks.append(reason)
    warn_once(f"FP8 fallback: {reason}")


def warn_once(message: str) -> None:
    """Warn in the log, once per process and message; in a `hold_warnings` block add the message to its list."""
    if _held:
        _held[-1].append(message)
    elif message not in _warned:
        _warned.add(message)
        log.warning("%s", message)


@contextmanager
def hold_warnings() -> Iterator[list[str]]:
    """Keep the messages of `warn_once` in this block out of the log, in a list: for models that are only tried."""
    held: list[str] = []
    _held.append(held)
    try:
        yield held
    finally:
        _held.pop()
