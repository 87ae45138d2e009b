"""Settings by name pattern: which parameters each pattern means.

A pattern (`*` matches anything, dots included) is compared with the name of a parameter and with that of its module:
`*.wq` and `*.wq.weight` mean the same. Where several match, the last one wins, as in a recipe's `modules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from octavo.errors import ConfigError, did_you_mean


def value_of(names: Iterable[str], patterns: Mapping[str, float], where: str) -> dict[str, float]:
    """Return the value of every parameter that a pattern matches.

    Args:
        names: of the parameters.
        where: the setting, for messages.

    Raises:
        ConfigError: a pattern matches none of them.
    """
    names = list(names)
    values: dict[str, float] = {}
    for pattern, value in patterns.items():
        matched = [name for name in names if fnmatchcase(name, pattern) or fnmatchcase(_module(name), pattern)]
        if not matched:
            near = did_you_mean(pattern, dict.fromkeys(known for name in names for known in _known(name)))
            raise ConfigError(f"{where}: '{pattern}' matches no parameter that is trained.{near}")
        values |= dict.fromkeys(matched, value)
    return values


def groups_of(names: Iterable[str], patterns: Mapping[str, float], where: str) -> list[tuple[float, list[str]]]:
    """Return each pattern's value with the parameters that are its own. The arguments are those of `value_of`."""
    owners = value_of(names, {pattern: i for i, pattern in enumerate(patterns)}, where)
    owned = [[name for name, owner in owners.items() if owner == i] for i in range(len(patterns))]
    return [(value, group) for value, group in zip(patterns.values(), owned, strict=True) if group]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _known(name: str) -> tuple[str, ...]:
    """Return what a user may have meant by something like this name."""
    module = _module(name)
    return name, module, f"*.{module.rpartition('.')[2]}", f"*.{'.'.join(name.split('.')[-2:])}"
