"""Which elements of a weight are not what steps of an optimizer could have made of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Damage(NamedTuple):
    """The elements of a weight that changed too much."""

    elements: int
    rows: int
    """Rows that they lie in."""
    row: int
    """Of the first of them."""
    column: int

    def __str__(self) -> str:
        if self.elements == 1:
            return f"one element, row {self.row}, column {self.column}, as a flipped bit leaves it"
        if self.rows == 1:
            return f"{self.elements} elements of row {self.row}"
        return f"{self.elements} elements of {self.rows} rows, the first in row {self.row}"


def damage(before: Tensor, now: Tensor, reach: float) -> Damage | None:
    """Return what changed in a weight (N, K, ...) by more than `reach`, or became not finite; None for nothing.

    Args:
        before: the weight in a snapshot.
        now: the weight as it is, on any device.
        reach: how far the steps since then can have moved an element.
    """
    old = before.detach().float().flatten(1)
    new = now.detach().float().flatten(1).to(old.device)
    places = torch.nonzero(~((new - old).abs() <= reach))
    if not len(places):
        return None
    row, column = (int(i) for i in places[0])
    return Damage(len(places), len(places[:, 0].unique()), row, column)
