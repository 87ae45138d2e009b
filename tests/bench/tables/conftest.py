"""What tests of tables have in common: a result of some rows."""

from collections.abc import Callable
from typing import Any

import pytest

from octavo_bench.readme import MACHINE
from octavo_bench.results import Result


@pytest.fixture
def result() -> Callable[..., Result]:
    """Return what makes a result of a kind from rows."""

    def make(kind: str, *rows: dict[str, Any]) -> Result:
        versions = {"torch": "2.11.0"}
        return Result(kind=kind, date="2026-11-21", hardware=MACHINE, versions=versions, command="octavo x", rows=rows)

    return make
