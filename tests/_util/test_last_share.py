from __future__ import annotations

import pytest

from octavo._util.last_share import in_last_share


@pytest.mark.parametrize(("share", "first"), [(0.0, 10), (0.04, 10), (0.2, 8), (0.25, 8), (0.5, 5), (1.0, 0)])
def test_the_last_share_is_a_whole_number_of_steps_at_the_end(share: float, first: int) -> None:
    assert [step for step in range(10) if in_last_share(step, 10, share)] == [*range(first, 10)]
