"""Modules of experts in a user's model: three-dimensional weights, and a `forward` that is a mixture of experts.

They are recognised by their results, as MLPs are (`octavo.conversion.mlps`): a copy with tiny weights is run
on random tokens, experts and routing weights, and compared with the formula of every reading that the shapes allow.
Some calls send all tokens to the same experts, to tell a forward that drops tokens over a capacity.
Neither names nor the form of the loop over experts matter: Mixtral, Qwen3-MoE, DeepSeek-V3, OLMoE and GPT-OSS of
Transformers, GroupedExperts of torchtitan, and hand-written modules are found.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kernels.activation import KINDS
from octavo.kernels.activation.reference import value
from octavo.kernels.runtime.dispatch import architecture, on_gpu
from octavo.nn.adopted import own_class
from octavo.nn.experts import ExpertRoles, Experts
from octavo.nn.probe import CALLS, computes, is_as_its_class, judge_once, random_tensor, shallow_copy
from octavo.nn.side_effects import Conduct

_WIDTH, _HIDDEN, _TOKENS, _PER_TOKEN = 8, 24, 48, 2
_ARGUMENTS = (1, 2, 3)
"""Number of arguments of a forward that takes sorted rows, as many for each expert; of one that takes sorted rows and
counts; and of one that takes tokens, experts and weights."""
Routing = tuple[tuple[int, ...], ...]
"""Experts of each token."""


@dataclass(frozen=True, kw_only=True)
class FoundExperts:
    """A module that holds weights of experts."""

    count: int
    """E."""
    first: tuple[int, int]
    """(N, K) of the first product of an expert."""
    second: tuple[int, int]
    """(N, K) of the second."""
    roles: ExpertRoles
    """The roles of its parameters."""


def find_experts(model: nn.Module) -> dict[str, FoundExperts]:
    """Return the modules of experts in a model by full name, with the roles of their parameters."""
    found, roles_of = {}, judge_once(_roles_of)
    for name, module in model.named_modules():
        stacks = _stacks(module)
        if stacks is None:
            continue
        is_known = isinstance(module, Experts) and module.is_as_recognised()
        roles = module.expert_roles if is_known else roles_of(module)
        if roles is None:
            continue
        experts = next(iter(stacks.values())).shape[0]
        first, second = _sizes(stacks, roles)
        found[name] = FoundExperts(count=experts, first=first, second=second, roles=roles)
    return found


def no_grouped_kernel(device: torch.device) -> str | None:
    """Return why a device has no grouped FP8 GEMM, if the reference would be slower than BF16; None on a CPU."""
    if not on_gpu(device):
        return None
    found = architecture(device)
    return None if found.grouped else f"{found.name}: it has no grouped FP8 GEMM that Octavo was run with"


def _stacks(module: nn.Module) -> dict[str, Tensor] | None:
    """Return the weights of a module that may be one of experts: two or three with one number of experts, or None."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    stacks: dict[str, Tensor] = {name: p for name, p in own.items() if p.dim() == 3}
    children = any(True for child in module.children() for _ in child.parameters())
    others = {name: p for name, p in own.items() if p.dim() != 3}
    if len(stacks) not in (2, 3) or children or len({p.shape[0] for p in stacks.values()}) != 1:
        return None
    return stacks if len(others) in (0, 2) and all(p.dim() == 2 for p in others.values()) else None


def _sizes(stacks: dict[str, Tensor], roles: ExpertRoles) -> tuple[tuple[int, int], tuple[int, int]]:
    shapes = [sorted_shape(stacks[name], roles) for name in (*roles.inner, roles.down)]
    return (sum(n for n, _ in shapes[:-1]), shapes[0][1]), shapes[-1]


def sorted_shape(weight: Tensor, roles: ExpertRoles) -> tuple[int, int]:
    """Return (out, in) of an expert's weight."""
    n, k = weight.shape[1:]
    return (k, n) if roles.is_transposed else (n, k)


def _roles_of(module: nn.Module) -> ExpertRoles | None:
    """Return roles of a module's parameters with which its forward is a mixture of experts, or None."""
    if not is_as_its_class(module):
        return None
    forward = inspect.unwrap(own_class(module).parent.forward if isinstance(module, Experts) else type(module).forward)
    arguments = tuple(list(inspect.signature(forward).parameters)[1:])
    if len(arguments) not in _ARGUMENTS:
        return None
    readings = (roles._replace(arguments=arguments) for roles in _readings(module))
    return next((roles for roles in readings if _computes(module, forward, roles)), None)


def _readings(module: nn.Module) -> Iterator[ExpertRoles]:
    """Yield every assignment of roles to a module's parameters that their shapes allow, the usual ones first."""
    stacks = _stacks(module) or {}
    biases = {name: p for name, p in module._parameters.items() if p is not None and p.dim() == 2}
    kinds = *KINDS, *([""] if hasattr(module, "_apply_gate") else [])
    for kind, is_transposed, (*inner, down) in itertools.product(kinds, (False, True), itertools.permutations(stacks)):
        roles = ExpertRoles(tuple(inner), down, kind, is_transposed=is_transposed)
        shapes = {sorted_shape(stacks[name], roles) for name in inner}
        out, hidden = sorted_shape(stacks[down], roles)
        if len(inner) == 2 and shapes == {(hidden, out)} and not biases:
            yield roles
        elif shapes == {(2 * hidden, out)}:
            for named in _biases(biases, 2 * hidden, out):
                yield roles._replace(biases=named)
                if kind:  # a module's own gate divides the stack itself
                    yield roles._replace(biases=named, is_interleaved=True)
        elif len(inner) == 1 and shapes == {(hidden, out)}:
            for named in _biases(biases, hidden, out):
                yield roles._replace(biases=named, is_gated=False)


def _biases(biases: dict[str, nn.Parameter], first: int, second: int) -> Iterator[tuple[str, ...]]:
    """Yield the names of the biases of both products, in every order that their widths allow; () if there are none."""
    if not biases:
        yield ()
    for a, b in itertools.permutations(biases, 2):
        if (biases[a].shape[1], biases[b].shape[1]) == (first, second):
            yield a, b


class _Call(nn.Module):
    """A module of experts as a function of tokens alone, with fixed experts and routing weights."""

    def __init__(
        self, experts: nn.Module, forward: Callable[..., Tensor], roles: ExpertRoles, routing: Routing
    ) -> None:
        super().__init__()
        self.experts, self.call, self.arguments = experts, forward, len(roles.arguments)
        self.count = cast(Tensor, experts.get_parameter(roles.down)).shape[0]
        self.routing = routing
        shape = len(routing), len(routing[0])
        self.weights = nn.Parameter(random_tensor(9, *shape).abs() + 0.1) if not roles.is_sorted else None

    @property
    def ids(self) -> Tensor:
        """Experts of each token, (T, S), distinct per token; sorted rows have one each."""
        return torch.tensor(self.routing)

    def forward(self, x: Tensor) -> Tensor:
        if self.arguments == 1:
            return self.call(self.experts, x)
        if self.arguments == 2:
            return self.call(self.experts, x, torch.bincount(self.ids.flatten(), minlength=self.count))
        return self.call(self.experts, x, self.ids, self.weights)


def _routings(count: int, per_token: int, roles: ExpertRoles) -> list[Routing]:
    """Return experts of each token: the same for all tokens, random ones, and every expert alike."""
    if roles.has_equal_groups:
        return [tuple((expert,) for expert in range(count) for _ in range(max(_TOKENS // count, 2)))] * 3
    slots = min(per_token, count)
    same = [range(count - slots, count)] * _TOKENS
    drawn = [random.Random(token).sample(range(count), slots) for token in range(_TOKENS)]
    alike = [[(token * count // _TOKENS + slot) % count for slot in range(slots)] for token in range(_TOKENS)]
    routings = [tuple(map(tuple, routing)) for routing in (same, drawn, alike)]
    return [tuple(sorted((ids[0],) for ids in routing)) for routing in routings] if roles.is_sorted else routings


def _computes(module: nn.Module, forward: Callable[..., Tensor], roles: ExpertRoles) -> bool:
    """Return whether a forward is the mixture of experts of these roles, whatever the routing and the widths."""
    down = module.get_parameter(roles.down)
    width, hidden = sorted_shape(down, roles)
    gives_mixture = partial(_gives_mixture, module, forward, roles)
    same, drawn, alike = _routings(down.shape[0], _PER_TOKEN, roles)
    if not gives_mixture([same, drawn, alike]):
        return False
    if not all(gives_mixture([same], widths, 1) for widths in ((width, _HIDDEN), (_WIDTH, hidden))):
        return False
    if roles.is_sorted:
        return True
    # With one expert per token, all tokens exceed a capacity that they fit in with two. Some modules are for two only.
    same, _, alike = _routings(down.shape[0], 1, roles)
    return gives_mixture([same], calls=1) or not gives_mixture([alike], calls=1)


def _gives_mixture(
    module: nn.Module,
    forward: Callable[..., Tensor],
    roles: ExpertRoles,
    routings: list[Routing],
    widths: tuple[int, int] = (_WIDTH, _HIDDEN),
    calls: int = CALLS,
) -> bool:
    """Return whether a copy of these widths, of tokens and hidden, is a mixture of experts. Each call has a routing."""
    turns = itertools.cycle(routings)

    def make(training: bool) -> nn.Module:
        return _Call(_random_copy(module, roles, training, widths), forward, roles, next(turns))

    def draw() -> Tensor:
        tokens = len(routings[0])
        scale = torch.tensor([1e-2, 1.0, 1.0, 1.0, 30.0, 30.0], device="cpu").repeat(tokens // 6 + 1)[:tokens]
        return random_tensor(0, tokens, widths[0]) * scale[:, None]

    # A loop over experts reads which tokens they have, and multiplies as often as it likes.
    saved = len(routings[0][0]) * (2 if roles.is_gated else 1) * widths[1]
    conduct = Conduct(saved=saved, reads_values=True, in_bf16=calls == CALLS)
    return computes(make, lambda probe, x: _formula(cast(_Call, probe), roles, x), draw, 1e-4, calls, conduct)


def _random_copy(module: nn.Module, roles: ExpertRoles, training: bool, widths: tuple[int, int]) -> nn.Module:
    """Return a copy of a module with random weights of these widths; all experts share them unless they are tiny."""
    probe = shallow_copy(module, training)
    width, inner = widths
    if roles.has_equal_groups:  # a forward that is given rows alone divides them by sizes that the module has
        own = sorted_shape(module.get_parameter(roles.down), roles)
        sizes = dict(zip(own, widths, strict=True)) | {2 * own[1]: 2 * inner}
        vars(probe).update({k: sizes[v] for k, v in vars(probe).items() if type(v) is int and v in sizes})
    hidden = 2 * inner if roles.is_gated and len(roles.inner) == 1 else inner
    shapes = dict.fromkeys(roles.inner, (hidden, width)) | {roles.down: (width, inner)}
    count, tensors = module.get_parameter(roles.down).shape[0], {}
    different = count if widths == (_WIDTH, _HIDDEN) else 1
    for seed, (name, (n, k)) in enumerate(shapes.items()):
        weight = random_tensor(1 + seed, different, *((k, n) if roles.is_transposed else (n, k))) / 2
        tensors[name] = weight.expand(count, -1, -1)
    for name, length in zip(roles.biases, (hidden, width), strict=False):
        tensors[name] = random_tensor(len(tensors), count, length)
    probe._parameters = {name: nn.Parameter(tensors[name]) if name in tensors else None for name in module._parameters}
    return probe


def _formula(probe: _Call, roles: ExpertRoles, x: Tensor) -> Tensor:
    """Return the result of a mixture of experts by a loop over its experts."""
    y = torch.zeros_like(x)
    weights = torch.ones(probe.ids.shape, dtype=x.dtype, device=x.device) if probe.weights is None else probe.weights
    for e in sorted(set(itertools.chain(*probe.routing))):
        tokens, places = torch.where(probe.ids == e)
        y = y.index_add(0, tokens, _expert(probe.experts, roles, e, x[tokens]) * weights[tokens, places, None])
    return y


def _expert(module: nn.Module, roles: ExpertRoles, e: int, x: Tensor) -> Tensor:
    def product(x: Tensor, name: str, number: int) -> Tensor:
        weight = module.get_parameter(name)[e]
        bias = module.get_parameter(roles.biases[number])[e] if roles.biases else None
        return F.linear(x, weight.mT if roles.is_transposed else weight, bias)

    inner = [product(x, name, 0) for name in roles.inner]
    if not roles.kind:
        h = cast(Callable[[Tensor], Tensor], module._apply_gate)(inner[0])
    elif roles.is_gated:
        if len(inner) == 1:
            inner = [inner[0][:, ::2], inner[0][:, 1::2]] if roles.is_interleaved else list(inner[0].chunk(2, dim=1))
        h = value(roles.kind, inner[0]) * inner[1]
    else:
        h = value(roles.kind, inner[0])
    return product(h, roles.down, 1)
