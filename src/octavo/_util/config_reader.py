"""Strict parsing of configuration: mappings to dataclasses, with errors that name the key and suggest a correction."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import reprlib
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from octavo._util.checksums import check_regular
from octavo.errors import ConfigError, OctavoError, did_you_mean

T = TypeVar("T")
_LARGEST, _LARGEST_INT = sys.float_info.max, 2**63 - 1
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 100, 100, 60
shown = _SHORT.repr
"""`repr`, cut short: values in messages may come from any file."""


def read(cls: type[T], mapping: Mapping[str, Any], where: str) -> T:
    """Build the dataclass `cls` from `mapping`, nested dataclasses included.

    `where` names the source in messages (a file, an argument). Missing keys get the field's default.

    Raises:
        ConfigError: an unknown key, a missing key without default, or a value that is of the wrong type, not finite, or
            refused by the dataclass; the message begins with `where`.
    """
    try:
        return _read(cls, mapping, where)
    except ConfigError as error:
        if str(error).startswith(where):
            raise
        raise ConfigError(f"{where}: {error}") from error


def check(hint: Any, value: Any, where: str) -> Any:
    """Return a value as a type hint says, an integer as a float if it says so.

    Raises:
        ConfigError: it is of another type, or not finite; the message begins with `where`.
    """
    return _value(hint, value, where)


def _read(cls: type[T], mapping: Mapping[str, Any], where: str) -> T:
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where}: expected a table of settings, got {shown(mapping)}.")
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
        return value if isinstance(value, hint) else _read(hint, value, where)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, value, where)
    if origin is typing.Literal:
        if (type(value), value) not in [(type(a), a) for a in arguments]:  # True and 1.0 equal 1
            near = did_you_mean(str(value), [str(a) for a in arguments])
            raise ConfigError(f"{where}: {shown(value)} is none of {', '.join(map(repr, arguments))}.{near}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: expected a list, got {shown(value)}.")
        item_hints = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(item_hints) != len(value):
            raise ConfigError(f"{where}: expected {len(item_hints)} values, got {shown(value)}.")
        return tuple(_value(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(item_hints, value, strict=True)))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a table, got {shown(value)}.")
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
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= _LARGEST:
            raise ConfigError(f"{where}: expected a finite number, got {shown(value)}.")
        return float(value)
    if hint is int and isinstance(value, int) and abs(value) > _LARGEST_INT:
        raise ConfigError(f"{where}: {shown(value)} does not fit in 64 bits.")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{where}: {shown(value)} contains a NUL character.")
    if hint is Path and isinstance(value, str):
        return Path(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where}: expected {hint.__name__}, got {shown(value)} ({type(value).__name__}).")
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


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with those of `over` in place of, or beside, those of `under`."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged


def read_file(path: Path, error: type[OctavoError] = ConfigError) -> dict[str, Any]:
    """Return the contents of a `.toml` or `.json` file: a table.

    Raises:
        ConfigError: the file is missing, has another suffix or encoding, or is malformed; or another `error`, if given.
    """
    if path.suffix not in (".toml", ".json"):
        if not path.exists():
            raise error(f"{path}: no such file or directory.")
        raise error(f"{path}: expected a .toml or .json file.")
    loaded = parse(read_text(path, error), str(path), error, toml=path.suffix == ".toml")
    if not isinstance(loaded, dict):
        raise error(f"{path}: expected a table of settings, got {type(loaded).__name__}.")
    return loaded


def read_text(path: Path, error: type[OctavoError] = ConfigError) -> str:
    """Return the text of a UTF-8 file, without a byte-order mark.

    Raises:
        ConfigError: the file cannot be read, or is of another encoding; or another `error`, if given.
    """
    try:
        check_regular(path)
        content = path.read_bytes()
        return content.decode("utf-8-sig")
    except OSError as found:
        raise error(f"{path}: cannot be read ({found.strerror}).") from found
    except UnicodeDecodeError as found:
        seen = "it seems to be UTF-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else f"byte {found.start} is not"
        raise error(f"{path}: must be UTF-8 text, and {seen}. Save it in UTF-8.") from found


def parse(text: str, where: str, error: type[OctavoError] = ConfigError, *, toml: bool = False) -> Any:
    """Return the value of a JSON or TOML document.

    Raises:
        ConfigError: malformed, with a key twice, or nested too deeply; or another `error`, if given.
    """
    try:
        return tomllib.loads(text) if toml else json.loads(text, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as found:  # a ValueError also for a number of thousands of digits
        reason = "nested too deeply" if isinstance(found, RecursionError) else str(found).partition(";")[0]
        raise error(f"{where}: malformed {'toml' if toml else 'json'} ({reason}).") from found


@contextlib.contextmanager
def blaming(where: object, error: type[OctavoError] = ConfigError) -> Iterator[None]:
    """Convert errors that malformed values cause in this block to an error that names their file.

    Args:
        where: the file; errors of Octavo that do not name it get it in front.
        error: type of the error.
    """
    try:
        yield
    except OctavoError as found:
        if str(where) in str(found):
            raise
        raise type(found)(f"{where}: {found}") from found
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as found:
        reason = f"{type(found).__name__}: {found}" if str(found) else type(found).__name__
        raise error(f"{where}: damaged or of another program ({reason}).") from found


def _without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {shown(next(key for key in keys if keys.count(key) > 1))} appears twice")
    return found
