"""Wire format of a gradient chunk.

A message holds `length` consecutive values: their E4M3 codes, then one E8M0 scale per 128 values (the last group may be
shorter), then scales of empty groups as padding to a multiple of 16 bytes:

    [ code 0 ... code length - 1 | scale 0 ... scale ceil(length / 128) - 1 | padding ]

Codes and scales are those of `numerics.quantize` with the granularity 1x128 and power-of-two scales.
"""

from __future__ import annotations

GROUP = 128
"""Values per scale."""
ALIGNMENT = 16
"""Alignment of the message size in bytes: the width of a vectorised copy."""


def message_bytes(length: int) -> int:
    """Return the size in bytes of a message of `length` values."""
    size = length + (length + GROUP - 1) // GROUP
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
