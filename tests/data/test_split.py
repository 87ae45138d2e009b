from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.data.split import SPACE, check_fraction, digest, tail, threshold
from octavo.errors import ConfigError

FRACTIONS = st.floats(0.001, 0.999)


def test_the_digest_is_the_same_on_every_machine() -> None:
    assert digest(b"octavo") == 0xD275953A016AF1C1


def test_about_the_share_asked_for_is_held_out() -> None:
    digests = [digest(str(i).encode()) for i in range(20_000)]
    limit = threshold(digests, 0.02)
    assert limit is not None
    assert 340 <= sum(d < limit for d in digests) <= 460


@given(st.lists(st.integers(0, SPACE - 1), min_size=2, max_size=20), FRACTIONS)
def test_both_sides_get_a_document_wherever_contents_differ(digests: list[int], fraction: float) -> None:
    limit = threshold(digests, fraction)
    if len(set(digests)) == 1:
        assert limit is None
    else:
        assert limit is not None and min(digests) < limit <= max(digests)


@given(st.integers(2, 10_000), FRACTIONS)
def test_the_tail_leaves_a_token_on_each_side(length: int, fraction: float) -> None:
    assert 1 <= tail(length, fraction) <= length - 1


def test_the_tail_is_the_share_of_the_tokens() -> None:
    assert tail(1000, 0.02) == 980


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_outside_0_to_1_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="heldout"):
        check_fraction(fraction)
