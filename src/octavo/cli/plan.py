"""`octavo plan`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from octavo.cli.config import configure
from octavo.cli.flags import with_flags_of
from octavo.train.config import RunConfig


@with_flags_of(RunConfig)
def plan(
    file: Path | None = None,
    /,
    *,
    preset: str | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
    settings: Mapping[str, Any],
) -> int:
    """Show which layers of a model would run in FP8, which not, and why.

    No weights are made and no text is read. Takes the settings of `octavo train`.

    Examples:

        octavo plan --preset demo
        octavo plan runs/demo/config.json --recipe tensorwise --json

    Parameters
    ----------
    file
        Run file, .toml or .json; a run stores its own as config.json.
    preset
        demo (demo-cuda or demo-cpu, as the device is), tiny, or parity-cuda. Under FILE.
    json_output
        Print the plan as JSON.
    """
    config = configure(file, preset, settings)
    import torch

    from octavo import recipes
    from octavo.conversion import Policy, make_plan
    from octavo.models import build
    from octavo.train.device import resolve

    recipe = recipes.load(config.run.recipe)
    device = resolve(config.run.device)
    with torch.device("meta"):
        model = build(config.model, config.run.seed)
    tokens = config.run.batch // config.run.accumulate * config.data.sequence
    policy = Policy(min_gain=config.run.min_gain)
    planned = make_plan(model, recipe, policy=policy, tokens=tokens, device=device)
    if json_output:
        print(planned.to_json())
    else:
        print(f"{planned}\n\n{recipes.explain(recipe)}")
    return 0
