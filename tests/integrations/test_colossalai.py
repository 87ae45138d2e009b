"""Colossal-AI's Booster around a converted model: the losses of training without it, on one rank.

Its ZeRO plugins want a GPU. It asks for an old PyTorch: `pip install --no-deps colossalai==0.5.0`, and what it imports.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

pytest.importorskip("colossalai", reason="needs colossalai")

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin

import octavo
from octavo import kernels

STEPS = 6


def train(model: Any, data: Any, booster: Any = None) -> list[float]:
    octavo.convert(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0), []
    if booster is not None:
        model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(STEPS):
        loss = model(**torch.utils.data.default_collate([data[8 * step + i] for i in range(8)])).loss
        loss.backward() if booster is None else booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_converted_model_learns_as_without_it(llama: Any, sequences: Any) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    colossalai.launch(rank=0, world_size=1, host="127.0.0.1", port=port, backend="gloo", verbose=False)
    with kernels.record() as ledger:
        losses = train(llama(), sequences, Booster(plugin=TorchDDPPlugin()))
    torch.distributed.destroy_process_group()
    assert sum(ledger.gemms.values()) >= STEPS * 2 * 15
    assert losses == train(llama(), sequences) and losses[-1] < losses[0]
