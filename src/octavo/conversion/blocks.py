"""Wrapping of a model's blocks by changing their class. Names, parameters, hooks and state dicts stay."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from octavo.errors import ConfigError, did_you_mean
from octavo.nn.adopted import Adopted
from octavo.nn.modules import blocks_of


class Wrapped(Adopted):
    """Mixin for the class of a block: `wrap` adds it, `unwrap` removes it."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Reduce to the original class: pickles and copies hold the unwrapped block."""
        wrapped = type(self)
        self.__class__ = wrapped.parent  # type: ignore[assignment]
        try:
            reduced = self.__reduce_ex__(protocol)
        finally:
            self.__class__ = wrapped
        make, arguments, *rest = reduced
        if rest and isinstance(rest[0], dict):  # what the block itself saves: not all that it has
            rest[0] = {name: value for name, value in rest[0].items() if name not in wrapped.fields}
        return _new if make is vars(copyreg)["__newobj__"] else make, arguments, *rest


def unwrapped_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before `wrap`."""
    cls = type(module)
    while issubclass(cls, Wrapped):
        cls = cls.parent
    return cls


def storages(modules: Iterable[nn.Module]) -> set[int]:
    """Return the storage addresses of the modules' own parameters and buffers, without their children's."""
    tensors = (x for module in modules for x in (*module.parameters(False), *module.buffers(False)))
    return {part.untyped_storage().data_ptr() for x in tensors for part in _parts_of(x)}


def _parts_of(x: Tensor) -> list[Tensor]:
    """Return the plain tensors inside a tensor: codes and scales of an `FP8Tensor`."""
    if not hasattr(x, "__tensor_flatten__"):
        return [x]
    return [part for name in x.__tensor_flatten__()[0] for part in _parts_of(getattr(x, name))]


def choose(model: nn.Module, patterns: str | Sequence[str] | None) -> list[str]:
    """Return the full names of the modules that match the patterns, in order; for None, those of the model's blocks.

    Raises:
        ConfigError: a pattern matches no module, or there are no blocks.
    """
    if patterns is None:
        if not (found := blocks_of(model)):
            raise ConfigError("the model has no nn.ModuleList of blocks: name them, as in blocks='encoder.layer.*'.")
        return found
    names = [name for name, _ in model.named_modules() if name]
    chosen: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        # `layers.*` means the children of `layers`: here a star does not match a dot.
        matched = [name for name in names if fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")]
        if not matched:
            raise ConfigError(f"blocks: the pattern '{pattern}' matches no module.{did_you_mean(pattern, names)}")
        chosen += [name for name in matched if name not in chosen]
    return chosen


def wrap(module: nn.Module, kind: type[Wrapped], **attributes: Any) -> None:
    """Mix `kind` into the class of a module, in place.

    Raises:
        ConfigError: the module has this wrapper already.
    """
    if isinstance(module, kind):
        raise ConfigError(f"{type(module).__name__} has this wrapper already: call `remove()` of the first one.")
    kind.take(module, **attributes)


def unwrap(module: nn.Module, kind: type[Wrapped]) -> None:
    """Undo `wrap`, in place. Wrappers must be removed in reverse order.

    Raises:
        ConfigError: another wrapper has been added since.
    """
    if not isinstance(module, kind):
        return
    wrapped = type(module)
    if wrapped.__bases__[0] is not kind:
        raise ConfigError(f"{wrapped.__name__} has been wrapped again since: remove in reverse order.")
    module.release()


def _new(parent: type[nn.Module], *arguments: Any) -> nn.Module:
    return parent.__new__(parent, *arguments)
