"""The control of a preset: by how much two BF16 runs of it differ, which is what its gap is compared with.

`presets/control.json` has, per preset, the held-out gaps of such pairs in percent, one per seed. Both runs of a pair
take the same batches and are equal up to the step from which the FP8 model of the preset computes in FP8; there the
weights of one are changed by rounding. `octavo bench control` measures them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from octavo.lab.train.config import RunConfig, assemble, load_preset
from octavo.lab.train.evaluate import student

OWN = ("batch", "steps", "accumulate", "bf16_first_steps", "start_from", "eval_tokens")
"""Settings of the loop that a control depends on, besides model, text and optimizer."""


def control_of(config: RunConfig) -> Mapping[str, Any]:
    """Return the noise of a run's gap by the control of the preset that it follows; empty if it follows none.

    Recipe, seed and device may be others than the preset's: a control has no FP8.

    Returns:
        `gap_control_percent`, the half width of the 95 % interval, and `gap_control_pairs`.
    """
    for preset, gaps in controls().items():
        if _is_like(config, assemble(load_preset(preset, cuda=False))):
            return {"gap_control_percent": interval(gaps), "gap_control_pairs": len(gaps)}
    return {}


def controls() -> Mapping[str, Sequence[float]]:
    """Return the gaps of the pairs of each preset that has a control, percent."""
    path = resources.files("octavo.lab.train") / "presets" / "control.json"
    found: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def interval(gaps: Sequence[float]) -> float:
    """Return the half width of the 95 % prediction interval of one more gap: by symmetry the mean of `gaps` is 0."""
    return student(len(gaps)) * math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))


def _is_like(config: RunConfig, preset: RunConfig) -> bool:
    """Return whether two BF16 runs of `config` differ as those of `preset`."""
    parts = (config.model, config.optimizer, config.data.source, config.data.sequence, config.data.tokenizer)
    own = (preset.model, preset.optimizer, preset.data.source, preset.data.sequence, preset.data.tokenizer)
    return parts == own and all(getattr(config.run, key) == getattr(preset.run, key) for key in OWN)
