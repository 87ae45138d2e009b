"""What a call of a module does besides returning its result: products, writes, reads, tensors saved, state changed."""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.nn.recognised import enclosed, names_in

CONTAINERS = (dict, list, set, deque)
NUMBERS_AND_STRINGS = (bool, int, float, str, type(None))
_UNCHANGING = {*NUMBERS_AND_STRINGS, FunctionType, BuiltinFunctionType, ModuleType, type, property}
"""Types of values without state, or whose state is looked at where code names it."""


@dataclass(frozen=True)
class Conduct:
    """What a call of a module may and must do besides returning its result, so that a formula may replace it."""

    products: int | None = None
    """Largest number of matrix products in forward, all in the dtype of the result: more compute in tiles, or a layer
    twice. None: any, in any dtype."""
    saved: int = 0
    """Least number of elements per row of x that forward saves for backward, beside x and the parameters. A module that
    saves fewer recomputes or compresses them, and its replacement would need more memory."""
    reads_values: bool = False
    """Whether Python may read values of tensors, as a loop over experts does. Otherwise they may decide something."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Further leading dimensions of x to try. A module may refuse them by an error."""
    in_bf16: bool = False
    """Whether a copy in BF16 is tried too. A module may refuse it on a CPU."""
    under_autocast: bool = False
    """Whether a copy is tried under autocast to BF16 too, which its result has then."""


_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.addbmm, _aten.mv, _aten.addmv, _aten.dot, _aten.linear,
}  # fmt: skip
_READS = {_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten._assert_async}
"""Operators by which Python reads values, or that raise if values are not as they should be."""


class Operations(TorchDispatchMode):
    """What the operators of a call do besides computing its result. Tensors in `held` belong to others."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held = {_address(tensor) for tensor in held} - {0}
        self._products: list[torch.dtype] = []
        """Dtype of each product's result."""
        self._saved: dict[int, Tensor] = {}
        """Tensors saved for backward, one of each memory."""
        self._writes, self._reads = False, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what PyTorch would do otherwise imports its compiler

    def __enter__(self) -> Operations:
        self._calls = _Calls()
        self._around = ExitStack()
        self._around.enter_context(saved_tensors_hooks(self._save, lambda tensor: tensor))
        self._around.enter_context(self._calls)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._around.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket in _PRODUCTS:
            self._products.append(result.dtype)
        self._reads |= func.overloadpacket in _READS
        self._writes |= "c10d" in func.namespace
        if func._schema.is_mutable:
            named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
            written = [named.get(each.name) for each in func._schema.arguments if each.is_write]
            self._writes |= any(isinstance(x, Tensor) and _address(x) in self._held for x in written)
        return result

    def _save(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # not itself: a result that refers to itself is never freed
        self._saved.setdefault(_address(kept), kept)
        return kept

    def breaks(self, conduct: Conduct, y: Tensor, x: Tensor, differentiates: bool) -> bool:
        """Return whether a call with result y for x did anything that `conduct` excludes."""
        if self._writes or _address(y) in self._held or (self._reads and not conduct.reads_values):
            return True
        if conduct.products is not None:
            is_tiled = len(self._products) > conduct.products
            if is_tiled or {*self._products} != {y.dtype} or self._calls.sets_autocast or self._calls.sets_hooks:
                return True
        kept = sum(t.untyped_storage().nbytes() for address, t in self._saved.items() if address not in self._held)
        return differentiates and kept < conduct.saved * x.shape[:-1].numel() * x.itemsize


class _Calls(TorchFunctionMode):
    """Whether a region of the code sets autocast to something else, and whether it sets hooks of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._outside, self.sets_autocast, self.sets_hooks = torch.is_autocast_enabled("cuda"), False, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.sets_autocast |= torch.is_autocast_enabled("cuda") != self._outside
        self.sets_hooks |= func in _HOOKS
        return func(*args, **(kwargs or {}))


_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)


def _address(tensor: Tensor) -> int:
    """Return a number of a tensor's memory; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def state_of(probe: nn.Module, functions: Iterable[FunctionType]) -> Iterator[Any]:
    """Yield what a call must not change: the random states, and what the modules and their code refer to."""
    yield torch.get_rng_state().numpy().tobytes()
    yield random.getstate()
    if (state := numpy_state()) is not None:
        yield from (state[1].tobytes(), state[2:])
    for value in itertools.chain(_attributes(probe), _variables(functions)):
        yield from _contents(value)


def _attributes(probe: nn.Module) -> Iterator[Any]:
    """Yield the attributes of modules and of their classes."""
    for module in probe.modules():
        yield from vars(module).values()
    kinds = dict.fromkeys(base for module in probe.modules() for base in type(module).__mro__)
    for kind in kinds:
        if not _is_of_libraries(kind.__module__):
            yield from vars(kind).values()


def _variables(functions: Iterable[FunctionType]) -> Iterator[Any]:
    """Yield the globals that functions name, in modules that these name too, and the variables that they enclose."""
    for function in functions:
        names = names_in(function)
        values = [function.__globals__[name] for name in names if name in function.__globals__]
        spaces = [v for v in values if isinstance(v, ModuleType | type) and not _is_of_libraries(_home(v))]
        yield from values
        yield from (vars(space)[name] for space in spaces for name in names if name in vars(space))
        yield from enclosed(function)


def _home(space: ModuleType | type) -> str:
    return space.__name__ if isinstance(space, ModuleType) else space.__module__


def _is_of_libraries(name: str | None) -> bool:
    """Return whether a module is of PyTorch or of Python, whose state is not a user's."""
    top = (name or "").partition(".")[0]
    return top == "torch" or (top in sys.stdlib_module_names and top != "__main__")


def _contents(value: Any) -> Iterator[Any]:
    """Yield what tells whether an object has changed: itself, and the objects in it."""
    yield _itself(value)
    if type(value) in _UNCHANGING:
        return
    if isinstance(value, torch.Generator):
        yield value.get_state().numpy().tobytes()
    elif isinstance(value, random.Random):
        yield value.getstate()
    elif _is_numpy_generator(value):
        yield str(value.bit_generator.state)
    elif isinstance(value, itertools.count):
        yield repr(value)
    elif isinstance(value, Tensor):
        yield None if value.is_inference() else value._version
    elif isinstance(value, CONTAINERS):
        yield from map(_itself, itertools.chain(value, value.values() if isinstance(value, dict) else ()))
    elif not isinstance(value, nn.Module) and not _is_of_libraries(type(value).__module__):
        yield from map(_itself, getattr(value, "__dict__", {}).values())


def _itself(value: Any) -> Any:
    """Return a number or string, or the address of any other object."""
    return value if type(value) in NUMBERS_AND_STRINGS else id(value)


def numpy_state() -> Any:
    """Return the state of NumPy's random numbers; None if no code can have drawn one, as it takes an import."""
    if "numpy.random" not in sys.modules:
        return None
    return sys.modules["numpy.random"].get_state()


def _is_numpy_generator(value: Any) -> bool:
    return "numpy.random" in sys.modules and isinstance(value, sys.modules["numpy.random"].Generator)
