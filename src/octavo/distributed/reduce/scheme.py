"""Gradient reductions: two collectives on flat gradients, and a state. `Wire` counts the bytes sent.

Over one group of ranks sums are made by the backend, or by an all-to-all and a kernel that sums in FP32. A sum computed
along the way is rounded at every hop. In a `LocalSum` each contribution is rounded once, before it is sent, and the
errors average out with more ranks. The bytes are those of a reduce-scatter of the same width. The pattern is that of
ZeRO++ (arXiv 2306.10209, section 3.3). `TwoLevel` reduces within a host at higher precision, across hosts in FP8.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from octavo.errors import ConfigError
from octavo.kernels.wire import add, pack

ALIGNMENT = 16
"""A rank's part of an all-reduce is a multiple of this many values, so that parts are aligned for vector loads."""

# Renamed in PyTorch 2.13, whose old names warn.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Wire:
    """Collectives on contiguous tensors, on the current stream, which count the bytes that this rank sends.

    Bytes are those that the algorithm must send: in an all-to-all or reduce-scatter everything but a rank's own part,
    in an all-gather its own part to each other rank, in an all-reduce both (Patarasuk and Yuan, 2009, doi
    10.1016/j.jpdc.2008.09.002, section 3). FP8 is sent as bytes where only copies are made: gloo does not support it.
    """

    def __init__(self) -> None:
        self.sent = 0
        """Bytes that this rank has sent to others."""

    def all_to_all(self, messages: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Send row r of `messages` (ranks, width) to rank r; return what each rank sent here, (ranks, width)."""
        received = torch.empty_like(messages)
        dist.all_to_all_single(_bytes(received), _bytes(messages), group=group)
        self.sent += messages.nbytes * (group.size() - 1) // group.size()
        return received

    def all_gather(self, message: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the messages (width,) of all ranks, (ranks, width)."""
        gathered = message.new_empty(group.size(), message.numel())
        _all_gather(_bytes(gathered), _bytes(message), group=group)
        self.sent += message.nbytes * (group.size() - 1)
        return gathered

    def reduce_scatter(self, output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
        """Sum by the backend, in the dtype of the tensors; output (n,), input (ranks * n,)."""
        _reduce_scatter(output, input, group=group)
        self.sent += input.nbytes * (group.size() - 1) // group.size()

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce in place by the backend, in the dtype of the tensor."""
        dist.all_reduce(tensor, op, group=group)
        self.sent += 2 * tensor.nbytes * (group.size() - 1) // group.size()


class Scheme(ABC):
    """A gradient reduction.

    All ranks of a group make the same calls in the same order, with tensors of the same sizes. With a single rank
    nothing is sent, and nothing is rounded. A value that is not finite on one rank is not finite in the sum.
    """

    name: ClassVar[str]
    """Name for `reduction`."""

    def __init__(self) -> None:
        self.wire = Wire()

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to others so far."""
        return self.wire.sent

    def reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, *, mean: bool = True, name: str = "gradient"
    ) -> None:
        """Write into `output` this rank's part of the mean (or sum) of the ranks' `input`.

        Args:
            output: (n,), FP32, BF16 or FP16: values rank * n to (rank + 1) * n - 1 of the result.
            input: (ranks * n,), FP32, BF16 or FP16; may be overwritten.
            name: name of this gradient, for schemes with state.

        Raises:
            ConfigError: a tensor is not flat and contiguous, or the sizes do not match.
            UnsupportedError: the backend of the group does not support it.
        """
        _check(output, input)
        if input.numel() != output.numel() * group.size():
            raise ConfigError(
                f"reduce_scatter: {input.numel()} values over {group.size()} ranks do not give {output.numel()} each: "
                "pad the gradient to a multiple of the number of ranks."
            )
        if group.size() == 1:
            output.copy_(input)
        elif output.numel():
            self._reduce_scatter(output, input, group, 1 / group.size() if mean else 1.0, name)

    def all_reduce(
        self,
        gradient: Tensor,
        group: dist.ProcessGroup,
        *,
        mean: bool = True,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        """Replace a gradient by the mean (or sum) over the ranks: the same bits on every rank.

        Args:
            gradient: (n,), FP32, BF16 or FP16, contiguous; any n.
            parts: names and sizes of the consecutive tensors that it consists of, for schemes with state. By default a
                single one, `gradient`.

        Raises:
            ConfigError: the gradient is not flat and contiguous, or its parts do not add up to it.
            UnsupportedError: the backend of the group does not support it.
        """
        _check(gradient)
        parts = {"gradient": gradient.numel()} if parts is None else parts
        if sum(parts.values()) != gradient.numel():
            raise ConfigError(f"all_reduce: parts of {sum(parts.values())} values in a gradient of {gradient.numel()}.")
        if group.size() > 1 and gradient.numel():
            self._all_reduce(gradient, group, 1 / group.size() if mean else 1.0, parts)

    def all_reduce_tensors(self, tensors: Mapping[str, Tensor], group: dist.ProcessGroup, *, mean: bool = True) -> None:
        """Reduce tensors of any shapes in place, with one all-reduce per dtype. The names are those of `parts`."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
            named = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
            flat = torch.cat([tensor.reshape(-1) for tensor in named.values()])
            sizes = {name: tensor.numel() for name, tensor in named.items()}
            self.all_reduce(flat, group, mean=mean, parts=sizes)
            for tensor, part in zip(named.values(), flat.split(list(sizes.values())), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that the next step depends on, tensors by name; empty for most schemes."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state.

        Raises:
            ConfigError: it belongs to another scheme.
        """
        if state:
            raise ConfigError(f"reduction '{self.name}' has no state, got {', '.join(state)}.")

    @abstractmethod
    def _reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, factor: float, name: str
    ) -> None:
        """Reduce over at least two ranks at least one value; the sum is multiplied by `factor`."""

    @abstractmethod
    def _all_reduce(
        self, gradient: Tensor, group: dist.ProcessGroup, factor: float, parts: Mapping[str, int]
    ) -> None: ...


class FP32(Scheme):
    """FP32 on the wire, FP32 sums."""

    name = "fp32"
    dtype: ClassVar[torch.dtype] = torch.float32

    def _reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, factor: float, name: str
    ) -> None:
        part = output if output.dtype == self.dtype else torch.empty_like(output, dtype=self.dtype)
        self.wire.reduce_scatter(part, input.to(self.dtype), group)
        torch.mul(part, factor, out=part)
        if part is not output:
            output.copy_(part)

    def _all_reduce(self, gradient: Tensor, group: dist.ProcessGroup, factor: float, parts: Mapping[str, int]) -> None:
        summed = gradient.to(self.dtype)
        self.wire.all_reduce(summed, group)
        gradient.copy_(summed.mul_(factor))


class PlainBF16(FP32):
    """BF16 on the wire, sums rounded to BF16 at each hop: PyTorch's behaviour with BF16 gradients."""

    name = "bf16-plain"
    dtype = torch.bfloat16


class LocalSum(Scheme):
    """Each rank sums its part, in the order of ranks; an all-reduce then gathers the encoded sums."""

    def _reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, factor: float, name: str
    ) -> None:
        length = output.numel()
        received = self.wire.all_to_all(self._encode(input, group.size(), length), group)
        add(received[None], length, output, factor)

    def _all_reduce(self, gradient: Tensor, group: dist.ProcessGroup, factor: float, parts: Mapping[str, int]) -> None:
        length = part_length(gradient.numel(), group.size())
        received = self.wire.all_to_all(self._encode(gradient, group.size(), length), group)
        mine = gradient.new_empty(length, dtype=torch.float32)
        add(received[None], length, mine, factor)
        gathered = self.wire.all_gather(self._encode(mine, 1, length)[0], group)
        add(gathered[:, None], length, gradient)

    @abstractmethod
    def _encode(self, x: Tensor, messages: int, length: int) -> Tensor:
        """Return x as messages of `length` values, (messages, width), as `kernels.wire.add` reads them."""


class BF16(LocalSum):
    """BF16 on the wire, FP32 sums."""

    name = "bf16"

    def _encode(self, x: Tensor, messages: int, length: int) -> Tensor:
        return padded(x, messages * length, torch.bfloat16).view(messages, length)


class FP8Block(LocalSum):
    """E4M3 on the wire, one scale per 128 values, local to the sender; FP32 sums."""

    name = "fp8-block"

    def _encode(self, x: Tensor, messages: int, length: int) -> Tensor:
        return pack(x, messages, length)


class TwoLevel(Scheme):
    """Reduce-scatter within each host, reduce across hosts, gather within the host.

    Across hosts a rank sends only its part of the host's sum: 1 / (ranks per host) of the gradient.
    """

    name = "two-level"

    def __init__(self, mesh: DeviceMesh, inner: Scheme | None = None, outer: Scheme | None = None) -> None:
        """Reduce over all ranks of a mesh (hosts, ranks of a host), `bf16` within a host and `fp8-block` across.

        Raises:
            ConfigError: the mesh is not 2-D.
        """
        super().__init__()
        if mesh.ndim != 2:
            raise ConfigError(
                f"reduction 'two-level' takes a mesh (hosts, ranks of a host), got {mesh.ndim} dimension(s): "
                "init_device_mesh(device, (hosts, ranks))."
            )
        self.mesh = mesh
        self.inner, self.outer = inner or BF16(), outer or FP8Block()
        self._across, self._within = mesh.get_group(0), mesh.get_group(1)
        self._ranks: list[int] = mesh.mesh.flatten().tolist()

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to others; `outer.sent` are those that left the host."""
        return self.wire.sent + self.inner.sent + self.outer.sent

    def _reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, factor: float, name: str
    ) -> None:
        self._check(group)
        hosts, ranks = self._across.size(), self._within.size()
        # Group the values of one local rank on all hosts, so that the host's reduce-scatter delivers them to it.
        turned = input.view(hosts, ranks, -1).transpose(0, 1).reshape(-1)
        part = input.new_empty(hosts * output.numel(), dtype=torch.float32)
        mean = factor != 1  # of two ranks at least
        self.inner.reduce_scatter(part, turned, self._within, mean=mean, name=name)
        self.outer.reduce_scatter(output, part, self._across, mean=mean, name=name)

    def _all_reduce(self, gradient: Tensor, group: dist.ProcessGroup, factor: float, parts: Mapping[str, int]) -> None:
        self._check(group)
        ranks, mean = self._within.size(), factor != 1  # of two ranks at least
        length, name = part_length(gradient.numel(), ranks), next(iter(parts))  # a rank has a part of all tensors
        part, whole = gradient.new_empty(length, dtype=torch.float32), padded(gradient, ranks * length, gradient.dtype)
        self.inner.reduce_scatter(part, whole, self._within, mean=mean, name=name)
        self.outer.all_reduce(part, self._across, mean=mean, parts={name: length})
        gathered = self.wire.all_gather(part.to(gradient.dtype), self._within)
        gradient.copy_(gathered.view(-1)[: gradient.numel()])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states of both levels, as `inner.<name>` and `outer.<name>`."""
        kept: dict[str, Tensor] = {}
        for level, scheme in (("inner", self.inner), ("outer", self.outer)):
            kept |= {f"{level}.{key}": value for key, value in scheme.state_dict().items()}
        return kept

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the states of both levels."""
        for level, scheme in (("inner.", self.inner), ("outer.", self.outer)):
            scheme.load_state_dict({key.removeprefix(level): v for key, v in state.items() if key.startswith(level)})

    def _check(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        if ranks != self._ranks:
            raise ConfigError(
                f"reduction 'two-level' was made for the ranks {self._ranks}, but is used for {ranks}: shard over all "
                "ranks of its mesh, in that order."
            )


def part_length(count: int, ranks: int) -> int:
    """Return the size of one rank's part of an all-reduce of `count` values; the last ranks may have less, or none."""
    each = (count + ranks - 1) // ranks
    return (each + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def padded(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return x (n,) in that dtype, zero-padded to `count` values; x itself where nothing changes."""
    if x.numel() == count:
        return x.to(dtype)
    longer = x.new_zeros(count, dtype=dtype)
    longer[: x.numel()] = x
    return longer


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_floating_point():
            raise ConfigError(
                f"a gradient to reduce must be flat, contiguous and floating-point; this one is {tuple(tensor.shape)} "
                f"of {tensor.dtype}."
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
