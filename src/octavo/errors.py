"""Errors raised for users. Messages name the error, its location, the probable intention and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OctavoError(Exception):
    """Base of all errors raised by Octavo. The command line prints it as one line and exits with `exit_code`."""

    exit_code = 1


class ConfigError(OctavoError, ValueError):
    """An invalid recipe, run file or argument."""

    exit_code = 2


class DataError(OctavoError):
    """A missing, empty or too short corpus."""


class CheckpointError(OctavoError):
    """A checkpoint that is truncated, missing, of another model, or cannot be written."""


class NonFiniteError(OctavoError):
    """A NaN or an infinity that stops training."""


class UnsupportedError(OctavoError):
    """An operation that no kernel of this machine can run."""


class RunError(OctavoError):
    """A training run that had to stop."""


class DivergedError(RunError):
    """A training run whose loss, weights or optimizer states are no longer finite."""

    exit_code = 3


class StoreError(OctavoError):
    """A run store that is missing, of another program, of a newer version, or cannot be written."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM has stopped a training run."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"interrupted by signal {signal}")
        self.exit_code = 128 + signal


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.5) -> str:
    """Return `" Did you mean 'x'?"` for the closest choice, or `""` if none is as close as `cutoff` (1: equal)."""
    near = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=cutoff)
    return f" Did you mean '{near[0]}'?" if near else ""
