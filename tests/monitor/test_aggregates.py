from __future__ import annotations

import numpy as np

from octavo.monitor.aggregates import AGGREGATES, aggregates
from octavo.monitor.store import STATS


def test_aggregates_of_a_snapshot() -> None:
    values = np.zeros((3, len(STATS)), dtype=np.float32)
    values[:, STATS.index("amax")] = [1.0, 4.0, np.nan]
    values[:, STATS.index("scale")] = [0.25, 8.0, np.nan]
    values[:, STATS.index("flushed")] = [0.5, 0.125, np.nan]
    values[:, STATS.index("nonfinite")] = [0.0, 1e-3, np.nan]
    values[:, STATS.index("sqnr")] = [31.0, 24.0, np.nan]
    found = aggregates(values, STATS)
    assert found == {
        "fp8/flushed_max": 0.5,
        "fp8/subnormal_max": 0.0,
        "fp8/saturated_max": 0.0,
        "fp8/nonfinite_tensors": 1.0,
        "fp8/amax_max": 4.0,
        "fp8/scale_log2_min": -2.0,
        "fp8/scale_log2_max": 3.0,
        "fp8/kurtosis_max": 0.0,
        "fp8/sqnr_min": 24.0,
        "fp8/tensors": 2.0,
    }
    assert list(found) == list(AGGREGATES) and len(found) <= 12


def test_what_was_not_measured_is_left_out() -> None:
    nothing = np.full((2, len(STATS)), np.nan, dtype=np.float32)
    assert aggregates(nothing, STATS) == {"fp8/nonfinite_tensors": 0.0, "fp8/tensors": 0.0}
    assert aggregates(nothing[:0], STATS) == {"fp8/nonfinite_tensors": 0.0, "fp8/tensors": 0.0}
