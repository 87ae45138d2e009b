"""The benchmark of checkpoints: what is written is whole, and what a step waits for is timed apart."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from octavo.lab.train import checkpoint
from octavo.optim import AdamW
from octavo_bench import checkpoints
from octavo_bench.workloads import WORKLOADS, Training


@pytest.fixture
def training(monkeypatch):
    model = nn.Linear(64, 64)
    optimizer = AdamW(model.parameters(), lr=1e-3, states="exact")

    def forward_backward():
        model(torch.ones(2, 64)).sum().backward()

    made = Training(model=model, forward_backward=forward_backward, update=optimizer.step, optimizer=optimizer)
    monkeypatch.setattr(checkpoints, "build", lambda *given, **options: made)
    monkeypatch.setattr(checkpoints, "warm_up", lambda step, device: step())
    return made


def test_a_row_per_way_and_checkpoints_that_load(training, tmp_path):
    rows = [*checkpoints.bench_checkpoints(WORKLOADS["tiny-model"], "cpu", tmp_path, 2)]
    assert [row["way"] for row in rows] == [checkpoints.WAIT, checkpoints.FIRST, checkpoints.LATER]
    assert all(checkpoints.KIND.keys.keys() <= row.keys() and "error" not in row for row in rows)
    assert all(0 < row["waits_s"] <= row["written_s"] for row in rows)
    assert rows[1]["share"] == pytest.approx(rows[1]["waits_s"] / rows[0]["waits_s"], rel=0.01)
    (path,) = checkpoint.find(tmp_path)
    found = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    states = {name for name in found if name.startswith("optimizer.")}
    assert {"model.weight", "model.bias"} == found.keys() - states and len(states) >= 4
    assert rows[0]["gib"] == round(sum(tensor.nbytes for tensor in found.values()) / 2**30, 3)


def test_a_disk_that_fails_is_an_error_of_its_row(training, monkeypatch, tmp_path):
    def fail(*given, **options):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save", fail)
    rows = [*checkpoints.bench_checkpoints(WORKLOADS["tiny-model"], "cpu", tmp_path, 1)]
    assert all("no space left" in row["error"] for row in rows)
