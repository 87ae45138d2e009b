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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from octavo.nn.adopted import is_taken, own_class
from octavo.nn.modules import OF_EVERY_MODULE, is_position
from octavo.nn.recognised import Recognised, functions_of, names_in, parts_of
from octavo.nn.side_effects import CONTAINERS, NUMBERS_AND_STRINGS, Conduct, Operations, numpy_state, state_of

CALLS = 3
"""Number of calls in each mode."""
_ROUNDED = 5e-2
"""Tolerance of results in BF16: some roundings of 2^-9 each."""
_NO_TRACE = Conduct()
T = TypeVar("T")


def computes(
    make: Callable[[bool], nn.Module],
    formula: Callable[..., Tensor],
    draw: Callable[..., Tensor],
    tolerance: float,
    calls: int = CALLS,
    conduct: Conduct = _NO_TRACE,
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
    with as_written():
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
    parts = parts_of(module)
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
    return type(value), repr(value) if type(value) in NUMBERS_AND_STRINGS else id(value)


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
def as_written() -> Iterator[None]:
    """Run modules as they are written, on real tensors on the CPU, and restore the random states at the end."""
    states = random.getstate(), numpy_state()
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
    held = {name: copy.copy(value) if isinstance(value, CONTAINERS) else value for name, value in vars(module).items()}
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
    before, operations = list(state_of(probe, functions)), Operations((x, *probe.parameters()))
    try:
        with torch.set_grad_enabled(differentiates), _autocast() if trial.autocast else nullcontext(), operations:
            y = type(probe).forward(probe, x)  # without the hooks of `__call__`
    except Exception:  # it needs more than one tensor
        return trial.may_fail
    with torch.set_grad_enabled(differentiates):
        expected = formula(probe, x)
    if not _is_plain(y, expected.shape, trial.dtype) or operations.breaks(conduct, y, x, differentiates):
        return False
    if not _agree(y.detach(), expected.detach(), trial.tolerance) or y.requires_grad != differentiates:
        return False
    if differentiates and not trial.may_fail and not _gradients_agree(y, expected, [x, *probe.parameters()]):
        return False
    return list(state_of(probe, functions)) == before


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
    got, wanted = (torch.autograd.grad((out * dy).sum(), inputs, allow_unused=True) for out in (y, expected))
    if any(gradient is None for gradient in (*got, *wanted)):
        return False
    # A row of a weight's gradient is a sum over all rows of x: it may cancel, and is compared with its matrix.
    return _agree(got[0], wanted[0], 1e-4) and all(
        _agree(a.flatten(-2) if a.dim() > 1 else a, b.flatten(-2) if b.dim() > 1 else b, 1e-4)
        for a, b in zip(got[1:], wanted[1:], strict=True)
    )


def _agree(y: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether two results are equal, relative to the largest element of a row."""
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
