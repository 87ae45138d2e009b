"""`GreedyZeRO`: an optimizer whose states are distributed over data-parallel ranks, each tensor on one rank.

    backward            on every rank    all gradients, of this rank's batch
    reduce to owners    wire             the mean of each gradient, to the rank that owns the tensor; others drop it
    step                on the owner     master, moments and weight of its tensors: no other rank has that state
    gather              wire             weights as stored: an `FP8Tensor` as codes and scales, one byte

ZeRO stage 2 (arXiv 1910.02054, section 5), partitioned by tensors as in FP8-LM. All state of a tensor is on one rank,
so a step is bitwise that of one process, also with per-tensor scales, and with Muon's whole matrices.

Sent are streams: the tensors of each rank concatenated, and split into pieces of equal size. With a greedy assignment
they are of about equal length, so that almost no padding is sent; the size of a piece bounds the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.distributed.reduce import reduction as reduction_named
from octavo.distributed.reduce.scheme import Scheme, Wire
from octavo.distributed.zero.greedy import Assignment
from octavo.errors import CheckpointError, ConfigError, UnsupportedError
from octavo.kernels.runtime.transfers import PinnedStaging
from octavo.optim import Optimizer, convert
from octavo.optim.optimizer import Entry
from octavo.optim.states import state_tensors
from octavo.optim.tensors import count_writes, like, matrix_shape
from octavo.tensor import FP8Tensor, is_distributed

Streams = Sequence[Sequence[Tensor]]
"""Tensors (n,) of each rank, with the same sizes on all ranks."""


class GreedyZeRO(torch.optim.Optimizer):
    """Optimizer wrapper in which each rank stores the states of some tensors only, and steps those.

    Every rank creates one over the same parameters, with the same weights, and makes the same calls:

        optimizer = GreedyZeRO(octavo.optim.AdamW(model.named_parameters(), lr=3e-4, states="fp8"))
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    Groups, schedulers and clipping are those of the wrapped optimizer; the norm is that of all ranks' gradients. After
    `step` a rank has the gradients of its own tensors only. Frozen parameters are ignored; a parameter without a
    gradient on any rank is not stepped, and a gradient missing on some ranks counts as zeros.

    Args:
        optimizer: an optimizer of `octavo.optim` over all parameters, without states yet.
        group: the ranks; by default all.
        reduction: gradient reduction, a name in `octavo.distributed.REDUCTIONS` or a scheme. None where gradients are
            the same on all ranks already: after `DistributedDataParallel`.
        bucket_mb: limit in MB of the buffers for gradients and weights in transit, over all ranks.

    Attributes:
        optimizer: the wrapped optimizer, with its counters `grad_norm`, `skipped`, `clamped`.
        assignment: assignment of parameters to ranks, by the bytes of their states.
        scheme: the reduction; its `state_dict` belongs in a checkpoint. None without one.

    Raises:
        ConfigError: the optimizer is not of `octavo.optim`, has states already, releases gradients or stores them in
            FP8; a parameter is sharded; or `torch.distributed` is not initialised.
    """

    _step_supports_amp_scaling = True  # a GradScaler then calls `step` on every rank, and sets `found_inf`

    def __init__(
        self,
        optimizer: Optimizer,
        group: dist.ProcessGroup | None = None,
        *,
        reduction: str | Scheme | None = "bf16",
        bucket_mb: float = 256.0,
    ) -> None:
        _check(optimizer)
        if not dist.is_initialized():
            raise ConfigError("GreedyZeRO: no process group. Call torch.distributed.init_process_group() first.")
        if bucket_mb <= 0:
            raise ConfigError(f"GreedyZeRO bucket_mb: {bucket_mb} is not a positive number.")
        self.optimizer = optimizer
        self.group: dist.ProcessGroup = group or dist.group.WORLD  # type: ignore[assignment]
        self.rank, self.ranks = dist.get_rank(self.group), self.group.size()
        self.scheme = reduction_named(reduction) if isinstance(reduction, str) else reduction
        self.bucket_mb = bucket_mb
        self.assignment = Assignment((), (), self.ranks)
        self._wire = Wire()
        self._uploads = PinnedStaging()
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        optimizer.over_ranks = self._sum

    @property
    def sent(self) -> int:
        """Bytes of gradients and weights that this rank has sent to others."""
        return self._wire.sent + (self.scheme.sent if self.scheme is not None else 0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Its parameters are assigned to the least loaded ranks; earlier assignments stay."""
        if any(param_group is known for known in self.optimizer.param_groups):  # called by PyTorch's constructor
            super().add_param_group(param_group)
        else:
            self.optimizer.add_param_group(param_group)
            _check(self.optimizer)
        fresh = self.optimizer.entries()[len(self.assignment.owners) :]
        self.assignment = self.assignment.with_more([_state_bytes(self.optimizer, entry) for entry in fresh])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, update the tensors of this rank, and gather all weights on all ranks.

        Every rank must call it. It synchronises with the GPU only where this rank owns a tensor without a gradient.

        Args:
            closure: computes the loss and its gradients; called first.

        Raises:
            UnsupportedError: a gradient is sparse, or a `GradScaler` looked for overflows before the reduction.
        """
        amp = {name: vars(self)[name] for name in ("grad_scale", "found_inf") if "found_inf" in vars(self)}
        if amp and self.scheme is not None and self.ranks > 1:
            raise UnsupportedError(_SCALED)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [entry for entry in self.optimizer.entries() if entry.parameter.requires_grad]
        is_shared = bool(trained) and self.ranks > 1
        with torch.no_grad():
            if self.scheme is not None and is_shared:
                self._reduce(trained, self.scheme)
            for entry in self.optimizer.entries():
                if not self._is_own(entry):
                    entry.parameter.grad = None
            vars(self.optimizer).update(amp)
            self.optimizer.step()
            for name in amp:
                delattr(self.optimizer, name)
            if is_shared:  # receive the weights that other ranks have stepped
                piece = max(int(self.bucket_mb * 1e6) // self.ranks, 1)
                gather_from_owners(self._streams(trained, _stored), self._wire, self.group, piece)
                count_writes(entry.parameter for entry in trained)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "GreedyZeRO: a rank's part of the states cannot be copied or pickled. Make a new optimizer for the other"
            " model, and load the state dict of this one."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's tensors, as the wrapped optimizer stores them, and all settings.

        Save one on each rank; `merge_state_dicts` combines them to that of a single process.
        """
        own = self.optimizer.state_dict()
        state = {number: state for number, state in own["state"].items() if state}
        return {**own, "state": state, "rank": self.rank, "ranks": self.ranks}

    def full_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """Return the state dict of a single process, on the CPU, on rank `to` of the group; None on the others.

        Every rank must call it. It is sent tensor by tensor: no GPU holds more than one foreign tensor.
        """
        own = self.state_dict()
        has: list[Any] = [None] * self.ranks
        dist.all_gather_object(has, sorted(own["state"]), group=self.group)
        state = {}
        for entry, owner in zip(self.optimizer.entries(), self.assignment.owners, strict=True):
            if entry.number in has[owner]:
                found = self._send(entry, own["state"].get(entry.number, {}), owner, to)
                if self.rank == to:
                    state[entry.number] = {name: tensor.cpu() for name, tensor in found.items()}
        return _whole({**own, "state": state}) if self.rank == to else None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's `state_dict`, or that of a single process, of which each rank takes its part.

        Raises:
            CheckpointError: rank or number of ranks differs, or the state does not fit the optimizer.
        """
        state_dict = convert.in_order(self.optimizer, state_dict)
        numbers = set(self.assignment.of(self.rank))
        if "ranks" in state_dict and (
            (state_dict["rank"], state_dict["ranks"]) != (self.rank, self.ranks) or set(state_dict["state"]) - numbers
        ):
            raise CheckpointError(
                f"GreedyZeRO state: it belongs to rank {state_dict['rank']} of {state_dict['ranks']}, this is rank "
                f"{self.rank} of {self.ranks}, or the assignment differs. Load merge_state_dicts() of all parts: each "
                "rank takes its own."
            )
        own = {number: state for number, state in state_dict["state"].items() if number in numbers}
        self.optimizer.load_state_dict(_whole({**state_dict, "state": own}))

    def _reduce(self, trained: Sequence[Entry], scheme: Scheme) -> None:
        """Set the gradients of this rank's parameters to the mean over the ranks."""
        has = tuple(entry.parameter.grad is not None for entry in trained)
        seen = self._uploads("seen", has, lambda: torch.tensor(has, dtype=torch.uint8), self.optimizer.device).clone()
        self._wire.all_reduce(seen, self.group, dist.ReduceOp.MAX)
        lacking = [self._is_own(entry) and not known for entry, known in zip(trained, has, strict=True)]
        for dtype in dict.fromkeys(entry.parameter.dtype for entry in trained):
            streams = self._streams([e for e in trained if e.parameter.dtype == dtype], self._gradient)
            piece = max(int(self.bucket_mb * 1e6) // (self.ranks * dtype.itemsize), 1)
            reduce_to_owners(streams, scheme, self.group, piece, str(dtype).removeprefix("torch."))
        if any(lacking):
            for entry, lacked, found in zip(trained, lacking, seen.tolist(), strict=True):
                if lacked and not found:
                    entry.parameter.grad = None

    def _streams(self, entries: Iterable[Entry], tensors_of: Callable[[Entry], Sequence[Tensor]]) -> list[list[Tensor]]:
        streams: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for entry in entries:
            streams[self.assignment.owners[entry.number]] += tensors_of(entry)
        return streams

    def _gradient(self, entry: Entry) -> list[Tensor]:
        """Return the gradient of a parameter, flat, in memory order; zeros where it has none."""
        parameter, gradient = entry.parameter, entry.parameter.grad
        if gradient is None and not self._is_own(entry):
            return [torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.numel())]
        if gradient is None:
            parameter.grad = gradient = like(parameter, parameter.dtype)
        if gradient.layout != torch.strided:
            raise UnsupportedError(
                f"GreedyZeRO: parameter '{entry.name}': its gradient is {gradient.layout}. Use dense gradients: "
                "nn.Embedding(sparse=False)."
            )
        if gradient.stride() != parameter.stride():
            gradient = like(parameter, gradient.dtype).copy_(gradient)
            parameter.grad = gradient
        return [_flat(gradient)]

    def _is_own(self, entry: Entry) -> bool:
        return self.assignment.owners[entry.number] == self.rank

    def _sum(self, squares: Tensor) -> Tensor:
        """Return the sums of squares of each group over all ranks."""
        total = squares.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def _send(self, entry: Entry, state: Mapping[str, Tensor], owner: int, to: int) -> Mapping[str, Tensor]:
        """Send the state of a parameter from its owner to rank `to`, and return it there."""
        if owner != to and self.rank in (owner, to):
            if self.rank == to:
                state = convert.with_saved_names(self.optimizer, entry, self.optimizer.fresh(entry))
            for name in sorted(state):
                data = _flat(state[name]).view(torch.uint8)
                if not data.numel():
                    continue
                if self.rank == owner:
                    dist.send(data, dist.get_global_rank(self.group, to), group=self.group)
                else:
                    dist.recv(data, dist.get_global_rank(self.group, owner), group=self.group)
        return state


_SCALED = (
    "GreedyZeRO: a GradScaler looks for overflows in the gradients of its own rank, before they are reduced, and ranks"
    " would skip different steps. Take DistributedDataParallel with reduction=None, or no scaler: BF16 needs none."
)


def merge_state_dicts(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the state dicts of all ranks of a `GreedyZeRO`, in any order, to that of a single process.

    Raises:
        CheckpointError: a rank is missing or duplicated, or the numbers of ranks differ.
    """
    parts = list(parts)
    found = sorted((part.get("rank"), part.get("ranks")) for part in parts)
    if not parts or found != [(rank, len(parts)) for rank in range(len(parts))]:
        raise CheckpointError(f"GreedyZeRO state: one part per rank is needed; found (rank, ranks) {found}.")
    state = {number: state for part in parts for number, state in part["state"].items()}
    return _whole({**parts[0], "state": dict(sorted(state.items()))})


def _whole(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state_dict.items() if key not in ("rank", "ranks")}


def _flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor as (n,), in memory order: a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _stored(entry: Entry) -> list[Tensor]:
    """Return the stored tensors of a weight, as bytes."""
    weight = entry.parameter
    parts = (weight.codes, weight.scale) if isinstance(weight, FP8Tensor) else (weight,)
    return [_flat(part).view(torch.uint8) for part in parts]


def _state_bytes(optimizer: Optimizer, entry: Entry) -> int:
    if not entry.parameter.requires_grad:
        return 0
    shapes = state_tensors(optimizer.layout_of(entry), *matrix_shape(entry.parameter))
    return sum(prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def _check(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"GreedyZeRO: {type(optimizer).__name__} is not AdamW, Adam, Lion or Muon of octavo.optim.")
    if any(optimizer.state.values()) and optimizer.over_ranks is None:
        raise ConfigError("GreedyZeRO: the optimizer has states already. Wrap it first, then load_state_dict().")
    if optimizer.release or any(group["gradients"] != "wide" for group in optimizer.param_groups):
        raise ConfigError(
            "GreedyZeRO: release=True and gradients='fp8' take a gradient before it is reduced over the ranks. Leave "
            "them out: a rank stores the gradients of its own tensors only."
        )
    for entry in optimizer.entries():
        if is_distributed(entry.parameter):
            raise ConfigError(
                f"GreedyZeRO: parameter '{entry.name}' is sharded, and its states are distributed already."
            )


def reduce_to_owners(streams: Streams, scheme: Scheme, group: dist.ProcessGroup, piece: int, name: str) -> None:
    """Replace this rank's stream by its mean over the ranks; other streams stay unchanged.

    Args:
        streams: all of one dtype: FP32, BF16 or FP16.
        piece: values per rank in one collective.
        name: name of this gradient for the scheme; the number of the piece is appended.
    """
    some = next(tensor for tensors in streams for tensor in tensors)
    for number, (start, length) in enumerate(_pieces(streams, piece)):
        sent = some.new_zeros(group.size(), length)
        for row, tensors in zip(sent, streams, strict=True):
            _copy(*_inside(row, tensors, start))
        mean = some.new_empty(length)
        scheme.reduce_scatter(mean, sent.view(-1), group, name=f"{name}.{number}")
        into, values = _inside(mean, streams[dist.get_rank(group)], start)
        _copy(values, into)


def gather_from_owners(streams: Streams, wire: Wire, group: dist.ProcessGroup, piece: int) -> None:
    """Replace every stream by that of its owner.

    Args:
        streams: uint8.
        piece: bytes per rank in one collective.
    """
    rank = dist.get_rank(group)
    some = next(tensor for tensors in streams for tensor in tensors)
    for start, length in _pieces(streams, piece):
        mine = some.new_zeros(length)
        _copy(*_inside(mine, streams[rank], start))
        for other, row in enumerate(wire.all_gather(mine, group)):
            if other != rank:
                received, here = _inside(row, streams[other], start)
                _copy(here, received)


def _pieces(streams: Streams, piece: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of each piece, up to the length of the longest stream."""
    longest = max(sum(tensor.numel() for tensor in tensors) for tensors in streams)
    return ((start, min(piece, longest - start)) for start in range(0, longest, piece))


def _inside(row: Tensor, tensors: Sequence[Tensor], start: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return a piece split into parts, and the views of the concatenated tensors that correspond to them."""
    views, offset = [], -start
    for tensor in tensors:
        first, last = max(-offset, 0), min(row.numel() - offset, tensor.numel())
        if first < last:
            views.append(tensor[first:last])
        offset += tensor.numel()
    sizes = [view.numel() for view in views]
    return list(row[: sum(sizes)].split(sizes)), views


def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, values)
