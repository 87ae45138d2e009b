"""The table of memory: speeds beside the first case's, if steps were timed in the run that measured the peak."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo_bench import memory


def row(implementation: str, peak: float, **figures: Any) -> dict[str, Any]:
    shared = {"workload": "175b", "predicted_gib": peak, "parameters": 4_880_000_000}
    return {"implementation": implementation, "peak_gib": peak, **shared, **figures}


def test_memory_and_speed_of_one_run_stand_in_one_line() -> None:
    table = memory.by_workload([row("bf16", 80.0, ms=660.0), row("folded_fast", 48.0, ms=400.0)]).splitlines()
    assert table[0].endswith("| ms per step | times the first's speed |")
    assert table[3].startswith("| 175b | folded_fast | 4.88 B | 48.00 |") and "| 40% |" in table[3]
    assert table[3].endswith("| 400.0 | 1.65 |")


def test_untimed_sessions_have_no_columns_of_speed() -> None:
    assert "speed" not in memory.by_workload([row("bf16", 80.0), row("folded_fast", 48.0)])


def test_a_negative_number_of_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="--steps: -1 is negative"):
        memory.command(steps=-1)
