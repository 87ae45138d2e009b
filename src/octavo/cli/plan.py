"""`octavo plan`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from octavo.cli.config import configure
from octavo.cli.flags import with_flags_of
from octavo.errors import ConfigError
from octavo.train.config import RunConfig


@with_flags_of(RunConfig)
def plan(
    file: Path | None = None,
    /,
    *,
    preset: str | None = None,
    memory: Annotated[bool, Parameter(negative=())] = False,
    gpus: int = 1,
    fits: float | None = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
    settings: Mapping[str, Any],
) -> int:
    """Show which layers of a model would run in FP8, which not, and why; or what the run will take of a GPU's memory.

    No weights are made and no text is read, and no GPU is needed. Takes the settings of `octavo train`.

    Examples:

        octavo plan --preset demo
        octavo plan runs/demo/config.json --recipe tensorwise --json
        octavo plan --preset demo --memory
        octavo plan --preset parity-cuda --memory --gpus 8 --no-twin --fits 139

    Parameters
    ----------
    file
        Run file, .toml or .json; a run stores its own as config.json.
    preset
        demo (demo-cuda or demo-cpu, as the device is), tiny, or parity-cuda. Under FILE.
    memory
        Predict the peak of memory on a GPU instead, by what it is for.
    gpus
        With --memory: GPUs that FSDP2 shards the run over; the batch is that of one.
    fits
        With --memory: GiB of a GPU; find the largest model of these proportions that stays below.
    json_output
        Print the plan as JSON.
    """
    config = configure(file, preset, settings)
    if memory:
        return _memory(config, gpus, fits, json_output)
    if gpus != 1 or fits is not None:
        raise ConfigError("--gpus and --fits say something of memory: add --memory.")
    import torch

    from octavo import recipes
    from octavo.conversion import make_plan
    from octavo.models import build
    from octavo.train.device import resolve
    from octavo.train.setup import hold_as, policy_of

    recipe = recipes.load(config.run.recipe)
    device = resolve(config.run.device)
    with torch.device("meta"):
        model = build(config.model, config.run.seed)
    hold_as(config.run.weights, model)
    tokens = config.run.batch // config.run.accumulate * config.data.sequence
    policy = policy_of(config, recipe)
    planned = make_plan(model, recipe, policy=policy, tokens=tokens, device=device)
    if json_output:
        print(planned.to_json())
    else:
        print(f"{planned}\n\n{recipes.explain(recipe)}")
    return 0


def _memory(config: RunConfig, gpus: int, fits: float | None, json_output: bool) -> int:
    """Print the forecast; 1 if nothing of these proportions fits."""
    from octavo.train.memory import forecast_run, largest_model

    if gpus < 1 or (fits is not None and fits <= 0):
        raise ConfigError(f"--gpus {gpus} and --fits {fits} must be positive.")
    model, forecast = config.model, None
    if fits is None:
        forecast = forecast_run(config, gpus=gpus)
    elif (found := largest_model(config, fits, gpus=gpus)) is not None:
        model, forecast = found
    if forecast is None:
        print(f"no model of these proportions fits {fits} GiB", file=sys.stderr)
        return 1
    if json_output:
        print(json.dumps({"model": dataclasses.asdict(model), **forecast.to_dict()}, indent=1))
    else:
        shape = f"{model.layers} layers of {model.dim}, {forecast.parameters / 1e6:,.1f} M parameters in memory"
        print(f"{shape}\n\n{forecast}")
    return 0
