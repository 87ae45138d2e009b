"""The choice of cases for tests marked `covering`; the others run only on request."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch

CASES = [dict(zip("abc", values, strict=True)) for values in itertools.product("xyz", "pq", "12")]


@pytest.fixture
def choice(pytestconfig: pytest.Config) -> ModuleType:
    own = str(Path(__file__).with_name("conftest.py"))
    return next(p for p in pytestconfig.pluginmanager.get_plugins() if getattr(p, "__file__", None) == own)


@pytest.mark.parametrize(("strength", "count"), [(1, 3), (2, 6), (3, 12), (4, 12)])
def test_every_combination_of_values_is_in_a_case(choice: ModuleType, strength: int, count: int) -> None:
    kept = choice.cover(CASES, strength)
    assert len(kept) == count
    for names in itertools.combinations("abc", min(strength, 3)):
        wanted, found = ({tuple(CASES[i][n] for n in names) for i in places} for places in (range(len(CASES)), kept))
        assert found == wanted


def test_values_take_turns(choice: ModuleType) -> None:
    kept = [CASES[i] for i in sorted(choice.cover(CASES, 1))]
    assert [case["b"] for case in kept].count("p") in (1, 2) and [case["c"] for case in kept].count("1") in (1, 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("first", "xyz")
@pytest.mark.parametrize("second", "pq")
def test_only_the_cover_runs_unless_the_rest_is_asked_for(
    request: pytest.FixtureRequest, first: str, second: str
) -> None:
    own = request.node.originalname
    ran = [item for item in request.session.items if getattr(item, "originalname", None) == own]
    assert len(ran) <= 3 or torch.cuda.is_available() or "slow" in request.config.option.markexpr


def test_the_files_that_start_first_exist(choice: ModuleType) -> None:
    """They moved once, and long files started last: one process was busy for longer than the other."""
    assert [name for name in choice.SLOW_FIRST if not any(Path(__file__).parent.glob(f"{name}*"))] == []
