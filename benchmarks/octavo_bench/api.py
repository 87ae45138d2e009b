"""The API reference as Markdown: signature and docstring of each public name, so that a forge shows it too."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from octavo.lab.cli.flags import field_docs
from octavo_bench.render import table

SECTIONS: Mapping[str, str] = {
    "convert": "plan convert revert disabled Policy Plan conversion.LayerPlan autocast Operators compile"
    " conversion.Compiled recompute offload",
    "train": "optim.AdamW optim.Muon optim.settings.OptimizerOptions graph skip_own_guards lab.train.LossScale"
    " lab.guard.Loop lab.guard.GuardConfig nn.reuse_weight_codes nn.reuse_weight_codes_per_step",
    "measure": "calibrate Calibration calibration.ScalePolicy calibration.Updates scales localize"
    " lab.sensitivity.localisation.Measurement Monitor nn.telemetry.Telemetry observed kernels.record"
    " lab.memory.forecast",
    "distributed": "distributed.shard distributed.sharding.shard.FullyShardOptions distributed.tensor_parallel"
    " distributed.context_parallel distributed.Context distributed.expert_parallel distributed.set_reduction"
    " distributed.GreedyZeRO distributed.PipelineStage distributed.save distributed.load",
    "numbers": "Recipe recipes.load recipes.explain quantize dequantize FP8Tensor",
    "serve": "export serving.WeightPush serving.mismatch serving.Mismatch",
    "pilot": "lab.pilot.open_subject lab.pilot.run_pilot lab.pilot.Settings",
}
"""Section of the page -> its names below `octavo`. Their order is that of the page."""
_HEADINGS = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Yields": "Yields"}
LONGEST = 100
"""Characters of a signature on one line; a longer one has a line per parameter."""


def names() -> list[str]:
    """Return the public names of the page, with `octavo.` before them."""
    return [f"octavo.{name}" for section in SECTIONS.values() for name in section.split()]


def named(name: str) -> Any:
    """Return what a public name is."""
    parent, _, attribute = name.rpartition(".")
    return getattr(pkgutil.resolve_name(parent), attribute)


def section(name: str) -> str:
    """Return the entries of a section."""
    return "\n\n".join(entry(f"octavo.{each}") for each in SECTIONS[name].split())


def entry(name: str) -> str:
    """Return heading, signature and docstring of a public name; of a class also its fields, properties and methods."""
    documented = named(name)
    parts = [f"### {name}", _code(f"{name}{_signature(documented)}"), *_text(inspect.getdoc(documented) or "")]
    if inspect.isclass(documented):
        parts += _fields(documented)
        parts += _members(documented)
    return "\n\n".join(part for part in parts if part)


def _code(text: str) -> str:
    return f"```py\n{text}\n```"


def _signature(documented: Any) -> str:
    """Return the signature with annotations as they are written; of a dataclass none, its fields are listed."""
    if dataclasses.is_dataclass(documented):
        return "(...)"
    signature = inspect.signature(documented)
    shown = [*_parameters([each for each in signature.parameters.values() if each.name not in ("self", "cls")])]
    returned = signature.return_annotation
    end = "" if returned is signature.empty or inspect.isclass(documented) else f" -> {_annotation(returned)}"
    line = f"({', '.join(shown)}){end}"
    return line if len(line) <= LONGEST else "(\n" + "".join(f"    {each},\n" for each in shown) + f"){end}"


def _parameters(parameters: Sequence[inspect.Parameter]) -> Iterator[str]:
    """Yield the parameters as in a definition, with the marks of positional and of named ones."""
    star: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    named = False
    for place, each in enumerate(parameters):
        if each.kind is each.KEYWORD_ONLY and not named:
            yield "*"
        named = named or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        text = star.get(each.kind, "") + each.name
        text += "" if each.annotation is each.empty else f": {_annotation(each.annotation)}"
        yield text if each.default is each.empty else f"{text} = {_value(each.default)}"
        after = parameters[place + 1] if place + 1 < len(parameters) else None
        if each.kind is each.POSITIONAL_ONLY and (after is None or after.kind is not each.POSITIONAL_ONLY):
            yield "/"


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _value(default: Any) -> str:
    """Return a default as code; of a function or an object its name, without an address."""
    if isinstance(default, types.FunctionType | type):
        return default.__name__
    return "..." if re.search(r" at 0x[0-9a-f]+>", repr(default)) else repr(default)


def _text(docstring: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring; its sections as lists."""
    for block in re.split(r"\n\n(?!    )", docstring):
        head, _, rest = block.partition("\n")
        if head.rstrip(":") in _HEADINGS and head.endswith(":"):
            yield f"**{_HEADINGS[head.rstrip(':')]}**"
            yield _list(inspect.cleandoc("\n" + rest))
        else:
            yield block


def _list(body: str) -> str:
    """Return the items of a section as a list: `name: meaning`, with continuations indented."""
    items = re.split(r"\n(?=\S)", body)
    return "\n".join(re.sub(r"^([*\w., ]{1,40}?): ", r"- `\1`: ", _flat(item)) for item in items)


def _flat(item: str) -> str:
    return " ".join(item.split())


def _fields(documented: type) -> Iterator[str]:
    """Yield a table of the fields of a dataclass, those of its bases first."""
    if not dataclasses.is_dataclass(documented):
        return
    docs: dict[str, str] = {}
    for base in reversed(documented.__mro__):
        docs |= field_docs(base) if dataclasses.is_dataclass(base) and isinstance(base, type) else {}
    rows = [
        (f"`{field.name}`", f"`{_annotation(field.type)}`", _default(field), _flat(docs.get(field.name, "")))
        for field in dataclasses.fields(documented)
        if not field.name.startswith("_") and field.init
    ]
    if rows:
        yield table(("field", "type", "default", "meaning"), rows)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{_value(field.default)}`"
    if field.default_factory is dataclasses.MISSING:
        return "required"
    return f"`{field.default_factory.__name__}()`" if isinstance(field.default_factory, type) else "computed"


def _members(documented: type) -> Iterator[str]:
    """Yield the public properties and methods that a class of Octavo defines, each with its first paragraph."""
    lines = []
    for name, member in vars(documented).items():
        told = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(told) or not told.__doc__:
            continue
        if told.__qualname__ != f"{documented.__qualname__}.{name}":
            continue  # PyTorch stores the inherited `step` in the class of the first optimizer that is made
        call = "" if isinstance(member, property) else _flat(_signature(told)).replace("( ", "(").replace(", )", ")")
        lines.append(f"- `{name}{call}`: {_flat((inspect.getdoc(told) or '').split(chr(10) * 2)[0])}")
    if lines:
        yield "\n".join(lines)


TABLES: Mapping[str, Callable[[], str]] = {f"api-{name}": partial(section, name) for name in SECTIONS}
"""The sections as tables of facts."""
