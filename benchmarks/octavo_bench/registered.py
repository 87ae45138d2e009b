"""Results of the studies of the parity protocol that were registered before their first runs.

The protocol's page has what was predicted of them, between marks that show a change (`closed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo_bench import ladder
from octavo_bench.ladder import SIZES, under
from octavo_bench.render import table
from octavo_bench.results import Row

BESIDE = "rotated"
"""The recipe that parts of it are compared with, pair by pair."""
_SYLVESTER = f"{BESIDE}+fprop.*.hadamard=sylvester"
_ROWWISE = ("rowwise", *(f"rowwise+{gemm}.precision=bf16" for gemm in ("fprop", "dgrad", "wgrad")))
ARMS: Mapping[str, Mapping[tuple[str, str], Sequence[str]]] = {
    "control of the bench itself": {
        ("1m", "half"): ["folded+run.disabled=yes"],
        ("3m", "half"): ["folded+run.disabled=yes"],
    },
    "fast accumulation in dgrad": {("3m", "half"): ["rotated_fast"]},
    "block size": {("3m", "half"): [f"{BESIDE}+fprop.*.rotation={size}" for size in (64, 16)]},
    "Sylvester's matrices": {
        ("3m", "half"): [_SYLVESTER, f"{_SYLVESTER}+fprop.*.rotation=128"],
        ("1m", "half"): [f"{_SYLVESTER}+fprop.*.rotation=128"],
    },
    "power-of-two scales": {("3m", "half"): [f"{BESIDE}+fprop.*.scaling=power_of_two"]},
    "weights alone, inputs alone": {("3m", "half"): [f"{BESIDE}+emulate.only={role}" for role in ("weight", "input")]},
    "single GEMMs in BF16": {("1m", "half"): _ROWWISE},
    "tokenised text": {("3m-bpe", "half"): ["folded", BESIDE]},
    "fine-tuning, all weights and LoRA": {("3m", "tuned"): ["folded", BESIDE], ("3m", "lora"): ["folded", BESIDE]},
    "`130m`": {("130m", "half+short+short"): [BESIDE]},
}
"""Arms of each study with results, by size and condition."""


def results_table(directory: Path) -> str:
    """Return the results of the registered studies, a line per arm; empty without any.

    The last column is the mean paired difference to `BESIDE` in the blocks that have both, with its interval.
    """
    rows, body = ladder.read_rows(directory), []
    for study, sizes in ARMS.items():
        for (size, condition), arms in sizes.items():
            own = _of_study(rows, size, condition)
            found = {gap.arm: gap for gap in ladder.gaps(own)} if own else {}
            for gap in (found[arm] for arm in arms if arm in found):
                beside = None if gap.arm == BESIDE else ladder.difference(own, gap.arm, BESIDE)
                cells = (str(len(gap.differences)), ladder.interval(gap), gap.flagged_verdict, ladder.interval(beside))
                body.append((study, f"`{size}`", condition, f"`{gap.arm}`", *cells))
    header = ("study", "size", "condition", "arm", "pairs", "gap", "verdict", f"less `{BESIDE}`, same pairs")
    return table(header, body) if body else ""


def _of_study(rows: Sequence[Row], size: str, condition: str) -> list[Row]:
    training = under(condition, SIZES[size])
    key = (ladder.model_name_of(training), training.tokens, condition)
    return [row for row in rows if tuple(row[name] for name in ladder.STUDY) == key]
