"""Cheap invariants of parameters and optimizer moments: finite, changed as updates change them, equal on all ranks.

A check reads norms of everything in a few fused launches, and a fixed sample of each parameter. The sample tells by how
much a parameter changed since the check before, without a copy of it. Results are copied asynchronously.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo.kernels.runtime.transfers import AsyncHostCopy
from octavo.tensor import FP8Tensor, is_distributed, local, non_finite

SAMPLE = 4096
"""Elements sampled per parameter."""
E8M0_BIAS = 127
PRINT = 8
"""Sampled elements in a fingerprint."""


class ParameterStats(NamedTuple):
    """Invariants of each parameter at a step; NaN where not measured."""

    names: Sequence[str]
    steps: int
    """Steps since the check before; 0 for the first one, whose changes are unknown."""
    norm: NDArray[np.float64]
    """L2 norm; NaN or infinite if an element is. Of FP8 weights: of their scales."""
    change: NDArray[np.float64]
    """Root mean square change of an element since the check before."""
    first: NDArray[np.float64]
    """L2 norm of the optimizer's first moment."""
    second: NDArray[np.float64]
    """L2 norm of its second moment."""
    disagreement: NDArray[np.float64]
    """Difference of the norm between ranks that hold the same parameter."""


PendingStats = Callable[[], ParameterStats]
"""Returns the measurements of a step once they have arrived; waits for them."""


class _Values(NamedTuple):
    names: Sequence[str]
    """The parameters."""
    sample: Tensor
    """FP32 (S,), the sampled elements of all parameters."""
    norm: Tensor
    """FP64 (P,)."""
    of: Tensor
    """int64 (S,), the parameter of each sampled element."""
    elements: Tensor
    """FP64 (P,)."""

    def is_alike(self, other: _Values) -> bool:
        """Return True if both are of the same parameters: some may have been frozen, and others thawed."""
        return self.names == other.names and self.sample.shape == other.sample.shape


class ParameterCheck:
    """Measures the parameters of a model every few steps.

    Args:
        model: the model, on its device, converted and sharded.
        optimizer: its optimizer; its moments are checked, other state is ignored.
        every: steps between checks.
        group: ranks that hold the same parameters, or shards of them; all measure the same steps.
        has_replicas: ranks of the group hold the same values.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        group: dist.ProcessGroup | None = None,
        has_replicas: bool = False,
    ) -> None:
        self._model, self._optimizer, self._every = model, optimizer, every
        self._group, self._has_replicas = group, has_replicas
        self._known: _Values | None = None
        self._at = 0

    @torch.no_grad()
    def measure(self, step: int, *, now: bool = False) -> PendingStats | None:
        """Start the measurement of a step, if it is due or wanted `now`; None if it is not, or was measured before."""
        if (step % self._every and not now) or step == self._at:
            return None
        before, since, names = self._known, self._at, self._read(step)
        if not names or self._known is None:
            return None
        _, sample, norm, of, elements = self._known
        change, steps = torch.full_like(norm, torch.nan), 0
        if before is not None and before.is_alike(self._known):
            squares = torch.zeros_like(norm).index_add_(0, of, (sample - before.sample).double().square())
            # The norm sees every element: one that is not in the sample, as of a flipped bit, too.
            sampled = (squares / torch.bincount(of, minlength=len(names))).sqrt()
            change = torch.maximum(sampled, (norm - before.norm).abs() / elements.sqrt())
            # Of FP8 weights only scales are read, and these may stay for many steps, or double in one.
            parameters = dict(self._model.named_parameters())
            is_fp8 = [isinstance(local(parameters[name].detach()), FP8Tensor) for name in names]
            change = change.masked_fill(torch.tensor(is_fp8, device=change.device), torch.nan)
            steps = step - since
        moments = [_norms(_moments(self._model, self._optimizer, names, key)) for key in ("exp_avg", "exp_avg_sq")]
        table = torch.stack([norm, change, *moments, torch.zeros_like(norm)])
        copy = AsyncHostCopy(self._merged(table))
        return lambda: ParameterStats(names, steps, *copy.result().numpy().copy())

    @torch.no_grad()
    def restart(self, done: int) -> None:
        """Compare with the values of now from here on: the run was rolled back, or resumed, to `done` steps."""
        self._read(done)

    def nonfinite(self) -> str:
        """Return the first parameter that holds a NaN or infinity; empty if there is none. Waits for the device."""
        trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        counts = torch.stack([non_finite(parameter) for parameter in trained.values()])
        if self._group is not None:
            dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=self._group)
        return next((name for name, count in zip(trained, counts.tolist(), strict=True) if count), "")

    def fingerprints(self) -> dict[str, list[float]]:
        """Return norm and some elements of each parameter; empty if the model is sharded."""
        names, weights = _weights(self._model)
        if any(is_distributed(parameter) for parameter in self._model.parameters()):
            return {}
        norms = _norms(weights).tolist()
        elements = [_sample(weight)[-PRINT:].tolist() for weight in weights]
        prints = {name: [norm, *own] for name, norm, own in zip(names, norms, elements, strict=True)}
        return {name: own for name, own in prints.items() if np.isfinite(own).all()}

    def changed_since(self, saved: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, str]]:
        """Yield each parameter that is not as in `fingerprints` of a checkpoint, and the one that it is now, if any."""
        now = self.fingerprints() if saved else {}
        for name in (name for name in now if name in saved):
            if not _is_same(saved[name], now[name]):
                yield name, next((other for other in saved if _is_same(saved[other], now[name])), "")

    def _read(self, step: int) -> list[str]:
        names, weights = _weights(self._model)
        samples = [_sample(weight) for weight in weights]
        sizes = [len(sample) for sample in samples]
        self._at = step
        if not names:
            return names
        if self._known is None or self._known.names != names or len(self._known.of) != sum(sizes):
            device = weights[0].device
            of = torch.repeat_interleave(torch.tensor(sizes)).to(device)
            elements = torch.tensor([weight.numel() for weight in weights], dtype=torch.float64, device=device)
        else:
            of, elements = self._known.of, self._known.elements
        self._known = _Values(names, torch.cat(samples), _norms(weights), of, elements)
        return names

    def _merged(self, table: Tensor) -> Tensor:
        """Return the largest values over ranks, and the disagreement of replicas; NaN counts as infinite."""
        if self._group is None:
            return table
        infinite = table.new_full((), torch.inf)
        norm = torch.where(table[0].isnan(), infinite, table[0])
        both = torch.cat([torch.where(table.isnan(), -infinite, table), norm[None], -norm[None]])
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        known = torch.where(both[:5] == -torch.inf, table.new_full((), torch.nan), both[:5])
        known[0] = both[5]
        known[4] = (both[5] + both[6]).nan_to_num(0.0) if self._has_replicas else 0.0
        return known


def _is_same(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if two fingerprints are of the same values; norms may be summed in another order."""
    return one[1:] == other[1:] and bool(np.isclose(one[0], other[0], rtol=1e-5, atol=0, equal_nan=True))


def _weights(model: nn.Module) -> tuple[list[str], list[Tensor]]:
    """Return the trained parameters, as plain tensors; empty ones, too: every rank measures the same rows."""
    own = {name: local(p.detach()) for name, p in model.named_parameters() if p.requires_grad}
    return [*own], [tensor.scale if isinstance(tensor, FP8Tensor) else tensor for tensor in own.values()]


def _moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str], key: str
) -> Iterator[Tensor | None]:
    """Yield a moment of each parameter, or its scales if it is stored in FP8; None without one."""
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    for name in names:
        state = optimizer.state.get(parameters[name], {})
        moment, scale = (state.get(own) for own in (key, f"{key}_scale"))
        if isinstance(scale, Tensor):  # E8M0, the exponents of powers of two
            yield torch.exp2(local(scale).float() - E8M0_BIAS) if scale.dtype == torch.uint8 else local(scale).float()
        else:
            yield local(moment) if isinstance(moment, Tensor) and moment.is_floating_point() else None


def _norms(tensors: Iterator[Tensor | None] | Sequence[Tensor | None]) -> Tensor:
    """Return the L2 norm of each tensor, FP64; NaN for None."""
    given = list(tensors)
    known = [tensor.float() if tensor.element_size() < 4 else tensor for tensor in given if tensor is not None]
    norms = iter(torch._foreach_norm(known) if known else ())
    like = next((tensor.device for tensor in known), torch.device("cpu"))
    missing = torch.full((), torch.nan, dtype=torch.float64, device=like)
    return torch.stack([missing if tensor is None else next(norms).double() for tensor in given])


def _sample(weight: Tensor) -> Tensor:
    """Return about `SAMPLE` elements, FP32; an odd stride visits all columns of a matrix."""
    return weight.reshape(-1)[:: max(weight.numel() // SAMPLE, 1) | 1].float()
