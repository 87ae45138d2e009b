"""Record of execution: FP8 GEMMs per kernel, quantised weights and fallbacks, while a ledger is open."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger("octavo")


@dataclass(eq=False)
class Ledger:
    """Counts of a `record()` block."""

    gemms: Counter[str] = field(default_factory=Counter)
    """FP8 GEMMs run, per kernel."""
    weights: int = 0
    """Weights quantised for fprop: once per forward, excluding weights whose codes are reused."""
    fallbacks: list[str] = field(default_factory=list)
    """One line per reason why a slower kernel ran on a device with a faster one."""


# Process-wide: autograd runs backward in its own threads, which do not inherit context variables.
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
    """Count inside the block in a separate ledger only, for a graph capture, which executes nothing.

    Counts nothing if no ledger is open: opening one would recompile compiled code during the capture.
    """
    ledger, others = Ledger(), _open[:]
    _open[:] = [ledger] if others else []
    try:
        yield ledger
    finally:
        _open[:] = others


def is_open() -> bool:
    """Return whether any ledger is open. Compiled code is specialised on it, so that counting is free when off."""
    return len(_open) > 0


def enter(counted: Ledger) -> None:
    """Add the counts of another ledger to every open one, for each replay of a graph captured under it."""
    for kernel, number in counted.gemms.items():
        count(kernel, number)
    count_weights(counted.weights)
    for reason in counted.fallbacks:
        fall_back(reason)


def count(kernel: str, number: int = 1) -> None:
    """Count a GEMM, or `number` of them in one launch, in every open ledger."""
    for ledger in _open:
        ledger.gemms[kernel] += number


def count_weights(number: int) -> None:
    """Count quantised weights in every open ledger."""
    for ledger in _open:
        ledger.weights += number


def fall_back(reason: str) -> None:
    """Record a fallback in every open ledger, and log a warning, once per reason."""
    for ledger in _open:
        if reason not in ledger.fallbacks:
            ledger.fallbacks.append(reason)
    warn_once(f"FP8 fallback: {reason}")


def warn_once(message: str) -> None:
    """Log a warning, once per process and message; in a `hold_warnings` block, append it to the list instead."""
    if _held:
        _held[-1].append(message)
    elif message not in _warned:
        _warned.add(message)
        log.warning("%s", message)


@contextmanager
def hold_warnings() -> Iterator[list[str]]:
    """Collect the messages of `warn_once` in a list instead of logging them, for trial runs of a model."""
    held: list[str] = []
    _held.append(held)
    try:
        yield held
    finally:
        _held.pop()
