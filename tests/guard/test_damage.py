"""Elements that no step can have moved."""

from __future__ import annotations

import torch

from octavo.guard.damage import damage


def test_what_a_step_can_do_is_none() -> None:
    before = torch.randn(8, 8)
    assert damage(before, before + 0.09, 0.1) is None


def test_a_flipped_bit_a_row_and_more() -> None:
    before = torch.randn(8, 8)
    now = before + 0.01
    now[3, 5] = 1e30
    assert str(damage(before, now, 0.1)) == "one element, row 3, column 5, as a flipped bit leaves it"
    now[3] = before[3] + 5
    assert str(damage(before, now, 0.1)) == "8 elements of row 3"
    now[6, 1] = torch.nan
    found = damage(before, now, 0.1)
    assert found is not None
    assert (found.elements, found.rows, found.row, found.column) == (9, 2, 3, 0)
    assert str(found) == "9 elements of 2 rows, the first in row 3"
