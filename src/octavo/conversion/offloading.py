"""Activation offloading: tensors that a block saves for backward are moved to host memory, and prefetched for backward.

While a block computes, its saved tensors are copied to pinned memory on a side stream; the GPU copies are freed once
the next block has computed. In backward, the first read of a block's tensors starts the prefetch of the previous block,
so that one block is in transit while another computes. Tensors are copied as saved: codes take half the bytes of BF16.

On a CPU the same code makes plain copies, which saves nothing but makes it testable.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from octavo._util.terminal import quantity
from octavo.conversion.blocks import Wrapped, choose, storages, unwrap, wrap
from octavo.errors import ConfigError, UnsupportedError


def offload(
    model: nn.Module, *, blocks: str | Sequence[str] | None = None, min_bytes: int = 2**20, keep_last: int = 1
) -> Offload:
    """Offload the tensors that a model's blocks save for backward to host memory, in place. The result undoes it.

    Convert the model first. Blocks may be compiled one by one (`block.compile()`), not as part of a whole model.
    Parameters and buffers stay on the GPU. Results are bitwise the same.

    Args:
        blocks: name patterns of the modules; default the children of the `nn.ModuleList` with the most parameters.
        min_bytes: smaller tensors stay on the GPU.
        keep_last: number of last blocks that are not offloaded: backward needs their tensors first, and at once.

    Raises:
        ConfigError: a pattern that matches nothing, a count below 0, or a block that is offloaded already.
    """
    if min_bytes < 0 or keep_last < 0:
        raise ConfigError(f"min_bytes = {min_bytes}, keep_last = {keep_last}: neither can be below 0.")
    chosen = choose(model, blocks)
    names = chosen[: max(len(chosen) - keep_last, 0)]
    inside = {module for name in names for module in model.get_submodule(name).modules()}
    beside = [weakref.ref(module) for module in model.modules() if module not in inside]
    offload = Offload(weakref.ref(model), names, min_bytes, beside)
    for name in names:
        wrap(model.get_submodule(name), OffloadedBlock, offload=offload)
    return offload


class OffloadedBlock(Wrapped):
    """A block whose saved tensors are offloaded."""

    fields = ("offload",)
    offload: Offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block, compiled code and hooks included."""
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                f"{type(self).__name__} is offloaded, and cannot be compiled as part of a model: compile the blocks "
                "one by one, `for block in model.layers: block.compile()`."
            )
        beside = (module for each in self.offload.beside if (module := each()) is not None)
        stay = storages((*self.modules(), *beside))
        call = self.offload.begin(stay, self._compiled_call_impl is not None)
        with torch.autograd.graph.saved_tensors_hooks(call.pack, _unpack):
            return super().__call__(*args, **kwargs)


@dataclass(eq=False)
class Offload:
    """The offloaded blocks of a model. `remove()` undoes it. Its blocks hold it, so it does not hold the model."""

    model: weakref.ref[nn.Module] = field(repr=False)
    blocks: list[str]
    """Full names."""
    min_bytes: int
    beside: list[weakref.ref[nn.Module]] = field(default_factory=list, repr=False)
    """Modules outside of the blocks, whose parameters and buffers (rotary tables, say) are not offloaded either."""
    moved: int = 0
    """Bytes copied to the host so far."""
    _last: weakref.ref[_BlockCall] | None = None
    _leaving: list[_BlockCall] = field(default_factory=list)
    """Calls whose copies to the host may be in progress; the last one is computing."""
    _streams: dict[torch.device, Any] = field(default_factory=dict)

    def begin(self, stay: set[int], compiled: bool) -> _BlockCall:
        """Return a new call, and free the GPU memory of calls before the last one."""
        while len(self._leaving) > 1:
            self._leaving.pop(0).free_gpu_copies()
        call = _BlockCall(self, stay, compiled, self._last)
        self._last = weakref.ref(call)
        self._leaving.append(call)
        return call

    def finish(self) -> None:
        """Wait for all copies to the host and free the GPU memory. Backward calls it."""
        while self._leaving:
            self._leaving.pop(0).free_gpu_copies()

    def remove(self) -> None:
        """Let the blocks keep their saved tensors on the GPU."""
        self.finish()
        if (model := self.model()) is None:
            return
        for name in self.blocks:
            unwrap(model.get_submodule(name), OffloadedBlock)

    def stream(self, device: torch.device) -> Any:
        """Return the side stream for copies; None on a CPU."""
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams.get(device)

    def __str__(self) -> str:
        return (
            f"{quantity(len(self.blocks), 'block')}: saved tensors of {self.min_bytes:,} bytes and more go to the host;"
            f" {self.moved / 2**30:.2f} GiB copied so far"
        )

    def __deepcopy__(self, memo: Any) -> Offload:
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("an Offload cannot be pickled: call octavo.offload() again after loading the model.")


class _BlockCall:
    """One call of a block, with its saved tensors."""

    def __init__(
        self, owner: Offload, stay: set[int], compiled: bool, previous: weakref.ref[_BlockCall] | None
    ) -> None:
        self.owner, self.stay, self.compiled, self.previous = owner, stay, compiled, previous
        self.slots: weakref.WeakSet[_OffloadedTensor] = weakref.WeakSet()
        self.known: dict[tuple[Any, ...], _OffloadedTensor] = {}
        self.out: Any = None
        """Event after the last copy to the host."""

    def pack(self, x: Tensor) -> Tensor | _OffloadedTensor:
        """Return the saved tensor itself, or its slot on the host."""
        if not self._is_offloaded(x):
            return x
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)  # a write in between makes it another tensor
        if key not in self.known:  # two layers may save the same codes
            self.known[key] = slot = _OffloadedTensor(self, x)
            self.slots.add(slot)
            self.owner.moved += slot.host.nbytes
        return self.known[key]

    def _is_offloaded(self, x: Tensor) -> bool:
        if type(x) is not Tensor or x.nbytes < max(self.owner.min_bytes, 1) or x.device.type not in ("cpu", "cuda"):
            return False
        if x.untyped_storage().data_ptr() in self.stay:
            return False
        return not self.compiled or _dense(x)  # compiled code relies on strides

    def free_gpu_copies(self) -> None:
        """Free the GPU copies, after the copies to the host."""
        if self.out is not None:
            self.out.wait()
        for slot in self.known.values():
            slot.source = None
        self.known.clear()

    def prefetch(self) -> None:
        """Start copying all tensors back, unless that has begun."""
        for slot in self.slots:
            slot.prefetch()


class _OffloadedTensor:
    """A saved tensor on the host."""

    def __init__(self, call: _BlockCall, x: Tensor) -> None:
        self.call, self.device, self.source, self.back = call, x.device, x, None
        self.shape, once = x.shape, _without_repeats(x.detach())
        self.order = _outermost_first(once)
        self.arrived: Any = None
        lying = once.permute(self.order)
        pinned = x.is_cuda
        self.host = torch.empty(lying.shape, dtype=x.dtype, pin_memory=pinned)
        stream = call.owner.stream(x.device)
        with _after_now(stream):
            self.host.copy_(lying, non_blocking=pinned)
            call.out = stream.record_event() if stream is not None else None

    source: Tensor | None
    """The tensor itself, while the copy is made."""
    back: Tensor | None

    def prefetch(self) -> None:
        """Start copying the tensor back, unless that has begun."""
        if self.back is not None:
            return
        back = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)  # on the compute stream
        stream = self.call.owner.stream(self.device)
        with _after_now(stream):
            back.copy_(self.host, non_blocking=stream is not None)
            if stream is not None:
                back.record_stream(stream)  # it may be freed without being read, while the copy runs
                self.arrived = stream.record_event()
        self.back = back

    def get(self) -> Tensor:
        """Return the tensor, and start prefetching the tensors of the previous block."""
        self.call.owner.finish()
        self.call.prefetch()
        previous = None if self.call.previous is None else self.call.previous()
        if previous is not None:
            previous.prefetch()
        assert self.back is not None
        if self.arrived is not None:
            self.arrived.wait()
        return self.back.permute(_inverse(self.order)).expand(self.shape)


def _unpack(kept: Tensor | _OffloadedTensor) -> Tensor:
    return kept.get() if isinstance(kept, _OffloadedTensor) else kept


def _after_now(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which copies run on `stream`, after all work launched so far."""
    if stream is None:
        return nullcontext()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return torch.cuda.stream(stream)


def _dense(x: Tensor) -> bool:
    """Return whether a tensor fills its memory without gaps, in any order of dimensions."""
    return x.permute(_outermost_first(x)).is_contiguous()


def _without_repeats(x: Tensor) -> Tensor:
    """Return a tensor before it was expanded: its dimensions of stride 0 with size 1."""
    return x[tuple(slice(None if stride else 1) for stride in x.stride())]


def _outermost_first(x: Tensor) -> list[int]:
    """Return the dimensions of a tensor from the outermost in memory to the innermost."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda dimension: -strides[dimension])


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
