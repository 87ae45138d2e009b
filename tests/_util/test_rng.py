"""Random generators go on where they were."""

from __future__ import annotations

import pytest
import torch

from octavo._util.rng import generator_states, restore_generators, untouched_generators

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_continue(device: str) -> None:
    states = generator_states()
    drawn = [torch.rand(3, device=device) for _ in range(2)]
    restore_generators(states)
    assert all(torch.equal(torch.rand(3, device=device), before) for before in drawn), "a state is a copy"


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_drawn_in_a_block_is_drawn_again_after_it(device: str) -> None:
    with pytest.raises(RuntimeError), untouched_generators():
        drawn = torch.rand(3, device=device)
        raise RuntimeError
    assert torch.equal(torch.rand(3, device=device), drawn)


def test_states_of_gpus_that_are_not_here_are_left_alone() -> None:
    states = generator_states()
    drawn = torch.rand(3)
    restore_generators({**states, "cuda.99": torch.zeros_like(states["cpu"])})
    assert torch.equal(torch.rand(3), drawn)
    restore_generators({"cpu": states["cpu"]})
    assert torch.equal(torch.rand(3), drawn) and generator_states().keys() == states.keys()
