"""What a run's gap is compared with: a control, and the study of its recipe.

A control is by how much two BF16 runs of a preset differ, a study the gap that many pairs of longer runs found.

`presets/control.json` has, per preset, the held-out gaps of such pairs in percent, one per seed. Both runs of a pair
take the same batches and are equal up to the step from which the FP8 model of the preset computes in FP8; there the
weights of one are changed by rounding. `octavo bench control` measures them. `presets/studies.json` has, per recipe,
the study that README quotes, which `octavo bench tables` writes.
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


def study_of(config: RunConfig) -> Mapping[str, Any]:
    """Return what many pairs found for a run's recipe, as `gap_study`; empty without a study of it."""
    run = config.run
    recipe = f"{run.recipe}+run.last_share={run.last_share:g}" if run.last_share else run.recipe
    is_studied = run.last_recipe == type(run)().last_recipe or not run.last_share
    study = studies().get(recipe) if is_studied else None
    return {"gap_study": study} if study else {}


def studies() -> Mapping[str, Mapping[str, Any]]:
    """Return by recipe: mean gap and half width of its 95 % interval in percent, pairs, parameters, tokens."""
    found: dict[str, Mapping[str, Any]] = _read("studies.json")
    return found


def controls() -> Mapping[str, Sequence[float]]:
    """Return the gaps of the pairs of each preset that has a control, percent."""
    found: dict[str, list[float]] = _read("control.json")
    return found


def _read(name: str) -> Any:
    path = resources.files("octavo.lab.train") / "presets" / name
    return json.loads(path.read_text(encoding="utf-8"))


def interval(gaps: Sequence[float]) -> float:
    """Return the half width of the 95 % prediction interval of one more gap: by symmetry the mean of `gaps` is 0."""
    return student(len(gaps)) * math.sqrt(sum(gap * gap for gap in gaps) / len(gaps))


def _is_like(config: RunConfig, preset: RunConfig) -> bool:
    """Return whether two BF16 runs of `config` differ as those of `preset`."""
    parts = (config.model, config.optimizer, config.data.source, config.data.sequence, config.data.tokenizer)
    own = (preset.model, preset.optimizer, preset.data.source, preset.data.sequence, preset.data.tokenizer)
    return parts == own and all(getattr(config.run, key) == getattr(preset.run, key) for key in OWN)
