"""What a block under `octavo.autocast` met: which operators ran in FP8, which did not, and why."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class AutocastReport:
    """Calls of the listed operators. `print` shows them as a table.

    Backward is not counted here: every product that ran in FP8 has its gradients by the recipe. `octavo.kernels.record`
    counts the GEMMs themselves.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(operator, why it stayed as it is; empty for FP8) -> calls."""
    compiled: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The same for calls in code that was compiled inside the block: counted once, when it is compiled."""

    def fp8(self, operator: str) -> int:
        """Return how many calls of an operator ran in FP8; those in compiled code count once."""
        return self.calls[operator, ""] + self.compiled[operator, ""]

    def kept(self, operator: str) -> dict[str, int]:
        """Return the reasons for which an operator stayed as it is, and how often."""
        found = self.calls + self.compiled
        return {why: count for (name, why), count in found.items() if name == operator and why}

    def rows(self) -> list[tuple[str, str, int, int, str]]:
        """Return (operator, fp8 or as it is, calls, those in compiled code, why), the most frequent first."""
        keys = sorted(self.calls | self.compiled, key=lambda key: (bool(key[1]), -self.calls[key], key))
        return [(key[0], "as it is" if key[1] else "fp8", self.calls[key], self.compiled[key], key[1]) for key in keys]

    def to_json(self) -> str:
        """Return the rows as JSON."""
        names = ("operator", "precision", "calls", "compiled", "why")
        return json.dumps([dict(zip(names, row, strict=True)) for row in self.rows()], indent=1)

    def __str__(self) -> str:
        rows = [("operator", "runs in", "calls", "compiled", "why"), *(tuple(map(str, row)) for row in self.rows())]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
        ]
        total, every = (sum(row[2] + row[3] for row in self.rows() if kept or not row[4]) for kept in (False, True))
        return "\n".join([*(line.rstrip() for line in lines), "", f"{total} of {every} calls in FP8"])
