"""Classes of converted modules: one of Octavo's mixed into the module's own, created at run time."""

from __future__ import annotations

import sys
from typing import Any, TypeGuard, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from octavo.errors import UnsupportedError
from octavo.nn.switch import Switchable
from octavo.tensor import FP8Tensor, SavedFP8Tensor, local

_CLASSES: dict[tuple[type[nn.Module], ...], type[Any]] = {}
"""(class of Octavo, class of a module) -> the class derived from both."""


class Adopted(Switchable):
    """Mixin for the class of a module; it comes before the user's class in the method resolution order."""

    parent: type[nn.Module]
    """The class before conversion. A class has this attribute of its own unless it is a subclass that a user wrote."""
    parent_forward: Any
    """The parent's `forward` when the class was created, which Octavo computes in its place."""
    prefix = ""
    """Prefix of the class name."""
    fields: tuple[str, ...] = ()
    """Attributes that `take` sets, and others that `release` removes with them."""
    call_key: str
    """Everything besides tensors and classes that determines how the module computes, as text (`_find_call_key`).
    Renewed whenever one of `fields` is set, so that compiled code guards on it alone, not on each field."""

    _every_field: frozenset[str] = frozenset()
    """`fields` of the class and its bases: a module may be taken twice."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._every_field = frozenset(name for base in cls.__mro__ if issubclass(base, Adopted) for name in base.fields)

    @classmethod
    def take(cls, module: nn.Module, **fields: Any) -> None:
        """Mix this class into that of a module, in place; everything attached to it stays."""
        if not isinstance(module, cls):
            module.__class__ = _class_for(cls, type(module))
        vars(module).update(fields)
        cast(Adopted, module)._renew_call_key()

    def _find_call_key(self) -> str:
        """Return what becomes `call_key`. It names no object: equal modules share compiled code."""
        return ""

    def _renew_call_key(self) -> None:
        vars(self)["call_key"] = sys.intern(self._find_call_key())

    def __setattr__(self, name: str, value: Any) -> None:
        decides = name in type(self)._every_field  # asked before `__class__` is set to one of PyTorch's
        super().__setattr__(name, value)
        if decides:
            self._renew_call_key()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._renew_call_key()

    def __prepare_scriptable__(self) -> Any:
        raise UnsupportedError(
            f"torch.jit.script cannot compile {type(self).__name__}, a module that octavo.convert has changed: it "
            "takes a part of Python alone. Use torch.compile or torch.export, or call octavo.revert(model) first."
        )

    def release(self) -> None:
        """Turn this module back into its original class, in place."""
        own = own_class(self)
        for name in (*own.fields, "call_key"):
            self.__dict__.pop(name, None)
        self.__class__ = _without(own, type(self))
        if isinstance(self, Adopted):  # taken twice
            self._renew_call_key()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in () if keep_vars else self._parameters:
            if isinstance(weight := destination.get(prefix + name), FP8Tensor):
                destination[prefix + name] = SavedFP8Tensor.of(weight)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, *messages: list[str]
    ) -> None:
        for name in self._parameters:  # the caller's dict is another one; `assign` makes a parameter of it
            if isinstance(saved := state_dict.get(prefix + name), SavedFP8Tensor):
                state_dict[prefix + name] = saved.plain()
        messages[-1].extend(refuse_bare_codes(self, state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *messages)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Reduce to the parent's class: no file can name a class that was created at run time."""
        reduced, bases = cast(tuple[Any, ...], super().__reduce_ex__(protocol)), type(self).__bases__
        is_of_a_file = _CLASSES.get(bases) is not type(self)
        if is_of_a_file or reduced[1][:1] != (type(self),):  # or reduced in the user's own way
            return reduced
        return _rebuild, (*bases, *reduced[1][1:]), *reduced[2:]


def refuse_bare_codes(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> list[str]:
    """Return errors for codes without their scales, which PyTorch would copy as values, also without `strict`."""
    return [
        f"{prefix}{name} is {given.dtype} without a scale, but this layer has weights of {own.dtype}. It is probably"
        " from an export for inference: dequantise it first, or load a training checkpoint."
        for name, own in module._parameters.items()
        if own is not None and _are_bare_codes(given := state_dict.get(prefix + name)) and not _are_bare_codes(own)
    ]


def _are_bare_codes(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor of FP8 codes without their scales."""
    if not isinstance(value, Tensor) or isinstance(local(value), FP8Tensor):
        return False
    return value.is_floating_point() and value.element_size() == 1


def own_class(module: nn.Module) -> Any:
    """Return the class of a module, without those that FSDP2 and parametrizations put in front of it."""
    cls = type(module)
    while _is_in_front(cls):
        cls = cls.__bases__[-1]
    return cls


def _is_in_front(cls: type) -> bool:
    if cls.__bases__[0].__module__.startswith("torch.distributed.fsdp"):
        return True
    is_of_parametrize = cls.__module__ == parametrize.__name__ and cls.__name__.startswith("Parametrized")
    return is_of_parametrize and "parent" not in vars(cls)


def _without(own: Any, cls: type[Any]) -> type[Any]:
    """Return a class with those that are in front of `own`, and the parent in the place of `own`."""
    if cls is own:
        return cls.parent  # type: ignore[no-any-return]
    *others, behind = cls.__bases__
    released = _without(own, behind)
    names = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__.removesuffix(behind.__name__) + released.__name__, (*others, released), names)


def is_taken(module: nn.Module) -> bool:
    """Return whether a module has a class of Octavo's, other than a subclass that a user wrote."""
    return isinstance(module, Adopted) and "parent" in vars(own_class(module))


def _class_for(kind: type[nn.Module], parent: type[nn.Module]) -> type[Any]:
    """Return the class for a module of class `parent` that computes by `kind`: `kind` itself if it is a subclass."""
    if issubclass(kind, parent):
        return kind
    if (kind, parent) not in _CLASSES:
        names = {
            "parent": parent,
            "parent_forward": parent.forward,
            "__module__": parent.__module__,
            "__doc__": parent.__doc__,
        }
        _CLASSES[kind, parent] = type(getattr(kind, "prefix", "") + parent.__name__, (kind, parent), names)
    return _CLASSES[kind, parent]


def _rebuild(kind: type[nn.Module], parent: type[nn.Module], *arguments: Any) -> nn.Module:
    cls = _class_for(kind, parent)
    return cast(nn.Module, cls.__new__(cls, *arguments))
