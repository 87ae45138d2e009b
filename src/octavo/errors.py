"""Every error a user can meet. Each says what is wrong, where, what was meant and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OctavoError(Exception):
    """Base of all errors raised by Octavo. The command line prints it as one line and exits with 1."""


class ConfigError(OctavoError, ValueError):
    """A recipe, a run file or an argument that cannot be understood."""


class DataError(OctavoError):
    """A corpus that is missing, empty or too short."""


class CheckpointError(OctavoError):
    """A checkpoint that is truncated, missing, of another model, or that could not be written."""


class NonFiniteError(OctavoError):
    """A NaN or an infinity where training cannot go on."""


class UnsupportedError(OctavoError):
    """An operation that no kernel of this machine can run."""


class RunError(OctavoError):
    """A training run that had to stop."""


class StoreError(OctavoError):
    """A run store that is missing, of another program, of a newer version, or that cannot be written."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest choice, or `""` where none is near."""
    near = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.5)
    return f" Did you mean '{near[0]}'?" if near else ""
