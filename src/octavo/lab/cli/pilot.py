"""`octavo pilot`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from octavo._util.terminal import console, say
from octavo.lab.cli.flags import JsonOutput, Switch, check_recipes


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BatchFlags:
    """The batches of a Hugging Face config; a Python file and a run file have their own."""

    batch: PositiveInt = 8
    """Sequences, or images, per batch."""
    sequence: PositiveInt = 1024
    """Tokens per sequence."""
    data: Path | None = None
    """Text, in place of random tokens; read by the tokenizer.json beside the config, else by bytes."""


def pilot(
    model: Path,
    /,
    *,
    batches: BatchFlags | None = None,
    recipes: Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())] = None,
    steps: NonNegativeInt = 20,
    compile: Switch = False,
    gpu: Literal["h100", "h200"] = "h200",
    html: Path | None = None,
    json_output: JsonOutput = False,
) -> int:
    """Try FP8 on your model: measure BF16, FP16, FP32 and recipes side by side, and recommend what to do.

    Trains a new model for a few steps in each precision, on the same batches from the same weights. On a GPU, measures
    time by phase, energy, memory, and decoding; on a CPU, losses and errors, and predicts the rest for a GPU.

    Examples:

        octavo pilot config.json --batch 8 --sequence 2048
        octavo pilot mine.py --recipes folded served --html pilot.html
        octavo pilot config.json --steps 0 --gpu h100

    Parameters
    ----------
    model
        Hugging Face config.json or its directory; a Python file with build() and batches(); or a run file.
    recipes
        Recipes to try; by default rotated, folded, tensorwise and block.
    steps
        Steps of each training; 0 predicts from shapes alone, on a CPU.
    compile
        Compile the model, on a GPU.
    gpu
        GPU to predict for on a CPU.
    html
        File to write a report with plots to.
    """
    check_recipes(*recipes or ())
    sizes = batches or BatchFlags()
    from octavo.lab.monitor.dashboard import page
    from octavo.lab.pilot import Settings, open_subject, run_pilot
    from octavo.lab.pilot.report import to_dict, to_html, to_text
    from octavo.lab.pilot.run import RECIPES
    from octavo.lab.train.subject import Shape

    if html is not None:
        page.plotly()  # a package that is missing is named before minutes of measuring, not after
    shape = Shape(sizes.batch, sizes.sequence, sizes.data)
    subject = open_subject(model, shape=shape)
    settings = Settings(recipes=tuple(recipes or RECIPES), steps=steps, compile=compile, gpu=gpu)
    with console(stderr=True).status("reading the model") as status:
        found = run_pilot(subject, settings, status.update)
    say(json.dumps(to_dict(found), indent=1) if json_output else to_text(found))
    if html is not None:
        say(f"written: {to_html(found, html)}", to_stderr=True)
    return 0
