"""Comparison of a user's module with a formula, by running its `forward` on a copy.

To be replaced by another kernel, a module must compute the formula and nothing else, in training and in evaluation, in
every call. So a copy runs several times in both modes, each time with another seed. Results must agree, and gradients
too. What values do not show is compared as well:

- The result is a plain, contiguous tensor of the dtype that the formula's would have, in memory of its own.
- A call draws no random number (LayerDrop, noise, dropout) and changes no state: attributes of the module and of its
  class, globals and enclosed variables of its code, and objects that these hold (counters, cached results). It writes
  to no tensor that it was given, and takes part in no collective.
- Its operations are those that the caller allows (`Conduct`): it multiplies as often as the formula, in the dtype of
  the result, and lets backward recompute no more than the formula's replacement does.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from octavo.nn.adopted import is_taken, own_class
from octavo.nn.modules import OF_EVERY_MODULE, is_position
from octavo.nn.recognised import Recognised, enclosed, functions_of, names_in

CALLS = 3
"""Number of calls in each mode."""
_ROUNDED = 5e-2
"""Tolerance of results in BF16: some roundings of 2^-9 each."""
_CONTAINERS = (dict, list, set, deque)
_NUMBERS_AND_STRINGS = (bool, int, float, str, type(None))
_UNCHANGING = {*_NUMBERS_AND_STRINGS, FunctionType, BuiltinFunctionType, ModuleType, type, property}
"""Types of values without state, or whose state is looked at where code names it."""
T = TypeVar("T")


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


def computes(
    make: Callable[[bool], nn.Module],
    formula: Callable[..., Tensor],
    draw: Callable[..., Tensor],
    tolerance: float,
    calls: int = CALLS,
    conduct: Conduct = Conduct(),
) -> bool:
    """Return whether the `forward` of a module is `formula` and nothing else.

    Args:
        make: returns a copy of the module (`shallow_copy`), for training or not.
        formula: `formula(copy, x)`, differentiable; a result in FP64 is compared in it.
        draw: returns x, (..., D), with these leading dimensions if it gets any. Gradients are compared where |x| <= 10,
            and in FP32 only.
        tolerance: relative to the largest element of a row.
        calls: number of calls in each mode; gradients are compared in the second.
        conduct: what else a call does; by default, anything that leaves no trace.
    """
    with _as_written():
        trials = [_Trial(draw(), call, tolerance) for call in range(calls)]
        trials += [_Trial(draw(*shape), 1, tolerance, may_fail=True) for shape in conduct.shapes]
        trials += [_Trial(draw().bfloat16(), 0, _ROUNDED, may_fail=True)] * conduct.in_bf16
        trials += [_Trial(draw(), 0, _ROUNDED, autocast=True)] * conduct.under_autocast
        return all(
            _passes(_moved(_in_dtype(make(training), trial.x.dtype), trial.call), formula, trial, conduct)
            for training, trial in itertools.product((True, False), trials)
        )


class _Trial(NamedTuple):
    """A call of a copy in the dtype of x."""

    x: Tensor
    call: int
    """Seed; gradients are compared in call 1."""
    tolerance: float
    autocast: bool = False
    may_fail: bool = False
    """Whether the module may refuse x. Gradients are not compared then, as those of one row are not exact enough."""

    @property
    def differentiates(self) -> bool:
        """Whether forward saves what backward needs."""
        return self.call == 1 and self.x.dtype == torch.float32

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return torch.bfloat16 if self.autocast else self.x.dtype


def is_as_its_class(module: nn.Module) -> bool:
    """Return whether a module does what its class says: `forward` is not patched, and no tensor is a plain attribute.

    Writes to such a tensor could not be noticed later. Nor may there be `__slots__`, which copies lack. Linear layers
    may have both. A module that prints is not recognised either: its replacement would not, and copies would.
    """
    parts = [each for each in module.modules() if not isinstance(each, nn.Linear)]
    holds_tensors = any(isinstance(value, Tensor) for each in parts for value in vars(each).values())
    has_slots = any(vars(base).get("__slots__") for each in parts for base in type(each).__mro__)
    if "forward" in vars(module) or holds_tensors or has_slots:
        return False
    return not any("print" in names_in(function) for function in functions_of(module))


def judge_once(judge: Callable[[nn.Module], T]) -> Callable[[nn.Module], T]:
    """Return a function that calls `judge`, which probes a module, once for all modules whose copies would act alike.

    The blocks of a model hold the same settings: of all its MLPs one is probed. Two modules are alike if their classes
    and all attributes are equal. For parameters and linear layers inside, only shapes and sharing count, since probes
    replace them. The modules must not change between calls.
    """
    known: dict[tuple[Any, ...], T] = {}

    def judged(module: nn.Module) -> T:
        key = _probe_key(module), _sharing(module)
        if key not in known:
            known[key] = judge(module)
        return known[key]

    return judged


def _probe_key(module: nn.Module) -> tuple[Any, ...]:
    """Return a key of the class, attributes and children that a module shares with its copies."""
    held = ((name, _identity(value)) for name, value in vars(module).items() if name not in OF_EVERY_MODULE)
    parameters = ((name, None if p is None else p.shape) for name, p in module._parameters.items())
    buffers = ((name, id(buffer)) for name, buffer in module._buffers.items())
    children = ((name, _child_key(child)) for name, child in module._modules.items())
    return type(module), *map(tuple, (held, parameters, buffers, children))


def _sharing(module: nn.Module) -> tuple[int, ...]:
    """Return a number per module and parameter inside; those under two names, as of tied layers, have one number."""
    modules = (each for _, each in module.named_modules(remove_duplicate=False))
    parameters = (each for _, each in module.named_parameters(remove_duplicate=False))
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(id(each), len(numbers)) for each in itertools.chain(modules, parameters))


def _child_key(child: nn.Module | None) -> tuple[Any, ...] | None:
    if isinstance(child, nn.Linear):
        return nn.Linear, child.in_features, child.out_features, child.bias is None
    return None if child is None else _probe_key(child)


def _identity(value: Any) -> tuple[type, Any]:
    """Return a key of a value: the number or string itself (0.0 is not -0.0), or the address of any other object."""
    return type(value), repr(value) if type(value) in _NUMBERS_AND_STRINGS else id(value)


def _in_dtype(probe: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy with parameters of a dtype; those in another one are replaced, as the original may share them."""
    for module in probe.modules():
        named = module._parameters.items()
        module._parameters = {
            name: p if p is None or p.dtype == dtype else nn.Parameter(p.detach().to(dtype)) for name, p in named
        }
    return probe


def _moved(probe: nn.Module, call: int) -> nn.Module:
    """Return a copy whose modules have their own position in the first call, none in the second, then another one.

    No result may depend on a position, since `octavo.nn.recognised` does not notice that one changes.
    """
    for attributes in map(vars, probe.modules() if call else ()):
        for name in [name for name, value in attributes.items() if is_position(name, value)]:
            position = attributes.pop(name)
            if call > 1:
                attributes[name] = position + ("_" if isinstance(position, str) else 1000)
    return probe


@contextmanager
def _as_written() -> Iterator[None]:
    """Run modules as they are written, on real tensors on the CPU, and restore the random states at the end."""
    states = random.getstate(), _numpy_state()
    try:
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())  # where all tensors are fake, everything would agree
            for context in (torch.device("cpu"), torch.inference_mode(False), torch.autocast("cpu", enabled=False)):
                stack.enter_context(context)
            if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import takes a second
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.random.fork_rng([]))
            yield
    finally:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy.random"].set_state(states[1])


def random_tensor(seed: int, *shape: int) -> Tensor:
    """Return FP32 normal numbers on the CPU, whatever the default device or mode."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")


def shallow_copy(module: nn.Module, training: bool) -> nn.Module:
    """Return a copy of a tree of modules as they were before conversion, in that mode and without hooks.

    It shares tensors and objects with the original, but has dictionaries, lists and sets of its own.
    """
    own = own_class(module)
    copied = copy.copy(module) if own is type(module) else own.__new__(own)  # FSDP2's class copies by its arguments
    held = {name: copy.copy(value) if isinstance(value, _CONTAINERS) else value for name, value in vars(module).items()}
    hooks: dict[str, Any] = {name: type(value)() for name, value in vars(module).items() if name.endswith("_hooks")}
    children = {name: child and shallow_copy(child, training) for name, child in module._modules.items()}
    vars(copied).update(held | hooks, training=training, _modules=children, _compiled_call_impl=None)
    if isinstance(copied, Recognised) and is_taken(copied):
        copied.release()
    return copied


def _passes(probe: nn.Module, formula: Callable[..., Tensor], trial: _Trial, conduct: Conduct) -> bool:
    x, differentiates = trial.x, trial.differentiates
    if differentiates:
        x = x.clamp(-10, 10).requires_grad_()  # beyond this a user's formula may have infinite gradients
    _seed(trial.call)
    functions = functions_of(probe)
    before, operations = list(_state(probe, functions)), _Operations((x, *probe.parameters()))
    try:
        with torch.set_grad_enabled(differentiates), _autocast() if trial.autocast else nullcontext(), operations:
            y = type(probe).forward(probe, x)  # without the hooks of `__call__`
    except Exception:  # it needs more than one tensor
        return trial.may_fail
    if not _is_plain(y, x.shape, trial.dtype) or operations.breaks(conduct, y, x, differentiates):
        return False
    with torch.set_grad_enabled(differentiates):
        expected = formula(probe, x)
    if not _agree(y.detach(), expected.detach(), trial.tolerance) or y.requires_grad != differentiates:
        return False
    if differentiates and not trial.may_fail and not _gradients_agree(y, expected, [x, *probe.parameters()]):
        return False
    return list(_state(probe, functions)) == before


def _seed(call: int) -> None:
    torch.default_generator.manual_seed(call)  # `torch.manual_seed` seeds the GPUs, too, whose states are not restored
    random.seed(call)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(call)


def _is_plain(y: Any, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Return whether y is a contiguous tensor of this shape and dtype, of no subclass, without attributes or hooks."""
    if type(y) is not Tensor or y.shape != shape or y.dtype != dtype or y.layout != torch.strided:
        return False
    return y.is_contiguous() and not vars(y) and not y._backward_hooks


def _gradients_agree(y: Tensor, expected: Tensor, inputs: list[Tensor]) -> bool:
    dy = random_tensor(len(inputs), *y.shape)
    # Of a sum, as PyTorch imports its compiler to compare the shapes of other gradients.
    found, wanted = (torch.autograd.grad((out * dy).sum(), inputs, allow_unused=True) for out in (y, expected))
    return all(a is not None and b is not None and _agree(a, b, 1e-4) for a, b in zip(found, wanted, strict=True))


def _agree(y: Tensor, expected: Tensor, tolerance: float) -> bool:
    bound = tolerance * expected.abs().amax(-1, keepdim=True) + 1e-12
    return bool(((y.to(expected.dtype) - expected).abs() <= bound).all())


@contextmanager
def _autocast() -> Iterator[None]:
    """Enable autocast on the CPU, where copies run, and for CUDA, as a region of their code may disable that."""
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.set_autocast_enabled("cuda", before)


_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.addbmm, _aten.mv, _aten.addmv, _aten.dot, _aten.linear,
}  # fmt: skip
_READS = {_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten._assert_async}
"""Operators by which Python reads values, or that raise if values are not as they should be."""


class _Operations(TorchDispatchMode):
    """What the operators of a call do besides computing its result. Tensors in `held` belong to others."""

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self._held = {_address(tensor) for tensor in held} - {0}
        self._products: list[torch.dtype] = []
        """Dtype of each product's result."""
        self._saved: dict[int, Tensor] = {}
        """Tensors saved for backward, one of each memory."""
        self._writes, self._reads = False, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what PyTorch would do otherwise imports its compiler

    def __enter__(self) -> _Operations:
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
        super().__init__()  # type: ignore[no-untyped-call]
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


def _state(probe: nn.Module, functions: Iterable[FunctionType]) -> Iterator[Any]:
    """Yield what a call must not change: the random states, and what the modules and their code refer to."""
    yield torch.get_rng_state().numpy().tobytes()
    yield random.getstate()
    if (state := _numpy_state()) is not None:
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
    elif isinstance(value, _CONTAINERS):
        yield from map(_itself, itertools.chain(value, value.values() if isinstance(value, dict) else ()))
    elif not isinstance(value, nn.Module) and not _is_of_libraries(type(value).__module__):
        yield from map(_itself, getattr(value, "__dict__", {}).values())


def _itself(value: Any) -> Any:
    """Return a number or string, or the address of any other object."""
    return value if type(value) in _NUMBERS_AND_STRINGS else id(value)


def _numpy_state() -> Any:
    """Return the state of NumPy's random numbers; None if no code can have drawn one, as it takes an import."""
    if "numpy.random" not in sys.modules:
        return None
    return sys.modules["numpy.random"].get_state()


def _is_numpy_generator(value: Any) -> bool:
    return "numpy.random" in sys.modules and isinstance(value, sys.modules["numpy.random"].Generator)
