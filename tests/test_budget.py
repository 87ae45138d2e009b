"""The line at the end of `make test`: how far the suite is from its time."""

from types import SimpleNamespace

import pytest

from budget import Budget


@pytest.mark.parametrize(("took", "told"), [(432.4, "7:12, 0:12 over the 7:00"), (361.0, "6:01, 0:59 under the 7:00")])
def test_it_says_how_far_and_which_files_take_most(took, told):
    budget = Budget(420)
    for name, seconds in (("a.py::one", 1.0), ("b.py::two[x::y]", 2.0), ("a.py::three", 3.5)):
        budget.pytest_runtest_logreport(SimpleNamespace(nodeid=name, duration=seconds))
    assert budget.told(took) == f"{told} on two idle cores; seconds by file: a.py 4, b.py 2"
