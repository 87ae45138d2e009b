"""Energy of a run, from readings that its store has. Needs no PyTorch: the dashboard reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

JOULES_PER_KWH = 3.6e6


def energy_kwh(rows: Sequence[Mapping[str, float]]) -> float | None:
    """Return the energy of a run from its system readings, all sessions: the counter restarts with each. None without.

    It is that of one GPU: the one that the rows are of.
    """
    joules = [row["gpu_energy_joules"] for row in rows if "gpu_energy_joules" in row]
    if not joules:
        return None
    return sum(one for one, after in zip(joules, [*joules[1:], 0.0], strict=True) if after < one) / JOULES_PER_KWH
