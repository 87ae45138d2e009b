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
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from octavo.errors import ConfigError
from octavo.train.config import RunConfig, assemble, load_file, load_preset, presets

COMMON = (
    *("model.dim", "model.layers", "model.heads", "data.source", "data.tokenizer", "data.sequence"),
    *("run.start_from", "data.format", "lora.rank"),
    *("optimizer.name", "optimizer.lr", "optimizer.states", "run.steps", "run.batch", "run.recipe", "run.weights"),
    *("run.twin", "run.seed", "run.device", "run.checkpoint_every", "run.out"),
)
"""What most runs change: the flags that `--help` lists; `--help-all` lists all."""


Switch = Annotated[bool, Parameter(negative=())]
"""A flag without a negative form."""
JsonOutput = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON on stdout, progress on stderr.")]
Output = Annotated[Path | None, Parameter(name=("--out", "-o", "--output"))]

ALIASES = {"run.start_from": ("from",)}
"""Further names of flags."""


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One field of one section."""

    section: str
    name: str
    type: Any
    help: str
    is_unique: bool
    """True if no other section has a field of this name."""
    default: Any = None
    """The field's default, for the help; None if it has none that can be shown."""

    @property
    def keyword(self) -> str:
        """Python name of the parameter."""
        return f"{self.section}__{self.name}"

    def parameter(self, group: Group, show: bool = True) -> inspect.Parameter:
        """Return the parameter of a command; None if the flag is not given. `show`: the help lists it."""
        dashed = self.name.replace("_", "-")
        stems = [f"{self.section}.{dashed}", *([dashed] if self.is_unique else [])]
        stems += ALIASES.get(f"{self.section}.{self.name}", ())
        negative = f"--no-{stems[-1]}" if self.type is bool else ()
        described = Parameter(
            name=[f"--{stem}" for stem in stems],
            negative=negative,
            help=self.help + ("" if self.default in (None, "") else f" [default: {_said(self.default)}]"),
            group=group,
            show=show,
            show_default=False,
        )
        parameter = inspect.Parameter(self.keyword, inspect.Parameter.KEYWORD_ONLY, default=None)
        optional: Any = self.type | None
        return parameter.replace(annotation=Annotated[optional, described])


def _said(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def with_flags_of(
    cls: type, common: Collection[str] = (), without: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a flag for every field of the nested dataclass `cls` to a command.

    The command receives the given ones as a nested mapping, its argument `settings`.

    Args:
        common: the fields, as `section.name`, that `--help` lists; all after `show_all` of the command.
        without: fields that the command does not take.
    """
    flags = [flag for flag in _flags(cls) if f"{flag.section}.{flag.name}" not in without]
    titles = field_docs(cls).items()
    groups = {name: Group(f"{name}: {title}", sort_key=i) for i, (name, title) in enumerate(titles, 1)}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            settings: dict[str, dict[str, Any]] = {}
            for flag in flags:
                value = keywords.pop(flag.keyword, None)
                if value is not None:
                    settings.setdefault(flag.section, {})[flag.name] = value
            return command(*arguments, settings=settings, **keywords)

        own = inspect.signature(command, eval_str=True)
        taken = own.parameters.keys()
        flags[:] = [dataclasses.replace(flag, is_unique=flag.is_unique and flag.name not in taken) for flag in flags]
        kept = [p for p in own.parameters.values() if p.name != "settings"]

        def show_all(all_of_them: bool = True) -> None:
            shown = [all_of_them or not common or f"{flag.section}.{flag.name}" in common for flag in flags]
            added = [f.parameter(groups[f.section], show) for f, show in zip(flags, shown, strict=True)]
            signature = own.replace(parameters=[*kept, *added])
            vars(wrapper).update(
                __signature__=signature, __annotations__={p.name: p.annotation for p in signature.parameters.values()}
            )

        for attribute in ("__name__", "__doc__", "__module__"):
            setattr(wrapper, attribute, getattr(command, attribute))
        show_all(False)
        wrapper.show_all = show_all  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _flags(cls: type) -> Iterator[Flag]:
    sections = typing.get_type_hints(cls)
    seen = Counter(f.name for section in sections.values() for f in dataclasses.fields(section))
    for section_name, section in sections.items():
        hints, helps = typing.get_type_hints(section), field_docs(section)
        for f in dataclasses.fields(section):
            if typing.get_origin(hints[f.name]) is dict:  # tables are for run files
                continue
            default = None if f.default is dataclasses.MISSING else f.default
            yield Flag(section_name, f.name, _bare(hints[f.name]), helps.get(f.name, ""), seen[f.name] == 1, default)


def field_docs(cls: type) -> Mapping[str, str]:
    """Return the docstring literal under each field of a dataclass."""
    return _field_docs(cls)


@functools.cache  # shared by several commands; reading sources is half the time of `--help`
def _field_docs(cls: type) -> Mapping[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)  # what getsource returns for a class
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                docs[name] = inspect.cleandoc(words)
    return docs


def _bare(hint: Any) -> Any:
    """Return `int` for `int | None`: None is expressed by omitting the flag."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(a for a in typing.get_args(hint) if a is not type(None))
    return hint


def configure(file: Path | None, preset: str | None, settings: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a preset, overridden by a file or the one in a run's directory, overridden by flags.

    Raises:
        ConfigError: neither file, preset nor weights to start from are given, or one of them is invalid.
    """
    if file is None and preset is None and not settings.get("run", {}).get("start_from"):
        known = ", ".join(["demo", *presets()])
        raise ConfigError(
            f"nothing to train: name a run file, a preset with --preset ({known}), or with --from the weights to start"
            " from."
        )
    layers = []
    if preset is not None:
        device = settings.get("run", {}).get("device", "auto")
        layers.append(load_preset(preset, cuda=preset == "demo" and _wants_cuda(device)))
    if file is not None:
        layers.append(load_file(file / "config.json" if file.is_dir() else file))
        layers += [(str(file), {"run": {"out": str(file)}})] if file.is_dir() else []
    return assemble(*layers, ("command line", settings))


def _wants_cuda(device: str) -> bool:
    if device != "auto":
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()
