"""Compare what passed with the committed record, after tests with `RECORD=runs/checked/cpu.json`.

A row of docs/reference/capabilities.md works because a check of it is in a committed record. This fails if the record
of machines without a GPU has a check that did not pass this time, and names what passed and is not in it yet.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMITTED, NOW = ROOT / "tests/checked/cpu.json", ROOT / "runs/checked/cpu.json"


def passed(record: Path) -> set[str]:
    """Return the checks of a record."""
    return {*json.loads(record.read_text(encoding="utf-8"))["passed"]}


def main(committed: Path = COMMITTED, now: Path = NOW) -> int:
    """Print the differences and return 1 if a committed check did not pass."""
    if not now.is_file():
        print(f"{now}: nothing was recorded. Run the tests with RECORD={now}.", file=sys.stderr)
        return 1
    before, found = passed(committed), passed(now)
    for name in sorted(before - found):
        print(
            f"{name}: in {committed.name}, and did not pass: fix it, or change the row that names it", file=sys.stderr
        )
    for name in sorted(found - before):
        print(f"{name}: passed and is not in {committed.name} yet; `pytest --record cpu` adds it")
    return int(bool(before - found))


if __name__ == "__main__":
    sys.exit(main())
