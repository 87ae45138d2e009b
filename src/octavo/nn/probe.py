"""Comparison of a user's module with a formula, by running its `forward` on a copy.

To be replaced by another kernel, a module must compute the formula and nothing else, in training and in evaluation, in
every call. So a copy runs several times in both modes, each time with another seed. Results must agree, and gradients
too. A call that draws a random number (LayerDrop, noise, dropout) or changes an attribute (a counter, a cached result)
is rejected even if its result agrees. State outside the module, such as a global counter, is detected only if it
affects a result.
"""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from octavo.nn.adopted import is_taken, own_class
from octavo.nn.modules import OF_EVERY_MODULE, is_position
from octavo.nn.recognised import Recognised

CALLS = 3
"""Number of calls in each mode."""
_CONTAINERS = (dict, list, set)
_NUMBERS_AND_STRINGS = (bool, int, float, str, type(None))
T = TypeVar("T")


def computes(
    make: Callable[[bool], nn.Module],
    formula: Callable[..., Tensor],
    draw: Callable[[], Tensor],
    tolerance: float,
    calls: int = CALLS,
) -> bool:
    """Return whether the `forward` of a module is `formula` and nothing else.

    Args:
        make: returns a copy of the module (`shallow_copy`), for training or not.
        formula: `formula(copy, x)`, differentiable; a result in FP64 is compared in it.
        draw: returns x, (..., D). Gradients are compared where |x| <= 10, and in FP32 only.
        tolerance: relative to the largest element of a row.
        calls: number of calls in each mode; gradients are compared in the second.
    """
    with _as_written():
        return all(
            _computes_once(_moved(make(training), call), formula, draw(), tolerance, call)
            for training, call in itertools.product((True, False), range(calls))
        )


def is_as_its_class(module: nn.Module) -> bool:
    """Return whether a module does what its class says: `forward` is not patched, and no tensor is a plain attribute.

    Writes to such a tensor could not be noticed later. Nor may there be `__slots__`, which copies lack. Linear layers
    may have both.
    """
    parts = [each for each in module.modules() if not isinstance(each, nn.Linear)]
    holds_tensors = any(isinstance(value, Tensor) for each in parts for value in vars(each).values())
    has_slots = any(vars(base).get("__slots__") for each in parts for base in type(each).__mro__)
    return "forward" not in vars(module) and not holds_tensors and not has_slots


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
    states = random.getstate(), np.random.get_state()
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
        np.random.set_state(states[1])


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


def _computes_once(probe: nn.Module, formula: Callable[..., Tensor], x: Tensor, tolerance: float, call: int) -> bool:
    differentiates = call == 1 and x.dtype == torch.float32
    if differentiates:
        x = x.clamp(-10, 10).requires_grad_()  # beyond this a user's formula may have infinite gradients
    torch.default_generator.manual_seed(call)  # `torch.manual_seed` seeds the GPUs, too, whose states are not restored
    random.seed(call)
    np.random.seed(call)
    before = list(_state(probe))
    try:
        with torch.set_grad_enabled(differentiates):
            y = type(probe).forward(probe, x)  # without the hooks of `__call__`
    except Exception:  # it needs more than one tensor
        return False
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype or list(_state(probe)) != before:
        return False
    with torch.set_grad_enabled(differentiates):
        expected = formula(probe, x)
    if not _agree(y.detach(), expected.detach(), tolerance):
        return False
    if not (differentiates and y.requires_grad):
        return not differentiates
    inputs, dy = [x, *probe.parameters()], torch.randn_like(y)
    found, wanted = (torch.autograd.grad((out * dy).sum(), inputs, allow_unused=True) for out in (y, expected))
    return all(a is not None and b is not None and _agree(a, b, 1e-4) for a, b in zip(found, wanted, strict=True))


def _agree(y: Tensor, expected: Tensor, tolerance: float) -> bool:
    bound = tolerance * expected.abs().amax(-1, keepdim=True) + 1e-12
    return bool(((y.to(expected.dtype) - expected).abs() <= bound).all())


def _state(probe: nn.Module) -> Iterator[Any]:
    """Yield what a call must not change: the random states, and the objects that the modules refer to."""
    yield torch.get_rng_state().numpy().tobytes()
    _, numbers, *position = np.random.get_state()
    yield from (random.getstate(), np.asarray(numbers).tobytes(), position)
    for value in itertools.chain.from_iterable(vars(module).values() for module in probe.modules()):
        if isinstance(value, torch.Generator):
            yield value.get_state().numpy().tobytes()
        elif isinstance(value, random.Random):
            yield value.getstate()
        elif isinstance(value, np.random.Generator):
            yield str(value.bit_generator.state)
        elif isinstance(value, _CONTAINERS):
            yield from map(id, itertools.chain(value, value.values() if isinstance(value, dict) else ()))
        yield id(value)
