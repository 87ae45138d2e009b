"""Record of execution: GEMMs in eight bits per kernel, quantised weights and fallbacks, while a ledger is open."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from octavo.kernels.runtime import host_state
from octavo.kernels.runtime.host_state import switched, update

log = logging.getLogger("octavo")


@dataclass(eq=False)
class Ledger:
    """Counts of a `record()` block."""

    gemms: Counter[str] = field(default_factory=Counter)
    """GEMMs in FP8 and INT8 run, per kernel."""
    weights: int = 0
    """Weights quantised for fprop: once per forward, excluding weights whose codes are reused."""
    fallbacks: list[str] = field(default_factory=list)
    """One line per reason why a slower kernel ran on a device with a faster one."""


_warned: set[str] = set()
"""Messages that this process has logged already."""


@contextmanager
def record() -> Iterator[Ledger]:
    """Count every GEMM in FP8 or INT8 that runs inside the block, in eager mode and in compiled code, in any thread."""
    ledger = Ledger()
    update(lambda state: state._replace(ledgers=(*state.ledgers, ledger)))
    try:
        yield ledger
    finally:  # blocks of other threads may have begun, and end, in any order
        update(lambda state: state._replace(ledgers=tuple(each for each in state.ledgers if each is not ledger)))


@contextmanager
def apart() -> Iterator[Ledger]:
    """Count inside the block in a separate ledger only, for a graph capture, which executes nothing.

    Counts nothing if no ledger is open: opening one would recompile compiled code during the capture.
    """
    ledger = Ledger()
    with switched(ledgers=(ledger,) if is_open() else ()):
        yield ledger


def is_open() -> bool:
    """Return whether any ledger is open."""
    return len(host_state.now.ledgers) > 0


def enter(counted: Ledger) -> None:
    """Add the counts of another ledger to every open one, for each replay of a graph captured under it."""
    for kernel, number in counted.gemms.items():
        count(kernel, number)
    count_weights(counted.weights)
    for reason in counted.fallbacks:
        fall_back(reason)


def count(kernel: str, number: int = 1) -> None:
    """Count a GEMM, or `number` of them in one launch, in every open ledger."""
    for ledger in host_state.now.ledgers:
        ledger.gemms[kernel] += number


def count_weights(number: int) -> None:
    """Count quantised weights in every open ledger."""
    for ledger in host_state.now.ledgers:
        ledger.weights += number


def fall_back(reason: str) -> None:
    """Record a fallback in every open ledger, and log a warning, once per reason."""
    for ledger in host_state.now.ledgers:
        if reason not in ledger.fallbacks:
            ledger.fallbacks.append(reason)
    warn_once(f"FP8 fallback: {reason}")


def warn_once(message: str) -> None:
    """Log a warning, once per process and message; in a `hold_warnings` block, append it to the list instead."""
    if held := host_state.now.held_warnings:
        held[-1].append(message)
    elif message not in _warned:
        _warned.add(message)
        log.warning("%s", message)


@contextmanager
def hold_warnings() -> Iterator[list[str]]:
    """Collect the messages of `warn_once` in a list instead of logging them, for trial runs of a model."""
    held: list[str] = []
    with switched(held_warnings=(*host_state.now.held_warnings, held)):
        yield held
