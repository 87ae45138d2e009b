"""What every way of reducing gradients has in common: two collectives on flat gradients, and a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.distributed.reduce.wire import Wire
from octavo.errors import ConfigError

ALIGNMENT = 16
"""Values of which a rank's part of an all-reduce has a multiple: so every part begins where a wide load may."""


class Scheme(ABC):
    """One way to sum gradients over ranks.

    All ranks of a group make the same calls in the same order, with tensors of the same sizes. A gradient of one rank
    is left as it is: nothing travels, so nothing is rounded. What is not finite on one rank is not finite in the sum.
    """

    name: ClassVar[str]
    """As `reduction` reads it."""

    def __init__(self) -> None:
        self.wire = Wire()

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to others since the scheme was made."""
        return self.wire.sent

    def reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, *, mean: bool = True, name: str = "gradient"
    ) -> None:
        """Write into `output` this rank's part of the mean (or sum) of the ranks' `input`.

        Args:
            output: (n,), FP32, BF16 or FP16: values rank * n to (rank + 1) * n - 1 of the result.
            input: (ranks * n,), FP32, BF16 or FP16; a scheme may change it.
            group: the ranks.
            mean: divide by their number.
            name: of this gradient, for schemes that keep something for each.

        Raises:
            ConfigError: a tensor is not flat and contiguous, or their sizes do not go together.
            UnsupportedError: the backend of the group cannot do it.
        """
        _check(output, input)
        if input.numel() != output.numel() * group.size():
            raise ConfigError(
                f"reduce_scatter: {input.numel()} values over {group.size()} ranks do not make {output.numel()} each: "
                "pad the gradient to a multiple of the ranks."
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
            group: the ranks.
            mean: divide by their number.
            parts: names and sizes of the tensors that lie in it one after another, for schemes that keep something for
                each. By default it is one, called `gradient`.

        Raises:
            ConfigError: the gradient is not flat and contiguous, or its parts are not all of it.
            UnsupportedError: the backend of the group cannot do it.
        """
        _check(gradient)
        parts = {"gradient": gradient.numel()} if parts is None else parts
        if sum(parts.values()) != gradient.numel():
            raise ConfigError(f"all_reduce: parts of {sum(parts.values())} values in a gradient of {gradient.numel()}.")
        if group.size() > 1 and gradient.numel():
            self._all_reduce(gradient, group, 1 / group.size() if mean else 1.0, parts)

    def all_reduce_tensors(self, tensors: Mapping[str, Tensor], group: dist.ProcessGroup, *, mean: bool = True) -> None:
        """Reduce tensors of any shapes in place, all of one dtype in one go. The names are those of `parts`."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
            named = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
            flat = torch.cat([tensor.reshape(-1) for tensor in named.values()])
            sizes = {name: tensor.numel() for name, tensor in named.items()}
            self.all_reduce(flat, group, mean=mean, parts=sizes)
            for tensor, part in zip(named.values(), flat.split(list(sizes.values())), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the next step depends on, tensors by name; empty where there is nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state.

        Raises:
            ConfigError: it is not one of this scheme.
        """
        if state:
            raise ConfigError(f"reduction '{self.name}' keeps no state, got {', '.join(state)}.")

    @abstractmethod
    def _reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup, factor: float, name: str
    ) -> None:
        """Two ranks at least, and something to reduce; the sum is multiplied by `factor`."""

    @abstractmethod
    def _all_reduce(
        self, gradient: Tensor, group: dist.ProcessGroup, factor: float, parts: Mapping[str, int]
    ) -> None: ...


def part_length(count: int, ranks: int) -> int:
    """Return how many of `count` values are one rank's part of an all-reduce; the last may have fewer, or none."""
    each = (count + ranks - 1) // ranks
    return (each + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def padded(x: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return x (n,) in that dtype, followed by zeros up to `count` values; x itself where that is what it is."""
    if x.numel() == count:
        return x.to(dtype)
    longer = x.new_zeros(count, dtype=dtype)
    longer[: x.numel()] = x
    return longer


def _check(*tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_floating_point():
            raise ConfigError(
                f"a gradient to reduce is flat, contiguous and of floating point; this one is {tuple(tensor.shape)} "
                f"of {tensor.dtype}."
            )
