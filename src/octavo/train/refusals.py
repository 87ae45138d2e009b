"""What in a run file does not go together, said in one form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from octavo.errors import ConfigError


class Refusal(NamedTuple):
    """A key of a run file that cannot be right beside another one."""

    key: str
    value: object
    why: str
    instead: str
    """What to take, as the user writes it."""


def refuse(found: Iterable[Refusal], beside: str) -> None:
    """Refuse the first of what was found, if there is any.

    Args:
        beside: what it does not go with.

    Raises:
        ConfigError: the message names the key, its value and what to take instead.
    """
    for key, value, why, instead in found:
        raise ConfigError(f"{key}: '{value}' does not go with {beside}: {why}. Take {instead}.")
