"""`octavo plan` and `octavo recipes`."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts.types import PositiveInt

from octavo._util.terminal import columns, console, hanging, progress, quantity, say
from octavo.errors import ConfigError
from octavo.lab.cli.flags import COMMON, JsonOutput, Switch, check_given, check_recipes, configure, with_flags_of
from octavo.lab.train.config import RunConfig, reason_for_fallback

if TYPE_CHECKING:
    from octavo.conversion import Plan


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
        octavo plan config.json --gpu h100
        octavo plan runs/demo --recipe tensorwise --json
        octavo plan --preset demo --memory
        octavo plan --preset parity-cuda --memory --gpus 8 --no-baseline --fits 139

    Parameters
    ----------
    file
        Run file, .toml or .json, or the directory of a run. Or a model of your own: a Hugging Face config.json or its
        directory, or a Python file with build() and batches(); of the settings these take --recipe, --batch,
        --data.sequence and --device.
    preset
        Preset of `octavo train`. FILE overrides it.
    gpu
        Plan for this GPU, which need not be here, with the predicted gain of each layer where its rates are known. With
        --memory: h100 or h200; by default the GPU here, or an H200 where there is none.
    memory
        Predict the peak GPU memory instead, by kind.
    gpus
        With --memory: number of GPUs for FSDP2; the batch is per GPU.
    fits
        With --memory: GiB of a GPU; find the largest model of these proportions that fits.
    """
    if not memory and (gpus > 1 or fits is not None):
        raise ConfigError("--gpus and --fits need --memory.")
    if file is not None and _is_own_model(file):
        if memory or preset is not None:
            raise ConfigError(f"{file}: --memory and --preset are for run files, and this is none.")
        _show(_plan_own_model(file, gpu, settings), json_output)
        return 0
    on_gpu = preset == "demo" and (gpu is not None or memory)  # its own shape for a GPU, also where there is none
    config = _with_files(file, configure(file, "demo-cuda" if on_gpu else preset, settings))
    if memory:
        return _memory(config, gpu, gpus, fits, json_output)
    _show(_plan(config, gpu), json_output)
    if not json_output:
        _say_recipes(config)
    return 0


def _with_files(file: Path | None, config: RunConfig) -> RunConfig:
    """Return the configuration of a run's directory with its copies of files that are gone; any other as it is."""
    from octavo.lab.train.inputs import with_files

    return config if file is None or not file.is_dir() else with_files(config)


def _say_recipes(config: RunConfig) -> None:
    """Print where the recipe of a run is explained, and the recipe that its last steps change to."""
    from octavo import recipes

    recipe, run = recipes.load(config.run.recipe), config.run
    say(f"\nrecipe {run.recipe}: `octavo recipes {run.recipe}` explains it, operand by operand")
    if run.last_share and recipe.is_fp8:
        recipes.load(run.last_recipe, "run.last_recipe")
        say(f"the last {100 * run.last_share:g} % of the steps: recipe {run.last_recipe}")


def _is_own_model(file: Path) -> bool:
    """Return whether a file is a Hugging Face config or a Python file, of whose model `octavo train` knows nothing."""
    check_given(file)
    from octavo.lab.train.opening import is_run_file

    return not is_run_file(file / "config.json" if file.is_dir() else file)


OWN_MODEL = ("run.recipe", "run.batch", "run.device", "data.sequence")
"""Settings that apply to a model that is not a run's."""


def _plan_own_model(file: Path, gpu: str | None, settings: Mapping[str, Mapping[str, Any]]) -> Plan:
    """Return the plan of a Hugging Face config's model or of a Python file's."""
    given = {f"{section}.{name}": value for section, values in settings.items() for name, value in values.items()}
    if unknown := [name for name in given if name not in OWN_MODEL]:
        flag = unknown[0].replace("_", "-")
        raise ConfigError(f"--{flag}: is for run files, and {file} is none.")
    check_recipes(given.get("run.recipe"))
    from octavo.conversion import make_plan
    from octavo.lab.train.device import resolve
    from octavo.lab.train.opening import open_subject
    from octavo.lab.train.subject import Shape

    sizes = {"batch": given.get("run.batch"), "sequence": given.get("data.sequence")}
    shape = Shape(**{name: size for name, size in sizes.items() if size is not None})
    subject = open_subject(file, shape=shape)
    here = gpu or resolve(given.get("run.device", "auto"))
    model, recipe = subject.build_without_values(), given.get("run.recipe")
    return make_plan(model, recipe, tokens=subject.tokens, device=here)


def _plan(config: RunConfig, gpu: str | None) -> Plan:
    """Return the plan of a run's model, on this GPU or where the run would be, computed as the run computes it."""
    import torch

    from octavo import recipes
    from octavo.conversion import make_plan
    from octavo.lab.train.device import resolve
    from octavo.lab.train.opening import open_run
    from octavo.lab.train.setup import cast_weights, policy_of

    here, recipe = resolve(config.run.device), recipes.load(config.run.recipe)
    model = open_run(config, new=True).build_without_values()
    cast_weights(config.run.weights, model)
    policy, tokens = policy_of(config, recipe), config.tokens_per_pass()
    kind = "cuda" if gpu else here.type
    before = torch.is_autocast_enabled(kind)
    torch.set_autocast_enabled(kind, True)  # as a run computes; torch.autocast refuses a GPU that is not here
    try:
        plan = make_plan(model, recipe, policy=policy, tokens=tokens, device=gpu or here)
        return replace(plan, instead=reason_for_fallback(config))
    finally:
        torch.set_autocast_enabled(kind, before)


def _show(planned: Plan, json_output: bool) -> None:
    """Print a plan: coloured in a terminal, with reasons on lines of their own where it is narrow; plain in a pipe."""
    from octavo.conversion.plan import footer, header, table_rows

    screen = console()
    if json_output or not screen.is_terminal:
        say(planned.to_json() if json_output else str(planned))
        return
    if lines := header(planned):
        screen.print(*lines, sep="\n", markup=False)
    rows = table_rows(planned)
    lines, reasons = columns(rows), [""] * len(rows)
    if max(map(len, lines)) > screen.width:
        lines = columns([row[:-1] for row in rows])
        reasons[1:] = [textwrap.indent(textwrap.fill(row[-1], screen.width - 4), "    ") for row in rows[1:]]
    for row, line, reason in zip(rows, lines, reasons, strict=True):
        in_fp8 = "green" if "bf16" not in row[3] else "yellow" if row[3] != "bf16" else "dim"
        shown = f"{line}\n{reason}" if reason else line
        screen.print(shown, style="bold" if row is rows[0] else in_fp8, markup=False, soft_wrap=True)
    screen.print("", *footer(planned), sep="\n", markup=False)


def _memory(config: RunConfig, gpu: str | None, gpus: int, fits: float | None, json_output: bool) -> int:
    """Print the forecast; return 1 if no model of these proportions fits."""
    from octavo.kernels.runtime.devices import GPUS
    from octavo.kernels.runtime.dispatch import planning_for
    from octavo.lab.train.memory import forecast_run, largest_model

    if fits is not None and not 0 < fits < math.inf:
        raise ConfigError(f"--fits {fits}: must be a positive number of GiB.")
    model, forecast = config.model, None
    device = _forecast_for(gpu)
    with planning_for(device) if device in GPUS else nullcontext(), progress() as report:
        if fits is None:
            forecast = forecast_run(config, gpus=gpus, report=report)
        elif (found := largest_model(config, fits, gpus=gpus, report=report)) is not None:
            model, forecast = found
    if forecast is None:
        say(f"no model of these proportions fits {fits} GiB", to_stderr=True)
        return 1
    if json_output:
        say(json.dumps({"device": device, "model": asdict(model), **forecast.to_dict()}, indent=1))
    else:
        layers, parameters = quantity(model.layers, "layer"), f"{forecast.parameters / 1e6:,.1f} M parameters"
        say(f"{layers} of {model.dim}, {parameters} in memory on {device}\n\n{forecast}")
        if gpu is None and device in GPUS:
            say(f"\nno GPU here: predicted for `--gpu {device}`")
    return 0


def _forecast_for(gpu: str | None) -> str:
    """Return the GPU of a forecast: the one named, else the one here, else an H200.

    Raises:
        ConfigError: the one named has no known rates, so which layers gain from FP8 is unknown.
    """
    import torch

    from octavo.kernels.runtime.devices import GPUS

    if gpu is None:
        return "cuda" if torch.cuda.is_available() else "h200"
    if GPUS[gpu].rates is None:
        known = ", ".join(name for name, each in GPUS.items() if each.rates)
        raise ConfigError(f"--gpu {gpu}: memory is predicted for {known}. Octavo has not been measured on others.")
    return gpu


def recipes(name: str | None = None, /, *, json_output: JsonOutput = False) -> int:
    """List the FP8 recipes, one line each, or explain one.

    Examples:

        octavo recipes
        octavo recipes rotated
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
        explained = hanging(known.explain(recipe).splitlines())
        say(json.dumps(config_reader.to_dict(recipe), indent=2) if json_output else "\n".join(explained))
    elif json_output:
        say(json.dumps(known.names()))
    else:
        listed = sorted(known.names(), key=lambda each: each != known.DEFAULT)
        say(*hanging(columns([(each, known.about(each)) for each in listed])))
        say("", f"Default: {known.DEFAULT}; {known.FALLBACK} where it does not run, and the plan says why.")
        aliases = ", ".join(f"{alias} = {name}" for alias, name in known.ALIASES.items())
        say(*hanging([f"Aliases: {aliases}."]))
        say("`octavo recipes NAME` explains one: formats, scales and rounding of each operand.")
    return 0
