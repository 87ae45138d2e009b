"""Which documents are held out. A hash of the content decides, so equal texts are always on the same side."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from octavo.errors import ConfigError

SPACE = 2**64


def check_fraction(fraction: float) -> None:
    """Raise ConfigError unless `fraction` lies between 0 and 1, both excluded."""
    if not 0 < fraction < 1:
        raise ConfigError(f"heldout: {fraction} is not a share between 0 and 1 (0.02 holds out 2 %).")


def digest(content: bytes) -> int:
    """Return a hash of `content` as an integer below 2^64, uniform and the same on every machine."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def threshold(digests: Sequence[int], fraction: float) -> int | None:
    """Return the limit under which a document's digest makes it held out.

    It is `fraction` of the hash space, moved just as far as is needed for one document on each side.
    None where all contents are equal (one document, say): then `tail` splits inside the document.
    """
    least, greatest = min(digests), max(digests)
    if least == greatest:
        return None
    return min(max(int(fraction * SPACE), least + 1), greatest)


def tail(length: int, fraction: float) -> int:
    """Return where the held-out tail of a lone document of `length` tokens begins, no part empty."""
    return min(max(round(length * (1 - fraction)), 1), length - 1)
