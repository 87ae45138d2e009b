"""Every table by its name. Figures come from `benchmarks/results/latest`, facts from the code.

A module beside this one lists its own under `TABLES`: `accuracy`, `speed`, `memory` and `distributed` show a kind of
result, `scaling` and `choice` are made of several kinds, `telemetry` of several machines, `facts` of the code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from octavo.errors import ConfigError, did_you_mean
from octavo_bench import results
from octavo_bench.results import Result
from octavo_bench.tables import accuracy, distributed, facts, memory, scaling, speed
from octavo_bench.tables.choice import choice

NOT_MEASURED = "*Not measured yet.*"

MEASURED: dict[str, tuple[str, Callable[[Result], str]]] = {
    **accuracy.TABLES,
    **speed.TABLES,
    **memory.TABLES,
    **distributed.TABLES,
}
"""Tables of measurements: the kind whose newest result they show, and what shows it."""

COMBINED: dict[str, Callable[[Path], str]] = {"choice": choice, **speed.COMBINED, **scaling.TABLES}
"""Tables made of several results, from their directory."""


def render(name: str, directory: Path) -> str:
    """Return the table called `name`; measured ones come from the results under `directory`.

    Raises:
        ConfigError: there is no such table, or a result file is invalid.
    """
    if name in facts.TABLES:
        return facts.TABLES[name]()
    if name in COMBINED:
        return COMBINED[name](directory) or NOT_MEASURED
    if name not in MEASURED:
        known = (*MEASURED, *COMBINED, *facts.TABLES)
        raise ConfigError(f"unknown table '{name}'.{did_you_mean(name, known)} Tables: {', '.join(known)}.")
    kind, show = MEASURED[name]
    result = results.latest(kind, directory)
    if result is None:
        return NOT_MEASURED
    return f"{show(result)}\n\n{result.origin}"
