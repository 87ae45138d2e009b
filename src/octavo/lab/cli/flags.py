"""Flags of a configuration: one for every field but tables, with the field's docstring as its help.

`run.eval_every` becomes `--run.eval-every`, and `--eval-every` unless another section has that field.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

from cyclopts import Group, Parameter

from octavo._util.config_reader import read_file
from octavo._util.recipe_names import BASE
from octavo.errors import ConfigError
from octavo.lab.models.hugging_face import of_hub
from octavo.lab.train.config import RunConfig, assemble, load_file, load_preset, presets

COMMON = (
    *("model.dim", "model.layers", "model.heads", "data.source", "data.tokenizer", "data.sequence"),
    *("run.start_from", "data.format", "lora.rank"),
    *("optimizer.name", "optimizer.lr", "optimizer.states", "run.steps", "run.batch", "run.recipe", "run.weights"),
    *("run.baseline", "run.seed", "run.device", "run.checkpoint_every", "run.out"),
)
"""What most runs change: the flags that `--help` lists; `--help-all` lists all."""


Switch = Annotated[bool, Parameter(negative=())]
"""A flag without a negative form."""
JsonOutput = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON on stdout, progress on stderr.")]
Output = Annotated[Path | None, Parameter(name=("--out", "-o", "--output"))]

ALIASES = {"run.start_from": ("--from",), "optimizer.lr": ("--learning-rate",), "run.out": ("-o", "--output")}
"""Further names of flags."""


def with_flags_of(
    cls: type, common: Collection[str] = (), without: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the argument `settings` of a command flags, one for every field of the nested dataclass `cls`.

    The command receives the given ones as a nested mapping.

    Args:
        common: the fields, as `section.name`, that `--help` lists; all after `show_all` of the command.
        without: fields that the command does not take.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        taken = {*inspect.signature(command).parameters, *without}

        def show_all(all_of_them: bool = True) -> None:
            shown = () if all_of_them else common
            command.__annotations__["settings"] = _flags(cls, taken, shown)

        show_all(False)
        vars(command)["show_all"] = show_all
        command.__kwdefaults__ = {**(command.__kwdefaults__ or {}), "settings": {}}
        return command

    return decorate


def _flags(cls: type, taken: Collection[str], shown: Collection[str]) -> Any:
    """Return the type of the settings: a mapping of mappings, with a flag for each value.

    Args:
        taken: names of other flags, and of fields that have none.
        shown: fields that the help lists; empty for all.
    """
    sections, titles = typing.get_type_hints(cls), field_docs(cls)
    seen = Counter(f.name for section in sections.values() for f in dataclasses.fields(section))
    kinds: dict[str, Any] = {}
    for number, (name, section) in enumerate(sections.items(), 1):
        group, hints, helps = Group(f"{name}: {titles[name]}", sort_key=number), _hints(section), field_docs(section)
        flags: dict[str, Any] = {}
        for f in dataclasses.fields(section):
            full = f"{name}.{f.name}"
            if full in taken or typing.get_origin(hints[f.name]) is dict:  # tables are for run files
                continue
            stems = [full, *([f.name] if seen[f.name] == 1 and f.name not in taken else [])]
            names = [*(f"--{stem.replace('_', '-')}" for stem in stems), *ALIASES.get(full, ())]
            described = Parameter(
                name=names,
                negative=f"--no-{names[-1][2:]}" if hints[f.name] is bool else (),
                help=helps.get(f.name, "") + _default(f),
                group=group,
                show=not shown or full in shown,
            )
            flags[f.name] = Annotated[hints[f.name], described]
        kinds[name] = Annotated[_typed_dict(name, flags), Parameter(name="*")]
    return Annotated[_typed_dict(cls.__name__, kinds), Parameter(name="*")]


def _typed_dict(name: str, fields: Mapping[str, Any]) -> Any:
    return TypedDict(name, fields, total=False)  # type: ignore[operator]


def _default(f: dataclasses.Field[Any]) -> str:
    """Return the default of a field for the help; empty if it has none that can be shown."""
    if f.default in (dataclasses.MISSING, None, ""):
        return ""
    if isinstance(f.default, bool):
        return f" [default: {'on' if f.default else 'off'}]"
    return f" [default: {' '.join(map(str, f.default)) if isinstance(f.default, tuple) else f.default}]"


@functools.cache  # shared by several commands; reading sources is half the time of `--help`
def field_docs(cls: type) -> Mapping[str, str]:
    """Return the docstring literal under each field of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)  # what getsource returns for a class
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                docs[name] = inspect.cleandoc(words)
    return docs


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    """Return the types of the fields, `int` for `int | None`: None is expressed by omitting the flag."""
    hints = typing.get_type_hints(section)
    for name, hint in hints.items():
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            hints[name] = next(a for a in typing.get_args(hint) if a is not type(None))
    return hints


def configure(file: Path | None, preset: str | None, settings: Mapping[str, Any], *, resume: bool = False) -> RunConfig:
    """Return the configuration of a preset, overridden by a file or the one in a run's directory, overridden by flags.

    Args:
        resume: a run goes on: if nothing names a recipe, by the one that was the default when it began.

    Raises:
        ConfigError: neither file, preset nor weights to start from are given, or one of them is invalid.
    """
    if file is None and preset is None and not settings.get("run", {}).get("start_from"):
        known = ", ".join(["demo", *presets()])
        raise ConfigError(
            f"no run given: name a run file, a preset with --preset ({known}), or the initial weights with --from."
        )
    layers: list[tuple[str, Mapping[str, Any]]] = []
    if preset is not None:
        device = settings.get("run", {}).get("device", "auto")
        layers.append(load_preset(preset, cuda=preset == "demo" and _wants_cuda(device)))
    if file is not None:
        check_given(file)
        layers.append(load_file(file / "config.json" if file.is_dir() else file))
        layers += [(str(file), {"run": {"out": str(file)}})] if file.is_dir() else []
    layers.append(("command line", settings))
    config = assemble(*layers)
    if resume and not any("recipe" in values.get("run", {}) for _, values in layers):
        began = config.run.out / "config.json"
        saved = read_file(began).get("run", {}).get("recipe", BASE) if began.exists() else None
        config = config.with_run(recipe=BASE) if saved == BASE else config
    return config


def check_given(file: Path) -> None:
    """Check that a file or a directory is there and may be a run or a model, before anything is imported for it.

    Raises:
        ConfigError: it is not; the message says what may have been meant.
    """
    if not file.exists():
        if str(file) in ("demo", *presets()):
            raise ConfigError(f"{file}: no such file or directory. The preset of that name is --preset {file}.")
        if file.suffix in (".toml", ".json"):
            raise ConfigError(f"{file}: cannot be read (No such file or directory).")
        raise ConfigError(f"{file}: no such file or directory.{of_hub(file)}")
    if file.is_dir() and not (file / "config.json").exists():
        runs = [child for child in sorted(file.iterdir()) if (child / "config.json").is_file()]
        if runs:
            raise ConfigError(f"{file}: holds runs, and is none. Name one, such as {runs[0]}.")
        raise ConfigError(f"{file}: contains no config.json, so that it is neither a run nor a model.")


def check_recipes(*names: str | None) -> None:
    """Check recipes named on a command line, before a model or a text is read.

    Raises:
        ConfigError: there is no such recipe.
    """
    from octavo import recipes

    for name in names:
        if name:
            recipes.load(name)


def _wants_cuda(device: str) -> bool:
    if device != "auto":
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()
