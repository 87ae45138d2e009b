"""The last share of a run's steps, which may have a recipe of its own: FP8 first, BF16 to the end.

Without torch: the settings of a run need it before torch is imported.
"""

from __future__ import annotations


def in_last_share(step: int, steps: int, share: float) -> bool:
    """Return True if `step`, counted from 0, is in the last share of the steps; `share` is between 0 and 1."""
    return step >= steps - round(share * steps)
