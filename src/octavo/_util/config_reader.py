"""Strict parsing of configuration: mappings to dataclasses, with errors that name the key and suggest a correction."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from octavo.errors import ConfigError, did_you_mean

T = TypeVar("T")


def read(cls: type[T], mapping: Mapping[str, Any], where: str) -> T:
    """Build the dataclass `cls` from `mapping`, nested dataclasses included.

    `where` names the source in messages (a file, an argument). Missing keys get the field's default.

    Raises:
        ConfigError: an unknown key, a missing key without default, or a value of the wrong type.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where}: expected a table of settings, got {mapping!r}.")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    for key in mapping:
        if key not in fields:
            known = ", ".join(fields)
            raise ConfigError(f"{where}: unknown key '{key}'.{did_you_mean(key, fields)} Known keys: {known}.")
    values = {key: _value(hints[key], value, f"{where}: {key}") for key, value in mapping.items()}
    required = {dataclasses.MISSING}
    for name, field in fields.items():
        if name not in values and {field.default} == required and {field.default_factory} == required:
            raise ConfigError(f"{where}: the key '{name}' is missing.")
    return cls(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else read(hint, value, where)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            near = did_you_mean(str(value), [str(a) for a in arguments])
            raise ConfigError(f"{where}: {value!r} is none of {', '.join(map(repr, arguments))}.{near}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: expected a list, got {value!r}.")
        item_hints = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(item_hints) != len(value):
            raise ConfigError(f"{where}: expected {len(item_hints)} values, got {value!r}.")
        return tuple(_value(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(item_hints, value, strict=True)))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a table, got {value!r}.")
        return {k: _value(arguments[1], v, f"{where}.{k}") for k, v in value.items()}
    return _scalar(hint, value, where)


def _union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    candidates = [a for a in arguments if a is not type(None)]
    for candidate in candidates[:-1]:
        try:
            return _value(candidate, value, where)
        except ConfigError:
            continue
    return _value(candidates[-1], value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: expected {hint.__name__}, got {value!r} ({type(value).__name__}).")
    return value


def to_dict(instance: Any) -> dict[str, Any]:
    """Return the nested mapping of a dataclass, the inverse of `read`. Paths become strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, Mapping):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list | tuple) else value

    mapping: dict[str, Any] = plain(dataclasses.asdict(instance))
    return mapping


def read_file(path: Path) -> dict[str, Any]:
    """Return the contents of a `.toml` or `.json` file.

    Raises:
        ConfigError: the file is missing, has another suffix, or is malformed.
    """
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"{path}: expected a .toml or .json file.")
    try:
        text = path.read_text(encoding="utf-8")
        loaded = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: malformed {path.suffix[1:]} ({error}).") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected a table of settings, got {type(loaded).__name__}.")
    return loaded
