"""`octavo calibrate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from octavo._util.terminal import progress, quantity, say
from octavo.lab.cli.flags import COMMON, JsonOutput, Output, Switch, check_recipes, configure, with_flags_of
from octavo.lab.train.config import RunConfig

FILE = "calibration.json"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CalibrationFlags:
    """How scales are calibrated."""

    batches: PositiveInt = 8
    """Number of batches, each as in one forward of training."""
    backward: bool = True
    """Calibrate gradients too."""
    choose: Literal["max", "percentile", "extreme"] = "max"
    """max: no observed value saturates. percentile: values above the percentile do. extreme: none is expected to in
    --horizon batches, by how the largest of each batch vary."""
    percentile: float = 99.99
    """With --choose percentile: percent of the nonzero elements that do not saturate."""
    horizon: float = 1000.0
    """With --choose extreme: for how many batches of the calibration's size a scale has to last."""
    margin: int = 1
    """Bits of headroom: scales are multiplied by 2 to this power."""
    only: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Pattern of layers or scales to calibrate or undo, such as 'layers.0.*' or '*.grad_output'; repeatable."""
    check: Switch = False
    """Exit with 1 if a scale is missing, flushes more than 1 % of its tensor, or saturates more than 0.1 %."""
    undo: Path | None = None
    """Undo the last change of this calibration file, and nothing else."""


HOW = CalibrationFlags()


@with_flags_of(RunConfig, COMMON, without=("run.out",))
def calibrate(
    run: Path | None = None,
    /,
    *,
    preset: str | None = None,
    output: Output = None,
    how: CalibrationFlags = HOW,
    json_output: JsonOutput = False,
    settings: Mapping[str, Any],
) -> int:
    """Calibrate scales from representative data, for the recipe 'static' or as the start of 'delayed'.

    Runs batches of the training text through the model in its own precision, prints the effect of each scale on its
    tensor, and writes the scales to a file. An existing file is updated and keeps its previous scales for --undo.

    Examples:

        octavo calibrate runs/demo
        octavo calibrate runs/demo --choose percentile --percentile 99.999
        octavo calibrate --preset tiny --only 'layers.0.*' -o s.json
        octavo train runs/demo --recipe static --scales s.json --out runs/static
        octavo calibrate --undo runs/demo/calibration.json

    Parameters
    ----------
    run
        Directory of a run, for the weights of its newest checkpoint; or a run file, for a newly initialised model.
    preset
        Preset of `octavo train`, newly initialised. RUN overrides it.
    output
        File to write or update; by default calibration.json, in the directory of the run if one is given.
    """
    if how.undo is not None:
        return _undo(how.undo, how.only, json_output)
    directory = run if run is not None and run.is_dir() else None
    own = {name: dict(section) for name, section in settings.items()}
    recipe = own.get("run", {}).pop("recipe", None)
    check_recipes(recipe)
    config = configure(run if directory is None else directory / "config.json", preset, own)
    from octavo.calibration import ScalePolicy
    from octavo.lab.train.calibrate import calibrate_run

    with progress() as report:
        found = calibrate_run(
            config,
            directory,
            recipe=recipe,
            batches=how.batches,
            layers=how.only,
            backward=how.backward,
            scale_policy=ScalePolicy(by=how.choose, percentile=how.percentile, horizon=how.horizon, margin=how.margin),
            report=report,
        )
    path = output or (directory or Path()) / FILE
    found.save(path)
    if json_output:
        say(json.dumps({"file": str(path), **json.loads(found.to_json())}, indent=1))
    else:
        say(f"{found}\n\nwritten to {path}, for the recipe '{found.origin.recipe}' ({found.origin.how})")
    return 1 if how.check and not found.fits else 0


def _undo(path: Path, only: Sequence[str], json_output: bool) -> int:
    from octavo.nn.calibration_file import undo

    undone = undo(path, only)
    rows = [
        {"name": name, "undone": before.scale, "scale": None if after is None else after.scale}
        for name, (before, after) in undone.items()
    ]
    if json_output:
        say(json.dumps({"file": str(path), "scales": rows}, indent=1))
        return 0
    width = max(len(name) for name in undone)
    for name, (before, after) in undone.items():
        now = "removed: no previous scale" if after is None else f"{after.scale:.4g}"
        say(f"{name:<{width}}  {before.scale:.4g} -> {now}")
    say(f"\n{quantity(len(undone), 'scale')} of {path} restored to the values before the last change")
    return 0
