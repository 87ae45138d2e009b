"""Modules with one matrix per expert that multiply sorted rows, as `JetMoeParallelExperts` and Granite's.

They are recognised by their results, as modules of experts with two products are (`octavo.conversion.experts`): a copy
with tiny weights is run on rows of random numbers per expert, none among them, and compared with the formula.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.adopted import own_class
from octavo.nn.probe import CALLS, computes, is_as_its_class, judge_once, random_tensor, shallow_copy
from octavo.nn.side_effects import Conduct
from octavo.nn.stacks import RecognisedStack

_IN, _OUT, _ROWS = 8, 24, 48
Sizes = tuple[int, ...]
"""Number of rows of each expert."""


class FoundStack(NamedTuple):
    """A module with one matrix per expert."""

    experts: int
    """E."""
    shape: tuple[int, int]
    """(N, K) of the product of an expert."""
    arguments: tuple[str, str]
    """Names of the arguments of its forward: rows, and their number per expert."""


def find_stacks(model: nn.Module) -> dict[str, FoundStack]:
    """Return the modules in a model that multiply sorted rows by one matrix per expert, by full name."""
    arguments_of, stacks = judge_once(_arguments_of), {}
    for name, module in model.named_modules():
        weight = _stack_of(module)
        if weight is None:
            continue
        is_taken = isinstance(module, RecognisedStack) and module.is_as_recognised()
        arguments = module.stack_arguments if is_taken else arguments_of(module)
        if arguments is not None:
            count, n, k = weight.shape
            stacks[name] = FoundStack(count, (n, k), arguments)
    return stacks


def _stack_of(module: nn.Module) -> Tensor | None:
    """Return the only parameter of a module, if it is named `weight` and is (E, N, K)."""
    weight = module._parameters.get("weight")
    is_alone = len(module._parameters) == 1 and not any(True for child in module.children() for _ in child.parameters())
    is_plain = type(module).__module__.partition(".")[0] not in ("octavo", "torch") or isinstance(
        module, RecognisedStack
    )
    return weight if weight is not None and weight.dim() == 3 and is_alone and is_plain else None


def _arguments_of(module: nn.Module) -> tuple[str, str] | None:
    """Return the names of the arguments of a forward that multiplies sorted rows by a matrix per expert, or None."""
    if not is_as_its_class(module):
        return None
    forward = inspect.unwrap(
        own_class(module).parent.forward if isinstance(module, RecognisedStack) else type(module).forward
    )
    names = tuple(inspect.signature(forward).parameters)[1:]
    if len(names) != 2:
        return None
    forms: tuple[Callable[..., Any], ...] = list, torch.tensor
    ways = itertools.product(forms, (False, True))
    is_stack = any(_multiplies(module, forward, form, resized) for form, resized in ways)
    return (names[0], names[1]) if is_stack else None


def _multiplies(module: nn.Module, forward: Callable[..., Tensor], form: Callable[..., Any], resized: bool) -> bool:
    """Return whether a forward is that product, whatever the sizes and the widths.

    Args:
        form: how sizes are passed: in a list or as a tensor.
        resized: whether the widths that a copy holds as integers become those of its weight.
    """
    count, n, k = cast(Tensor, module._parameters["weight"]).shape
    agrees = partial(_agrees, module, forward, form, resized)
    tiny = (_IN, _IN if n == k else _OUT)
    last = tuple(_ROWS if expert == count - 1 else 0 for expert in range(count))
    drawn = [random.Random(seed).choices(range(count), k=_ROWS) for seed in range(2)]
    sizes = [last, *(tuple(map(experts.count, range(count))) for experts in drawn)]
    return agrees(tiny, sizes) and all(agrees(widths, sizes[-1:], 1) for widths in ((k, tiny[1]), (tiny[0], n)))


def _agrees(
    module: nn.Module,
    forward: Callable[..., Tensor],
    form: Callable[..., Any],
    resized: bool,
    widths: tuple[int, int],
    sizes: list[Sizes],
    calls: int = CALLS,
) -> bool:
    """Return whether a copy of these widths, in and out, computes the product. Each call has other sizes."""
    turns = itertools.cycle(sizes)

    def make(training: bool) -> nn.Module:
        return _Call(_random_copy(module, training, widths, resized), forward, next(turns), form)

    def draw() -> Tensor:
        scale = torch.tensor([1e-2, 1.0, 1.0, 30.0], device="cpu").repeat(_ROWS // 4)
        return random_tensor(0, _ROWS, widths[0]) * scale[:, None]

    conduct = Conduct(reads_values=True, in_bf16=calls == CALLS)
    return computes(make, lambda probe, x: _formula(cast(_Call, probe), x), draw, 1e-4, calls, conduct)


class _Call(nn.Module):
    """A stack as a function of rows alone, with fixed sizes."""

    def __init__(
        self, stack: nn.Module, forward: Callable[..., Tensor], sizes: Sizes, form: Callable[..., Any]
    ) -> None:
        super().__init__()
        self.stack, self.call, self.sizes, self.form = stack, forward, sizes, form

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.stack, x, self.form(self.sizes))


def _formula(probe: _Call, x: Tensor) -> Tensor:
    weight = probe.stack.get_parameter("weight")
    return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(probe.sizes), weight, strict=True)])


def _random_copy(module: nn.Module, training: bool, widths: tuple[int, int], resized: bool) -> nn.Module:
    """Return a copy with random matrices of these widths, in and out; all experts share one unless they are tiny."""
    probe = shallow_copy(module, training)
    count, n, k = cast(Tensor, module._parameters["weight"]).shape
    if resized:
        sizes = {k: widths[0], n: widths[1]}
        vars(probe).update({name: sizes[v] for name, v in vars(probe).items() if type(v) is int and v in sizes})
    is_tiny = max(widths) <= _OUT
    weight = random_tensor(1, count if is_tiny else 1, *reversed(widths)).expand(count, -1, -1)
    probe._parameters = {"weight": nn.Parameter(weight.contiguous())}
    return probe
