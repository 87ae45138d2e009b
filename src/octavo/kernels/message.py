"""How a piece of a gradient lies on the wire.

A message holds `length` values that lie one after another: their E4M3 codes, then one E8M0 scale for each 128 of them
(the last for what is left), then scales of empty groups up to a multiple of 16 bytes:

    [ code 0 ... code length - 1 | scale 0 ... scale ceil(length / 128) - 1 | filling ]

Codes and scales are those of `numerics.quantize` with the granularity 1x128 and power-of-two scales.
"""

from __future__ import annotations

GROUP = 128
"""Values that share a scale."""
ALIGNMENT = 16
"""Bytes of which a message has a multiple: what a copy moves at once."""


def message_bytes(length: int) -> int:
    """Return the bytes of a message of so many values."""
    size = length + (length + GROUP - 1) // GROUP
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
