"""Blocks whose residual sums are computed by the norms that read them (`octavo.nn.stream`).

    x = x + attention(norm(x)); x = x + mlp(norm(x))

In eager code each sum is a pass that reads two matrices and writes one, which the next norm reads again; and in
backward so is each sum of the gradients of a norm and of what passes by it. A module that is adopted runs its own
forward with a stream in the place of its first argument: caches, masks, scales of branches and further norms are its
own code, and neither its class nor its file is changed. Five of six passes go: the last sum of a block is left, since
what reads it is another module.

That a forward takes a stream is tried on a copy whose children are other functions, in FP32 and BF16. It runs as it is
in compiled code, which fuses sums by itself, beside hooks of the norms, which would see the stream, and once its class
has another forward.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._pytree import tree_flatten

from octavo.kernels.runtime.dispatch import gains_by_kernels, is_plain
from octavo.nn.adopted import Adopted, is_taken, own_class
from octavo.nn.modules import OF_EVERY_MODULE, has_hooks
from octavo.nn.norm import Norm
from octavo.nn.probe import as_written, random_tensor, shallow_copy
from octavo.nn.recognised import names_in
from octavo.nn.stream import Stream, materialize


class ResidualBlock(Adopted):
    """Mixin for the class of a block; `adopt` adds it, `release` removes it."""

    prefix = "Residual"
    fields = ("enabled",)
    enabled: bool
    """False: compute like the parent."""
    tried_code: CodeType | None = None
    """Code of the parent's forward when it was tried, of the class that was made for the parent; None in a process that
    read the module from a file, until it runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the parent's forward does."""
        if is_compiling() or not args or not self._takes(args[0]):
            return super().forward(*args, **kwargs)
        return materialize(super().forward(Stream(args[0]), *args[1:], **kwargs))

    def _find_call_key(self) -> str:
        return "on" if self.enabled else "off"

    def _takes(self, x: Any) -> bool:
        """Return whether norms in this block gain by a stream of x, and nothing else sees it."""
        if not self.enabled or not isinstance(x, Tensor) or not is_plain(x) or not gains_by_kernels(x.device):
            return False
        norms = [child for child in self._modules.values() if isinstance(child, Norm)]
        if not norms or _has_any_global_hook() or any(map(has_hooks, norms)):
            return False
        kind = _mixed(type(self))
        if kind.tried_code is None and norms_of_stream(self, [k for k, v in self._modules.items() if v in norms]):
            kind.tried_code = _code_of(kind.parent.forward)
        return kind.tried_code is not None and kind.tried_code is _code_of(kind.parent.forward)


def adopt(module: nn.Module) -> None:
    """Turn a module in which `norms_of_stream` finds some into a `ResidualBlock`, in place."""
    ResidualBlock.take(module, enabled=True)
    kind = _mixed(type(module))
    kind.tried_code = _code_of(kind.parent.forward)


def norms_of_stream(module: nn.Module, norms: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the norms to which the forward of a module hands its residual stream; empty if it takes none.

    Args:
        norms: names of the module's children that are norms, or may become ones.
    """
    forward = (own_class(module).parent if is_taken(module) else type(module)).forward
    if "forward" in vars(module) or not norms or not isinstance(forward, FunctionType):
        return ()
    if not _NEEDS_TENSORS.isdisjoint(_names_of(type(module), forward)):
        return ()
    others = [name for name, child in module._modules.items() if child is not None and name not in norms]
    if not others or len(others) > _MOST_CHILDREN:
        return ()
    with as_written():
        # Tuples first: a forward takes the first row of a tensor, too, where it expects the first of two results.
        for are_tuples in itertools.product((True, False), repeat=len(others)):
            kinds: dict[str, type[Any]] = dict.fromkeys(norms, _Normalises)
            kinds |= {name: _InTuple if each else _Part for name, each in zip(others, are_tuples, strict=True)}
            if (found := _tried(module, forward, kinds)) is not None:
                return found
    return ()


_NEEDS_TENSORS = frozenset(
    (
        "is_tensor",
        "Tensor",
        "type",
        "id",
        "apply",
        "checkpoint",
        "checkpoint_sequential",
        "_gradient_checkpointing_func",
    )
)
"""Names in code that may see that a stream is no tensor, or has no gradient for it: functions with a backward of their
own, such as recomputation, which may be off while a forward is tried."""
_MOST_CHILDREN = 4
"""Children besides norms, whose results may be tensors or tuples."""
_SHAPE = 5, 3, 8
"""Of the stream: it cannot be unpacked as two or three results."""


def _names_of(kind: type[nn.Module], forward: FunctionType) -> set[str]:
    """Return the names in the code of a forward, and in the methods of its class that it names."""
    names: set[str] = set()
    waiting: list[Any] = [forward]
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if isinstance(function, FunctionType):
            added = names_in(function) - names
            names |= added
            waiting += [getattr(kind, name) for name in added if hasattr(kind, name) and not hasattr(nn.Module, name)]
    return names


def _mixed(kind: type[Any]) -> Any:
    """Return the class that was made of `ResidualBlock` and the parent, of a class derived from it."""
    return next(base for base in kind.__mro__ if ResidualBlock in base.__bases__)


def _code_of(forward: Any) -> CodeType | None:
    """Return the code of a function, of a decorated one the innermost."""
    return getattr(inspect.unwrap(forward), "__code__", None)


class _Part:
    """In front of the class of a child: a function of the first tensor that it gets, which must not be a stream."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = tree_flatten((args, kwargs))[0]
        if any(isinstance(each, Stream) for each in given):
            raise TypeError("it gets the stream")
        x = next(each for each in given if isinstance(each, Tensor))
        return x.flip(-1) * 0.75 + x


class _InTuple(_Part):
    """The same in a tuple, as attention of transformers returns its weights too."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs), None


class _Normalises:
    """In front of the class of a norm: a function that takes streams as `Norm` does, and notes whether it got one."""

    gets_stream = False

    def __call__(self, x: Any) -> Any:
        if isinstance(x, Stream):
            self.gets_stream = True
        value = materialize(x)
        return value * 1.25 - value.flip(-1)


def _tried(module: nn.Module, forward: FunctionType, kinds: dict[str, type[Any]]) -> tuple[str, ...] | None:
    """Return the names of the norms that get a stream, none if results differ; None if the forward cannot run so."""
    found: set[str] = set()
    for training, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
        x = random_tensor(0, *_SHAPE).to(dtype).requires_grad_(training)
        results = []
        for given in (x, Stream(x)):
            copied = shallow_copy(module, training)
            for name, kind in kinds.items():
                child: Any = copied._modules[name]
                child.__class__ = type(kind.__name__, (kind, type(child)), {})
            torch.default_generator.manual_seed(0)
            try:
                with torch.enable_grad():
                    result = materialize(forward(copied, given, *_missing(forward)))
                    results.append((result, _gradients(result, x) if training else ()))
            except Exception:
                return None if given is x else ()
            if _holds_stream(copied):
                return ()
            found |= {name for name in kinds if getattr(copied._modules[name], "gets_stream", False)}
        if not _are_equal(*results):
            return ()
    return tuple(name for name in kinds if name in found)


def _gradients(result: Any, x: Tensor) -> tuple[Any, ...]:
    """Return which tensors of a result have a gradient, and that of x."""
    tensors = [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]
    trained = [each for each in tensors if each.requires_grad]
    ones = [torch.ones_like(each) for each in trained]
    found = torch.autograd.grad(trained, x, ones, allow_unused=True) if trained else ()
    return tuple(each.requires_grad for each in tensors), found


def _holds_stream(module: nn.Module) -> bool:
    """Return whether a forward has left a stream to its module, where others would read it."""
    held = [value for name, value in vars(module).items() if name not in OF_EVERY_MODULE]
    return any(isinstance(each, Stream) for each in tree_flatten(held)[0])


def _missing(forward: Any) -> list[None]:
    """Return None for each argument behind the first that a forward demands."""
    parameters = [*inspect.signature(forward).parameters.values()][2:]
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    return [None for each in positional if each.default is each.empty]


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two results have the same structure and the same bits."""
    (parts, structure), (others, same) = tree_flatten(first), tree_flatten(second)
    if structure != same or not any(isinstance(part, Tensor) for part in parts):
        return False
    pairs = zip(parts, others, strict=True)
    return all(
        (type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)) if isinstance(a, Tensor) else a == b
        for a, b in pairs
    )
