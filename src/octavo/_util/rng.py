"""The states of PyTorch's random generators on the CPU and each GPU, used by dropout for example."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def generator_states() -> dict[str, Tensor]:
    """Return copies of the states, uint8 on the CPU: `cpu`, and with CUDA `cuda.0` and so on."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), **{f"cuda.{index}": state for index, state in enumerate(cuda)}}


def restore_generators(states: Mapping[str, Tensor]) -> None:
    """Restore states returned by `generator_states`. GPUs without a state are unchanged."""
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda.{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda.{index}"], index)


def untouched_generators() -> AbstractContextManager[None]:
    """Restore the generators after the block to their states before it."""
    return torch.random.fork_rng(range(torch.cuda.device_count()))  # the default warns with several GPUs
