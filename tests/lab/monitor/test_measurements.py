from __future__ import annotations

import pytest
import torch

from octavo.errors import ConfigError
from octavo.lab.monitor.measurements import AsyncScalars

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_arrive_as_they_were(device: str) -> None:
    loss = torch.tensor([[2.5]], device=device, requires_grad=True)
    count = torch.tensor(3, device=device)
    arriving = AsyncScalars(7, {"loss": loss, "lr": 1e-3, "count": count})
    count += 1
    assert arriving.read() == {"loss": 2.5, "lr": 1e-3, "count": 3.0}
    assert arriving.step == 7 and arriving.has_arrived()


def test_a_step_may_have_measured_nothing() -> None:
    assert AsyncScalars(1, {}).has_arrived() and AsyncScalars(1, {}).read() == {}


def test_a_tensor_of_many_is_no_number() -> None:
    with pytest.raises(ConfigError, match="'loss' has 2 elements, not 1"):
        AsyncScalars(1, {"loss": torch.ones(2)})
