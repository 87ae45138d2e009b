"""Closed studies: questions that are answered, and measured no more.

Their results stay. Their tables are text of the pages, between `<!-- closed: DIGEST NAME -->` and `<!-- end -->`:
`octavo bench tables` checks that nobody changed it. The code that measured them is in the history: a table names its
last commit, or a command of the version that measured it.
"""

from __future__ import annotations

import hashlib

from octavo.errors import ConfigError
from octavo_bench.results import Schema

_SEED = {"seed": int, "heldout_loss": float}
_TRAINED = {"model": str, "tokens": int}
STUDIES = (
    Schema(name="parity", keys={**_TRAINED, "recipe": str, **_SEED}, may_fail=False),
    Schema(
        name="data-parallel",
        keys={**_TRAINED, "recipe": str, "ranks": int, **_SEED},
        may_fail=False,
        session=("hardware", "model", "tokens", "seed"),
    ),
    Schema(name="tiers", keys={**_TRAINED, "states": str, **_SEED}, may_fail=False),
    Schema(name="ablation", keys={"states": str, **_SEED}),
    Schema(name="reduce", keys={"scheme": str, "ranks": int, "snr_db": float, "ms": float, "wire_bytes": int}),
    Schema(name="rank", keys={"workload": str, "implementation": str, "ranks": int, "ms": float}),
    Schema(name="conv", keys={"shape": str, "direction": str, "bf16_ms": float, "fp8_ms": float}),
    Schema(name="telemetry", keys={"workload": str, "overhead_percent": float}, may_fail=False),
    Schema(name="localize", keys={"workload": str, "predicted": list, "measured": list}, may_fail=False),
    Schema(name="pilot", keys={"model": str, "adopts": bool, "full": dict, "right": bool}),
    Schema(name="stress", keys={"case": str, "recipe": str, "nonfinite": int}),
    Schema(name="finetune", keys={"method": str, "task": str, "seed": int, "fp8": float, "bf16": float}),
)
"""parity          one preset by several recipes and seeds, until the studies in pairs
data-parallel   the same run on one GPU and sharded over several
tiers           one model with every tier of optimizer states
ablation        FP8-LM's ablation of optimizer precision (arXiv 2310.18313, table 6) on a small byte-level model
reduce          error, time and bytes of every reduction of gradients, against an FP64 mean
rank            one rank's part of a step, without the other ranks
conv            convolutions of cuDNN in FP8, in three directions, beside those in BF16
telemetry       cost of telemetry: alternating steps with and without it
localize        predictions of `octavo localize`, against single layers and random maps applied on other text
pilot           recommendations of `octavo pilot`, against a full measurement
stress          signal to noise of a linear layer's three GEMMs on hard inputs, by recipe
finetune        accuracy of a small model fine-tuned in FP8 and in BF16"""


def digest(text: str) -> str:
    """Return what identifies the text of a closed table: twelve hexadecimal digits of its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def check(name: str, text: str, kept: str, where: str) -> str:
    """Return the text of a closed table.

    Raises:
        ConfigError: it is not the text that its marker identifies.
    """
    if digest(text) != kept:
        raise ConfigError(
            f"{where}: the table '{name}' is closed and was changed: its digest is {digest(text)}, not {kept}. Restore"
            " it, or correct its marker, if only its words changed."
        )
    return text
