"""The states of PyTorch's random generators on the CPU and each GPU, used by dropout for example."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from octavo.errors import CheckpointError


def generator_states() -> dict[str, Tensor]:
    """Return copies of the states, uint8 on the CPU: `cpu`, and with CUDA `cuda.0` and so on."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), **{f"cuda.{index}": state for index, state in enumerate(cuda)}}


def restore_generators(states: Mapping[str, Tensor]) -> None:
    """Restore states returned by `generator_states`. GPUs without a state are unchanged.

    Raises:
        CheckpointError: the state of the CPU is missing, or one is of another shape or dtype, or damaged.
    """
    for name, here in generator_states().items():
        if name != "cpu" and name not in states:
            continue
        state = states.get(name)
        if state is None or (state.shape, state.dtype) != (here.shape, here.dtype):
            seen = "missing" if state is None else f"{state.dtype} {list(state.shape)}"
            raise CheckpointError(
                f"the state of the random generator '{name}' is {seen}, not uint8 {list(here.shape)}."
            )
        try:
            torch.set_rng_state(state) if name == "cpu" else torch.cuda.set_rng_state(state, int(name[len("cuda.") :]))
        except RuntimeError as error:
            raise CheckpointError(f"the state of the random generator '{name}' is damaged ({error}).") from error


def untouched_generators() -> AbstractContextManager[None]:
    """Restore the generators after the block to their states before it."""
    return torch.random.fork_rng(range(torch.cuda.device_count()))  # the default warns with several GPUs
