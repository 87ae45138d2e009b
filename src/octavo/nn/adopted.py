"""Classes that a converted module takes on: one of Octavo's mixed into the one it was. They are made while running."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[Any]] = {}


def adopted_class(kind: type[nn.Module], parent: type[nn.Module], reduce: Any = None) -> type[Any]:
    """Return the class of a module of class `parent` that computes by `kind`; its attribute `parent` is the former.

    Args:
        kind: comes before `parent` in the method resolution order. Its `prefix`, if it has one, begins the name.
        reduce: the `__reduce__` of the class; by default the inherited one.
    """
    if (kind, parent) not in _CLASSES:
        names: dict[str, Any] = {"parent": parent, "__module__": parent.__module__, "__doc__": parent.__doc__}
        names |= {} if reduce is None else {"__reduce__": reduce}
        _CLASSES[kind, parent] = type(getattr(kind, "prefix", "") + parent.__name__, (kind, parent), names)
    return _CLASSES[kind, parent]


class Adopted(nn.Module):
    """Mixed into the class of a module: it stands before the user's own in the order of inheritance."""

    parent: type[nn.Module]
    """The class it was, and will be."""
    prefix = ""
    """What the name of the class begins with."""
    fields: tuple[str, ...] = ()
    """Attributes that `take` gives to a module, and `release` takes away."""

    @classmethod
    def take(cls, module: nn.Module, **fields: Any) -> None:
        """Mix this class into that of a module in place; everything attached to it stays."""
        if not isinstance(module, cls):
            module.__class__ = adopted_class(cls, type(module))
        vars(module).update(fields)

    def release(self) -> None:
        """Turn this module back into its own class in place."""
        for name in self.fields:
            self.__dict__.pop(name, None)
        self.__class__ = type(self).parent  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Reduce to the parent's class: no file can name a class that was made while running."""
        reduced = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        if reduced[1][:1] != (type(self),):  # the user's own way
            return reduced
        return _rebuild, (type(self).__bases__[0], type(self).parent, *reduced[1][1:]), *reduced[2:]


def _rebuild(kind: type[nn.Module], parent: type[nn.Module], *arguments: Any) -> nn.Module:
    cls = adopted_class(kind, parent)
    return cast(nn.Module, cls.__new__(cls, *arguments))
