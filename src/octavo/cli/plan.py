"""`octavo plan` and `octavo recipes`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts.types import PositiveInt

from octavo._util.terminal import console, progress, quantity, say
from octavo.cli.flags import COMMON, JsonOutput, Switch, configure, with_flags_of
from octavo.errors import ConfigError
from octavo.train.config import RunConfig

if TYPE_CHECKING:
    from octavo.conversion import Plan
    from octavo.recipes import Recipe


@with_flags_of(RunConfig, COMMON)
def plan(
    file: Path | None = None,
    /,
    *,
    preset: str | None = None,
    gpu: Literal["a100", "l40s", "h100", "h200", "b200", "rtx5090", "mi300x", "mi355x", "max1550"] | None = None,
    memory: Switch = False,
    gpus: PositiveInt = 1,
    fits: float | None = None,
    json_output: JsonOutput = False,
    settings: Mapping[str, Any],
) -> int:
    """Show the precision planned for each layer of a model, with the reason; or predict a run's GPU memory.

    Creates no weights, reads no text and needs no GPU. Takes the settings of `octavo train`. --help-all
    lists all of them.

    Examples:

        octavo plan --preset demo
        octavo plan --preset parity-cuda --gpu h100
        octavo plan runs/demo --recipe tensorwise --json
        octavo plan --preset demo --memory
        octavo plan --preset parity-cuda --memory --gpus 8 --no-twin --fits 139

    Parameters
    ----------
    file
        Run file, .toml or .json, or the directory of a run.
    preset
        Preset of `octavo train`. FILE overrides it.
    gpu
        Plan for this GPU, which need not be here, with the predicted gain of each layer where its rates are known.
    memory
        Predict the peak GPU memory instead, by kind.
    gpus
        With --memory: number of GPUs for FSDP2; the batch is per GPU.
    fits
        With --memory: GiB of a GPU; find the largest model of these proportions that fits.
    """
    config = configure(file, preset, settings)
    if memory:
        return _memory(config, gpus, fits, json_output)
    if gpus > 1 or fits is not None:
        raise ConfigError("--gpus and --fits need --memory.")
    from octavo import recipes

    recipe = recipes.load(config.run.recipe)
    planned = _plan(config, recipe, gpu)
    if json_output:
        say(planned.to_json())
    else:
        _show(planned)
        say(f"\n{recipes.explain(recipe)}")
        if config.run.last_share and recipe.is_fp8:
            recipes.load(config.run.last_recipe, "run.last_recipe")
            say(f"\nThe last {100 * config.run.last_share:g} % of the steps: by recipe '{config.run.last_recipe}'.")
    return 0


def _plan(config: RunConfig, recipe: Recipe, gpu: str | None) -> Plan:
    """Return the plan of a run's model, on this GPU or where the run would be, computed as the run computes it."""
    import torch

    from octavo.conversion import make_plan
    from octavo.models import build
    from octavo.train.device import resolve
    from octavo.train.setup import cast_weights, policy_of

    here = resolve(config.run.device)
    with torch.device("meta"):
        model = build(config.model, config.run.seed)
    cast_weights(config.run.weights, model)
    policy, tokens = policy_of(config, recipe), config.tokens_per_pass()
    kind = "cuda" if gpu else here.type
    before = torch.is_autocast_enabled(kind)
    torch.set_autocast_enabled(kind, True)  # as a run computes; torch.autocast refuses a GPU that is not here
    try:
        return make_plan(model, recipe, policy=policy, tokens=tokens, device=gpu or here)
    finally:
        torch.set_autocast_enabled(kind, before)


def _show(planned: Plan) -> None:
    """Print a plan: coloured and fitted to the width in a terminal, plain in a pipe."""
    from rich.table import Table

    from octavo.conversion.plan_text import footer, table_rows

    screen = console()
    if not screen.is_terminal:
        say(str(planned))
        return
    titles, *rows = table_rows(planned)
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", ratio=1 if title == "why" else None)
    for row in rows:
        table.add_row(*row, style="green" if "bf16" not in row[3] else "yellow" if row[3] != "bf16" else "dim")
    screen.print(table, "", *footer(planned), sep="\n", markup=False)


def _memory(config: RunConfig, gpus: int, fits: float | None, json_output: bool) -> int:
    """Print the forecast; return 1 if no model of these proportions fits."""
    from octavo.train.memory import forecast_run, largest_model

    if fits is not None and not 0 < fits < math.inf:
        raise ConfigError(f"--fits {fits}: must be a positive number of GiB.")
    model, forecast = config.model, None
    with progress() as report:
        if fits is None:
            forecast = forecast_run(config, gpus=gpus, report=report)
        elif (found := largest_model(config, fits, gpus=gpus, report=report)) is not None:
            model, forecast = found
    if forecast is None:
        say(f"no model of these proportions fits {fits} GiB", to_stderr=True)
        return 1
    if json_output:
        say(json.dumps({"model": asdict(model), **forecast.to_dict()}, indent=1))
    else:
        layers = quantity(model.layers, "layer")
        say(f"{layers} of {model.dim}, {forecast.parameters / 1e6:,.1f} M parameters in memory\n\n{forecast}")
    return 0


def recipes(name: str | None = None, /, *, json_output: JsonOutput = False) -> int:
    """List the FP8 recipes, one line each, or explain one.

    Examples:

        octavo recipes
        octavo recipes folded
        octavo recipes my-recipe.toml --json

    Parameters
    ----------
    name
        A recipe's name, or the path of a recipe file.
    """
    from octavo import recipes as known
    from octavo._util import config_reader

    if name is not None:
        recipe = known.load(name)
        say(json.dumps(config_reader.to_dict(recipe), indent=2) if json_output else known.explain(recipe))
    elif json_output:
        say(json.dumps(known.names()))
    else:
        width = max(map(len, known.names()))
        for each in known.names():
            say(f"{each:<{width}}  {known.about(each)}")
        say(f"\nAliases: {', '.join(f'{alias} = {name}' for alias, name in known.ALIASES.items())}.")
        say("`octavo recipes NAME` explains one: formats, scales and rounding of each operand.")
    return 0
