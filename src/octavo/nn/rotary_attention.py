"""Attention of a user's whose rotary embedding of q and k is one kernel each.

Models rotate q and k by a function beside the class of their attention, such as `apply_rotary_pos_emb` of transformers:
28 eager operators forward and backward, which pass five times the bytes that one kernel per tensor and direction does.
A module that is adopted runs its own forward, in which the name of that function is bound to Octavo's. Caches, masks,
norms of q and k and the call of attention are its own code, and neither its class nor its file is changed.

The function is recognised by its results (`octavo.nn.probe`), in FP32 and BF16, and by the functions it calls, that
autocast does not change it. It runs itself wherever its result would have another dtype, in compiled code, where the
compiler fuses it, and once something in its code or under its name has changed.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from octavo._util.autograd import refuse_transforms
from octavo.kernels.runtime.dispatch import gains_by_kernels, is_plain
from octavo.nn.adopted import Adopted, is_taken, own_class
from octavo.nn.autocast_effects import ignores_autocast
from octavo.nn.modules import has_hooks
from octavo.nn.probe import CALLS, computes, is_as_its_class, random_tensor
from octavo.nn.recognised import Code, functions_of
from octavo.nn.rotary import rotate
from octavo.nn.side_effects import Conduct

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class RotaryAttention(Adopted):
    """Mixin for the class of a module whose forward rotates q and k; `adopt` adds it."""

    prefix = "Rotary"
    fields = ("enabled",)
    enabled: bool
    """False: compute like the parent."""
    rebound: Rebound | None = None
    """Of the class that was made for the parent; None in a process that read the module from a file, until it runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the parent's forward does."""
        if not is_compiling() and self.enabled:
            rebound = self._rebound(getattr(super().forward, "__func__", None))
            if rebound is not None:
                return rebound.forward(self, *args, **kwargs)
        return super().forward(*args, **kwargs)

    def _find_call_key(self) -> str:
        return "on" if self.enabled else "off"

    def _rebound(self, forward: Any) -> Rebound | None:
        """Return what stands for the parent's forward; None if something in it is not as it was recognised."""
        if self.rebound is None and isinstance(forward, FunctionType):
            _mixed(type(self)).rebound = Rebound(forward)
        return self.rebound if self.rebound is not None and self.rebound.is_current(forward) else None


def adopt(module: nn.Module) -> None:
    """Turn a module of which `rotations_in` finds some into a `RotaryAttention`, in place."""
    RotaryAttention.take(module, enabled=True)
    kind = _mixed(type(module))
    if kind.rebound is None or not kind.rebound.is_current(kind.parent.forward):
        kind.rebound = Rebound(kind.parent.forward)


def rotations_in(module: nn.Module, judged: dict[Any, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of the functions by which the forward of a module rotates q and k, for `adopt`.

    Args:
        judged: forward of a class -> these names, to which this one's are added.
    """
    if "forward" in vars(module):  # it was bound to the class's: hooks of other libraries do that
        return ()
    forward = (own_class(module).parent if is_taken(module) else type(module)).forward
    if not isinstance(forward, FunctionType):
        return ()
    if forward not in judged:
        judged[forward] = tuple(find_rotations(forward))
    return judged[forward]


Rotating = FunctionType | nn.Module
"""What rotates: a function, or a module around one, as the package `kernels` makes it of functions of transformers."""


def find_rotations(forward: FunctionType) -> dict[str, Rotating]:
    """Return what a forward calls by a global name to rotate q and k, by these names."""
    chain = _chain(forward)
    inner = chain[-1]
    if not _can_be_copied(chain) or inner.__module__.startswith(("torch.", "octavo.nn.")):
        return {}
    operations = {(each.opname, each.argval) for each in dis.get_instructions(inner)}
    if any(opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for opname, _ in operations):
        return {}  # they would be set in the copy's globals alone
    called = sorted(name for opname, name in operations if opname == "LOAD_GLOBAL")
    found = {name: inner.__globals__.get(name) for name in called}
    return {name: value for name, value in found.items() if value is not None and _rotates(value)}


class Rebound:
    """A forward in which functions that rotate are Octavo's; how, and what must not have changed since."""

    def __init__(self, forward: FunctionType) -> None:
        rotations = find_rotations(forward)
        chain = _chain(forward)
        self._of, self._rotations = forward, rotations
        if not rotations:  # a module from a file, whose class has another forward here
            return
        self._globals = chain[-1].__globals__
        recognised = [part for value in rotations.values() for part in _code_of(value).parts]
        self._parts = [*((each, "__code__", each.__code__) for each in chain), *recognised]
        self.forward = _with_globals(forward, {name: Rotation(each) for name, each in rotations.items()})

    def is_current(self, forward: Any) -> bool:
        """Return whether a forward is the one that was recognised, and all that it rotates by is as it was."""
        if forward is not self._of or not self._rotations:
            return False
        for name, value in self._rotations.items():
            if self._globals.get(name) is not value or _function_of(value) is None:
                return False
        return all(getattr(owner, name, None) is value for owner, name, value in self._parts)


class Rotation:
    """A function that rotates q and k (B, H, T, E) by tables (1 or B, T, E), by one kernel each."""

    def __init__(self, function: Rotating) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return both rotated, each with the strides of (B, T, H, E) transposed; by the function itself if need be."""
        if kwargs or len(args) != 4 or not _takes(*args):
            return self.function(*args, **kwargs)
        refuse_transforms()
        q, k, cos, sin = args
        return tuple(rotate(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))


def _takes(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Return whether kernels compute what the function does, and gain by it."""
    if not all(isinstance(x, Tensor) and is_plain(x) and x.dtype in _DTYPES for x in (q, k, cos, sin)):
        return False
    if not gains_by_kernels(q.device) or len({x.device for x in (q, k, cos, sin)}) > 1:
        return False
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[2] % 2 or cos.requires_grad or sin.requires_grad:
        return False
    if len({x.dtype for x in (q, k, cos, sin)}) > 1:  # the function decides of which dtype its results then are
        return False
    batch, *tables = cos.shape
    return all(x.dim() == 4 and batch in (1, x.shape[0]) and [*x.shape[2:]] == tables for x in (q, k))


def _mixed(kind: type[Any]) -> Any:
    """Return the class that was made of `RotaryAttention` and the parent, of a class derived from it."""
    return next(base for base in kind.__mro__ if RotaryAttention in base.__bases__)


# --- a function under other globals ----------------------------------------------------------------------------------


class _Globals(dict[str, Any]):
    """Globals of a function, of which some are others; the rest is looked up at each use."""

    def __init__(self, behind: dict[str, Any], instead: Mapping[str, Any]) -> None:
        # Import statements look for names with underscores, as `__package__`, in the dictionary alone.
        super().__init__({name: value for name, value in behind.items() if name.startswith("__")} | dict(instead))
        self._behind = behind

    def __missing__(self, name: str) -> Any:
        return self._behind[name]


def _chain(function: FunctionType) -> list[FunctionType]:
    """Return a function and those in it that it decorates, the innermost last."""
    wrapped = getattr(function, "__wrapped__", None)
    return [function, *(_chain(wrapped) if isinstance(wrapped, FunctionType) else [])]


def _can_be_copied(chain: list[FunctionType]) -> bool:
    """Return whether each decorator holds what it decorates as an enclosed variable, so that a copy holds a copy."""
    pairs = itertools.pairwise(chain)
    are_held = all(any(_holds(cell, inner) for cell in outer.__closure__ or ()) for outer, inner in pairs)
    return are_held and not hasattr(chain[-1], "__wrapped__")


def _with_globals(function: FunctionType, instead: Mapping[str, Any]) -> FunctionType:
    """Return a copy of a function, of a decorated one the innermost, with other values for some globals."""
    wrapped = getattr(function, "__wrapped__", None)
    if not isinstance(wrapped, FunctionType):
        return _copied(function, _Globals(function.__globals__, instead), function.__closure__)
    inner = _with_globals(wrapped, instead)
    closure = [CellType(inner) if _holds(cell, wrapped) else cell for cell in function.__closure__ or ()]
    made = _copied(function, function.__globals__, tuple(closure) or None)
    made.__wrapped__ = inner  # type: ignore[attr-defined]
    return made


def _holds(cell: CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


def _copied(function: FunctionType, own: dict[str, Any], closure: tuple[CellType, ...] | None) -> FunctionType:
    made = FunctionType(function.__code__, own, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


# --- what it computes ------------------------------------------------------------------------------------------------


class _Rotated(nn.Module):
    """x (B, T, H, E), whose first heads are q and whose others are k, rotated by a function. Tables of both halves."""

    def __init__(self, function: FunctionType | MethodType) -> None:
        super().__init__()
        self.function = function
        self.cos, self.sin = (nn.Parameter(random_tensor(1 + i, 2, _LENGTH, _WIDTH)) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k = x.transpose(1, 2).split((_HEADS - 2, 2), 1)
        return torch.cat(tuple(self.function(q, k, self.cos, self.sin)), 1).transpose(1, 2).contiguous()


_LENGTH, _HEADS, _WIDTH = 5, 5, 8


def _function_of(value: Any) -> FunctionType | MethodType | None:
    """Return a function, or the forward of a module without hooks, one of its instance, or tensors; otherwise None."""
    if not isinstance(value, nn.Module):
        return value if isinstance(value, FunctionType) else None
    is_bare = not (has_hooks(value) or value._parameters or value._buffers or value._modules)
    return value.forward if is_bare and isinstance(value.forward, MethodType) else None


def _rotates(value: Any) -> bool:
    """Return whether something rotates q and k by cos and sin, its first four arguments, and does nothing else."""
    function = _function_of(value)
    if function is None:
        return False
    names = [*inspect.signature(function).parameters]
    if not ("cos" in "".join(names[2:3]) and "sin" in "".join(names[3:4])) or not is_as_its_class(_Rotated(function)):
        return False

    def draw(*_: int) -> Tensor:
        return random_tensor(0, 2, _LENGTH, _HEADS, _WIDTH)

    is_rotation = computes(
        lambda training: _Rotated(function).train(training), _formula, draw, 1e-5, CALLS, Conduct(in_bf16=True)
    )
    return is_rotation and ignores_autocast(_Rotated(function).bfloat16(), draw().bfloat16())


def _formula(probe: nn.Module, x: Tensor) -> Tensor:
    """Return what `octavo.kernels.rotary` defines, in FP64."""
    cos, sin = (cast(Tensor, table).double()[:, :, None] for table in (probe.cos, probe.sin))
    first, second = x.double().chunk(2, dim=-1)
    return x.double() * cos + torch.cat((-second, first), dim=-1) * sin


def _code_of(value: Rotating) -> Code:
    probe = _Rotated(cast(FunctionType | MethodType, _function_of(value)))
    return Code.of(probe, functions_of(probe))
