"""Several runs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from octavo.monitor.store.reader import RunReader
from octavo.monitor.store.sampling import Series


class Difference(NamedTuple):
    """A key of the configuration in which runs differ."""

    key: str
    """With dots, as in `run.recipe`."""
    values: tuple[Any, ...]
    """One a run; None where it has no such key."""


def config_difference(runs: Sequence[RunReader]) -> list[Difference]:
    """Return the keys in which the configurations differ, in the order of the first run's."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    found = [Difference(key, tuple(config.get(key) for config in flat)) for key in keys]
    return [difference for difference in found if any(value != difference.values[0] for value in difference.values)]


def side_by_side(runs: Sequence[RunReader], key: str, *, points: int | None = None) -> list[Series]:
    """Return one scalar of each run; empty where a run has none of this name."""
    return [run.scalar(key, points=points) for run in runs]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
