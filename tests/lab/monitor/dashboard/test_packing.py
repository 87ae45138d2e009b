"""Arrays come out of the bytes as they went in; JSON is what a browser reads."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.lab.monitor.dashboard.packing import pack, pack_curves
from octavo.lab.monitor.store.writer import to_json

ARRAYS = st.dictionaries(
    st.text(max_size=12),
    st.tuples(st.sampled_from(["<f4", "<f8", "<i4", "<i8"]), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
    max_size=5,
)


@given(shapes=ARRAYS, note=st.text(max_size=9))
def test_what_is_packed_comes_out(unpack: Any, shapes: dict[str, tuple[str, list[int]]], note: str) -> None:
    random = np.random.default_rng(0)
    arrays = {name: (100 * random.standard_normal(shape)).astype(kind) for name, (kind, shape) in shapes.items()}
    header, found = unpack(pack(arrays, {"note": note}))
    assert header == {"note": note}
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def test_a_curve_is_two_arrays(unpack: Any) -> None:
    header, found = unpack(pack_curves({"loss": (np.arange(3), np.array([5.0, np.nan, 4.0]))}, {"facts": {}}))
    assert header == {"facts": {}} and found["loss/x"].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(found["loss/y"], [5.0, np.nan, 4.0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_json_cannot_say_is_null(value: float) -> None:
    packed = to_json({"a": [1.5, value, (value,)], "b": {"c": value}})
    assert json.loads(packed) == {"a": [1.5, None, [None]], "b": {"c": None}}
    assert "NaN" not in packed and "Inf" not in packed
