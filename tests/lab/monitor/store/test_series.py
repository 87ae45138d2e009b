from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.lab.monitor.store.series import Series, starts


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(1, 80))
def test_buckets_are_about_alike(weights: list[int], buckets: int) -> None:
    found = starts(np.array(weights, dtype=np.float64), buckets)
    assert found[0] == 0 and (np.diff(found) > 0).all() and len(found) <= buckets
    sums = np.add.reduceat(weights, found)
    assert sums.max() < sum(weights) / buckets + 2 * max(weights)


@given(st.lists(st.floats(width=32), min_size=1, max_size=80), st.integers(1, 100))
def test_the_extremes_survive(values: list[float], points: int) -> None:
    steps = np.arange(len(values))
    numbers = np.array(values)
    series = Series(steps, steps, numbers, numbers).drawn(points)
    _, drawn = series.points()
    assert len(drawn) <= max(points, 2)
    if not np.isnan(values).all():
        assert (np.nanmin(drawn), np.nanmax(drawn)) == (np.nanmin(values), np.nanmax(values))
