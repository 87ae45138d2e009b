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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from octavo.errors import ConfigError
from octavo.train.config import RunConfig, assemble, load_file, load_preset, presets


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One field of one section."""

    section: str
    name: str
    type: Any
    help: str
    is_unique: bool
    """True if no other section has a field of this name."""

    @property
    def keyword(self) -> str:
        """Python name of the parameter."""
        return f"{self.section}__{self.name}"

    def parameter(self, group: Group) -> inspect.Parameter:
        """Return the parameter of a command; None if the flag is not given."""
        dashed = self.name.replace("_", "-")
        stems = [f"{self.section}.{dashed}", *([dashed] if self.is_unique else [])]
        negative = f"--no-{stems[-1]}" if self.type is bool else ()
        described = Parameter(
            name=[f"--{stem}" for stem in stems],
            negative=negative,
            help=self.help,
            group=group,
            show_default=False,
        )
        parameter = inspect.Parameter(self.keyword, inspect.Parameter.KEYWORD_ONLY, default=None)
        optional: Any = self.type | None
        return parameter.replace(annotation=Annotated[optional, described])


def with_flags_of(cls: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a flag for every field of the nested dataclass `cls` to a command.

    The command receives the given ones as a nested mapping, its argument `settings`.
    """
    flags = list(_flags(cls))
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
        kept = [p for p in own.parameters.values() if p.name != "settings"]
        parameters = [*kept, *(flag.parameter(groups[flag.section]) for flag in flags)]
        signature = own.replace(parameters=parameters)
        for attribute in ("__name__", "__doc__", "__module__"):
            setattr(wrapper, attribute, getattr(command, attribute))
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
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
            yield Flag(section_name, f.name, _bare(hints[f.name]), helps.get(f.name, ""), seen[f.name] == 1)


def positive(flag: str, number: int) -> int:
    """Return the number of a flag.

    Raises:
        ConfigError: it is not positive.
    """
    if number < 1:
        raise ConfigError(f"{flag}: {number} is not a positive number.")
    return number


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
    """Return the configuration of a preset, overridden by a file, overridden by flags.

    Raises:
        ConfigError: neither file nor preset is given, or one of the three is invalid.
    """
    if file is None and preset is None:
        known = ", ".join(["demo", *presets()])
        raise ConfigError(f"nothing to train: name a run file, or a preset with --preset ({known}).")
    layers = []
    if preset is not None:
        device = settings.get("run", {}).get("device", "auto")
        layers.append(load_preset(preset, cuda=preset == "demo" and _wants_cuda(device)))
    if file is not None:
        layers.append(load_file(file))
    return assemble(*layers, ("command line", settings))


def _wants_cuda(device: str) -> bool:
    if device != "auto":
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()
