"""What lives as long as a run is frozen once it has settled, on a GPU, and seen again after it."""

from __future__ import annotations

import gc

import pytest
import torch

from octavo.train.garbage import SETTLED, spared


@pytest.mark.parametrize(("device", "frozen"), [("cpu", False), ("cuda", True)])
def test_objects_are_spared_after_some_steps_and_until_the_end(device: str, frozen: bool) -> None:
    with pytest.raises(KeyError), spared(torch.device(device)) as after_step:
        for _ in range(SETTLED - 1):
            after_step()
        assert gc.get_freeze_count() == 0
        after_step()
        assert (gc.get_freeze_count() > 0) is frozen
        raise KeyError  # a run that fails
    assert gc.get_freeze_count() == 0
