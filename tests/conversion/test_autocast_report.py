"""The report of a block."""

import json
from collections import Counter

from octavo.conversion import AutocastReport


def example() -> AutocastReport:
    seen = AutocastReport()
    seen.calls = Counter({("linear", ""): 3, ("softmax", "softmax: why"): 2, ("bmm", "too small"): 4, ("bmm", ""): 1})
    seen.compiled = Counter({("bmm", ""): 2, ("mm", ""): 1})
    return seen


def test_counts():
    seen = example()
    assert (seen.fp8("linear"), seen.fp8("bmm"), seen.fp8("mm"), seen.fp8("softmax")) == (3, 3, 1, 0)
    assert seen.kept("bmm") == {"too small": 4}
    assert seen.kept("linear") == {}


def test_table():
    assert str(example()).splitlines() == [
        "operator  runs in   calls  compiled  why",
        "linear    fp8       3      0",
        "bmm       fp8       1      2",
        "mm        fp8       0      1",
        "bmm       as it is  4      0         too small",
        "softmax   as it is  2      0         softmax: why",
        "",
        "7 of 13 calls in FP8",
    ]


def test_json():
    rows = json.loads(example().to_json())
    assert rows[1] == {"operator": "bmm", "precision": "fp8", "calls": 1, "compiled": 2, "why": ""}
    assert len(rows) == 5


def test_nothing_seen():
    assert str(AutocastReport()).splitlines()[-1] == "0 of 0 calls in FP8"
    assert json.loads(AutocastReport().to_json()) == []
