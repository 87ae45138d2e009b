"""The states of PyTorch's random generators, the CPU's and each GPU's: what dropout, say, draws from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def generator_states() -> dict[str, Tensor]:
    """Return copies of the states, uint8 on the CPU: `cpu`, and `cuda.0` and so on where CUDA is."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), **{f"cuda.{index}": state for index, state in enumerate(cuda)}}


def restore_generators(states: Mapping[str, Tensor]) -> None:
    """Set the generators to what `generator_states` returned. A GPU of which it has no state keeps its own."""
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"], index)


def untouched_generators() -> AbstractContextManager[None]:
    """Leave the generators after the block as they were before it, whatever is drawn inside."""
    return torch.random.fork_rng(range(torch.cuda.device_count()))  # by itself it warns where there are several GPUs
