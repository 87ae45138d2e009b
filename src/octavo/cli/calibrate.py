"""`octavo calibrate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from octavo.cli.config import configure
from octavo.cli.flags import with_flags_of
from octavo.errors import ConfigError
from octavo.train.config import RunConfig

FILE = "calibration.json"


@with_flags_of(RunConfig)
def calibrate(
    run: Path | None = None,
    /,
    *,
    preset: str | None = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    batches: int = 8,
    backward: bool = True,
    choose: Literal["max", "percentile"] = "max",
    percentile: float = 99.99,
    margin: int = 1,
    only: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    check: Annotated[bool, Parameter(negative=())] = False,
    undo: Path | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
    settings: Mapping[str, Any],
) -> int:
    """Find the scales of a model's layers from representative data, for the recipe 'static' or to start 'delayed' from.

    Runs batches of the training text through the model in its own precision, prints what each scale does to its
    tensor, and writes the scales to a file. A file that is there is updated, and remembers what it held.

    Examples:

        octavo calibrate runs/demo
        octavo calibrate runs/demo --batches 32 --choose percentile --percentile 99.999
        octavo calibrate --preset tiny --only 'layers.0.*' -o scales.json
        octavo train runs/demo/config.json --recipe static --scales runs/demo/calibration.json --out runs/static
        octavo calibrate --undo runs/demo/calibration.json

    Parameters
    ----------
    run
        Directory of a run, whose newest checkpoint has the weights; or a run file, whose model is made anew.
    preset
        demo (demo-cuda or demo-cpu, as the device is), tiny, or parity-cuda, made anew. Under RUN.
    output
        File to write or update; by default calibration.json, in the directory of the run where one is given.
    batches
        Batches to run, each as one forward of training sees it; by default 8.
    backward
        Calibrate gradients too, as by default.
    choose
        max, the default: nothing that was seen saturates. percentile: what is above the percentile does.
    percentile
        With --choose percentile: so many percent of the elements that are not zero do not saturate; by default 99.99.
    margin
        Bits of headroom above what was chosen, by default 1: scales are multiplied by 2 to this power.
    only
        Pattern of layers or scales to calibrate or to undo, as 'layers.0.*' or '*.grad_output'; may be given again.
    check
        Exit with 1 if a scale is missing, flushes more than 1 % of its tensor, or saturates more than 0.1 %.
    undo
        Take the last change of this calibration file back, and do nothing else.
    json_output
        Print the scales, statistics and where they come from as JSON.
    """
    if undo is not None:
        return _undo(undo, only, json_output)
    if batches < 1:
        raise ConfigError(f"--batches {batches}: run 1 at least.")
    directory = run if run is not None and run.is_dir() else None
    own = {name: dict(section) for name, section in settings.items()}
    recipe = own.get("run", {}).pop("recipe", None)
    config = configure(run if directory is None else directory / "config.json", preset, own)

    from octavo.calibration import ScalePolicy
    from octavo.train.calibrate import calibrate_run

    found = calibrate_run(
        config,
        directory,
        recipe=recipe,
        batches=batches,
        layers=only,
        backward=backward,
        scale_policy=ScalePolicy(by=choose, percentile=percentile, margin=margin),
        watch=partial(_with_progress, total=batches),
    )
    path = output or (directory or Path()) / FILE
    found.save(path)
    if json_output:
        print(json.dumps({"file": str(path), **json.loads(found.to_json())}, indent=1))
    else:
        print(f"{found}\n\nwritten to {path}, for the recipe '{found.origin.recipe}' ({found.origin.how})")
    return 1 if check and not found.fits else 0


def _with_progress(batches: Iterable[Any], total: int) -> Iterable[Any]:
    """Show on a terminal how many batches were run."""
    from rich.console import Console
    from rich.progress import track

    if not sys.stderr.isatty():
        return batches
    return track(batches, "calibrating", total=total, console=Console(stderr=True), transient=True)


def _undo(path: Path, only: Sequence[str], json_output: bool) -> int:
    from octavo.nn.calibration import undo

    undone = undo(path, only)
    rows = [
        {"name": name, "undone": before.scale, "scale": None if after is None else after.scale}
        for name, (before, after) in undone.items()
    ]
    if json_output:
        print(json.dumps({"file": str(path), "scales": rows}, indent=1))
        return 0
    width = max(len(name) for name in undone)
    for name, (before, after) in undone.items():
        now = "removed: there was none before" if after is None else f"{after.scale:.4g}"
        print(f"{name:<{width}}  {before.scale:.4g} -> {now}")
    print(f"\n{len(undone)} scales of {path} are what they were before its last change")
    return 0
