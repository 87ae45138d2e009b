"""Arrays as bytes with a JSON header of their offsets, for JavaScript's typed arrays to read in place.

    uint32 size of the header | header | padding to 8 bytes | array | padding | array ...

The header is an object; its key `arrays` maps a name to `[type, offset, shape]`, with the offset from the first byte
after the header's padding and the type `f4`, `f8` or `i4`. Everything is little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.lab.monitor.store.writer import to_json

ALIGNMENT = 8
_TYPES = {"f": {4: "f4", 8: "f8"}, "i": {4: "i4", 8: "i4"}, "u": {4: "i4"}}


Curve = tuple[NDArray[Any], NDArray[Any]]
"""A line to draw: steps and values, both (n,)."""


def pack_curves(curves: Mapping[str, Curve], about: Mapping[str, Any] | None = None) -> bytes:
    """Pack lines to draw: the arrays `NAME/x` and `NAME/y` of each."""
    pairs = (
        (f"{name}/{axis}", array) for name, curve in curves.items() for axis, array in zip("xy", curve, strict=True)
    )
    return pack(dict(pairs), about)


def pack(arrays: Mapping[str, NDArray[Any]], about: Mapping[str, Any] | None = None) -> bytes:
    """Pack arrays to bytes; 64-bit integers become 32-bit. `about` is added to the header."""
    places: dict[str, tuple[str, int, list[int]]] = {}
    body = bytearray()
    for name, array in arrays.items():
        kind = _TYPES[array.dtype.kind][array.dtype.itemsize]
        body += b"\0" * (-len(body) % ALIGNMENT)
        places[name] = (kind, len(body), list(array.shape))
        body += np.ascontiguousarray(array, dtype=f"<{kind}").tobytes()
    header = to_json({**(about or {}), "arrays": places}).encode()
    start = len(header).to_bytes(4, "little") + header
    return start + b"\0" * (-len(start) % ALIGNMENT) + bytes(body)
