"""State dicts of distributed parameters: plain values, and no trace of how weights are stored or gathered."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.tensor import FP8Tensor, Holder, local


def leave_values(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave in a state dict the values of a module's own weights, in their own dtype: a hook of the module."""
    for name in module._parameters:
        found = state.get(prefix + name)
        if isinstance(found, DTensor) and isinstance(found._local_tensor, (Holder, FP8Tensor)):
            values = local(found)
            state[prefix + name] = placed_as(found, values.dequantize() if isinstance(values, FP8Tensor) else values)


def placed_as(like: DTensor, values: Tensor) -> DTensor:
    """Return this rank's values as part of a DTensor of that shape, mesh and placements."""
    return DTensor.from_local(
        values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
