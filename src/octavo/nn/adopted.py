"""Classes that a converted module takes on: one of Octavo's mixed into the one it was. They are made while running."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

from torch import nn

from octavo._util.compiler import assume_constant_result
from octavo.kernels.ledger import warn_once
from octavo.nn.modules import full_name

_CLASSES: dict[tuple[type[nn.Module], ...], type[Any]] = {}
"""(class of Octavo, class of a module) -> the class that is both."""


class Adopted(nn.Module):
    """Mixed into the class of a module: it stands before the user's own in the order of inheritance."""

    parent: type[nn.Module]
    """The class it was, and will be: a class has one of its own unless a user has derived it from one of Octavo's."""
    prefix = ""
    """What the name of the class begins with."""
    fields: tuple[str, ...] = ()
    """Attributes that `take` gives to a module, and others that `release` takes away with them."""

    @classmethod
    def take(cls, module: nn.Module, **fields: Any) -> None:
        """Mix this class into that of a module in place; everything attached to it stays."""
        if not isinstance(module, cls):
            module.__class__ = _class_for(cls, type(module))
        vars(module).update(fields)

    def release(self) -> None:
        """Turn this module back into its own class in place."""
        own, present = own_class(self), type(self)
        for name in own.fields:
            self.__dict__.pop(name, None)
        if own is not present:  # stays FSDP2's
            refusals = {name: value for name, value in vars(present).items() if name == "__deepcopy__"}
            self.__class__ = type(f"FSDP{own.parent.__name__}", (present.__bases__[0], own.parent), refusals)
        else:
            self.__class__ = own.parent  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Reduce to the parent's class: no file can name a class that was made while running."""
        reduced, bases = cast(tuple[Any, ...], super().__reduce_ex__(protocol)), type(self).__bases__
        is_of_a_file = _CLASSES.get(bases) is not type(self)
        if is_of_a_file or reduced[1][:1] != (type(self),):  # or the user's own way
            return reduced
        return _rebuild, (*bases, *reduced[1][1:]), *reduced[2:]


class Recognised(Adopted):
    """Mixed into the class of a module that was recognised by what its `forward` computes.

    Another value for one of its attributes, such as its activation or the probability of a dropout in it, may change
    that: then the module computes as it is written. Its linear layers may be replaced: each call looks at them.
    """

    fields: tuple[str, ...] = ("settings",)
    settings: tuple[tuple[str, str, Any], ...] = ()
    """Path of a module in this one, name of an attribute, and the value that it was recognised with."""

    @classmethod
    def take(cls, module: nn.Module, **fields: Any) -> None:
        """Mix this class into that of a module in place, and note what it was recognised with."""
        settings = tuple(setting for setting in _settings(module) if setting[1] not in cls.fields)
        super().take(module, settings=settings, **fields)

    def is_as_recognised(self) -> bool:
        """Return whether all attributes are what they were; the first that is not is warned of."""
        for path, name, before in self.settings:
            if not _is_same(getattr(self.get_submodule(path), name, None), before):
                _warn_of_change(own_class(self).__name__, full_name(path, name))
                return False
        return True


def _settings(module: nn.Module, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the attributes of a module and its children that may decide what it computes.

    Not those of every module, parameters and linear layers; nor sequences, which compilers know no identity of.
    """
    for name, value in itertools.chain(vars(module).items(), module._modules.items(), module._parameters.items()):
        if name not in _OF_EVERY_MODULE and not isinstance(value, nn.Linear | nn.Parameter | list | tuple | set):
            yield path, name, value
    for name, child in module.named_children():
        if not isinstance(child, nn.Linear):
            yield from _settings(child, full_name(path, name))


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(before, partial):
        parts = [(each.func, each.args, each.keywords) for each in (now, before) if isinstance(each, partial)]
        return len(parts) == 2 and parts[0] == parts[1]
    return now is before or (isinstance(before, int | float | str) and now == before)


_OF_EVERY_MODULE = frozenset((*vars(nn.Module()), "_compiled_call_impl"))


@assume_constant_result
def _warn_of_change(cls: str, attribute: str) -> None:
    warn_once(
        f"{cls}.{attribute} is not what it was at octavo.convert. Such modules now compute as they are written, with "
        "nothing fused: call octavo.convert again"
    )


def own_class(module: nn.Module) -> Any:
    """Return the class of a module, without that which FSDP2 sets before it."""
    cls = type(module)
    return cls.__bases__[1] if cls.__bases__[0].__module__.startswith("torch.distributed.fsdp") else cls


def is_taken(module: nn.Module) -> bool:
    """Return whether a module is of a class of Octavo, and of none that a user has derived from one."""
    return isinstance(module, Adopted) and "parent" in vars(own_class(module))


def _class_for(kind: type[nn.Module], parent: type[nn.Module]) -> type[Any]:
    """Return the class of a module of class `parent` that computes by `kind`: `kind` itself where it is derived."""
    if issubclass(kind, parent):
        return kind
    if (kind, parent) not in _CLASSES:
        names = {"parent": parent, "__module__": parent.__module__, "__doc__": parent.__doc__}
        _CLASSES[kind, parent] = type(getattr(kind, "prefix", "") + parent.__name__, (kind, parent), names)
    return _CLASSES[kind, parent]


def _rebuild(kind: type[nn.Module], parent: type[nn.Module], *arguments: Any) -> nn.Module:
    cls = _class_for(kind, parent)
    return cast(nn.Module, cls.__new__(cls, *arguments))
