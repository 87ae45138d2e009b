"""The measurement of clients' loops: what it times, and a row of the loop without a library."""

import pytest
import torch
from torch import nn

from octavo_bench import clients


def test_time_is_that_of_the_steps_after_the_warm_up(monkeypatch):
    now = iter([10.0, 12.0])
    monkeypatch.setattr(clients.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(clients.torch.cuda, "is_available", lambda: False)
    clock = clients.Clock(clients.WARM_UP + 8)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with clients.timed(clock, nn.Linear(1, 1)):
        for _ in range(clock.last):
            optimizer.step()
    optimizer.step()
    assert clock.steps == clients.WARM_UP + 8 and clock.ms == 2000 / 8


def test_a_row(monkeypatch):
    pytest.importorskip("transformers", reason="needs transformers")
    monkeypatch.setattr(clients, "WARM_UP", 1)
    row = clients.measure("script", 128, 1, 8, 1, 3, compiled=False)
    assert row["fp8"]["fp8_layers"] == 7 and row["bf16"]["fp8_layers"] == 0 and row["lines"] == 1
    assert abs(row["gap"]) < 0.01 and row["speedup"] > 0


def test_a_client_that_is_not_there_is_left_out(monkeypatch):
    monkeypatch.setitem(clients.CLIENTS, "other", ("no-such-library", clients.script, 1))
    assert clients.measure("other", 128, 1, 8, 1, 3, False)["skipped"] == "no-such-library is not installed"
