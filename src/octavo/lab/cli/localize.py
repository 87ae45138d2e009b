"""`octavo localize`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cyclopts.types import PositiveInt

from octavo._util.terminal import progress, say
from octavo.errors import ConfigError
from octavo.lab.cli.flags import JsonOutput, Output, check_recipes


def localize(
    run: Path,
    /,
    *,
    recipe: str = "",
    budget: str = "0.1%",
    output: Output = None,
    tokens: PositiveInt | None = None,
    times: Literal["auto", "measured", "predicted"] = "auto",
    device: str = "auto",
    json_output: JsonOutput = False,
) -> int:
    """Measure the cost and gain of FP8 per layer and GEMM of a run's model; find the precision map for a budget.

    Switches one GEMM at a time to FP8, on held-out text. The map is a recipe file.

    Examples:

        octavo localize runs/demo
        octavo localize runs/demo --budget 0.1% --recipe tensorwise -o map.toml
        octavo train runs/demo/config.json --recipe map.toml --out runs/mapped

    Parameters
    ----------
    run
        Directory of a run or of one of its checkpoints.
    recipe
        Recipe of the layers in FP8, a name or a recipe file; by default the run's.
    budget
        Loss increase allowed for the map: a share, such as 0.1%, or nats per token, such as 0.002.
    output
        File to write the map to, .toml.
    tokens
        Number of held-out tokens; by default 131072.
    times
        measured or predicted; auto measures on a GPU, and otherwise predicts for an H200.
    device
        cuda or cpu; auto uses the GPU if there is one.
    """
    if output is not None and output.suffix != ".toml":
        raise ConfigError(f"--output: {output}: a precision map must be a .toml file.")
    check_recipes(recipe)
    from octavo.lab.sensitivity.run import Settings, localize_run

    given = {} if tokens is None else {"tokens": tokens}
    measure = {"auto": None, "measured": True, "predicted": False}[times]
    settings = Settings(recipe=recipe, budget=budget, device=device, measure=measure, **given)
    with progress() as report:
        found = localize_run(run, settings, report)
    say(found.to_json() if json_output else found)
    if output is not None:
        say(f"written: {found.save(output)}", to_stderr=True)
    return 0
