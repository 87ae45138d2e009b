from __future__ import annotations

import time

import pytest
import torch

from octavo.train.stopwatch import Stopwatch


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_measures_the_time_inside(device: str) -> None:
    watch = Stopwatch(torch.device(device))
    with watch:
        time.sleep(0.02)
    assert 15 < watch.milliseconds() < 2000
