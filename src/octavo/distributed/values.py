"""State dicts of distributed parameters: plain values, independent of how weights are stored or gathered."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.tensor import FP8Tensor, WrapperTensor, local


def leave_values(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace wrapped and FP8 weights in a state dict by plain values in the parameter's dtype: a state-dict hook."""
    for name in module._parameters:
        found = state.get(prefix + name)
        if isinstance(found, DTensor) and isinstance(found._local_tensor, (WrapperTensor, FP8Tensor)):
            values = local(found)
            state[prefix + name] = placed_as(found, values.dequantize() if isinstance(values, FP8Tensor) else values)


def placed_as(like: DTensor, values: Tensor) -> DTensor:
    """Return this rank's values as a DTensor with the global shape, mesh and placements of `like`."""
    return DTensor.from_local(
        values, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
