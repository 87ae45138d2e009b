"""DeepSpeed's engine with ZeRO-1, 2 and 3: the losses of training without it, on one rank."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs deepspeed (octavo[deepspeed])")

import deepspeed

import octavo
from octavo import kernels
from octavo_bench.clients import one_rank

STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with one_rank():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        yield


def batches(data: Any) -> Iterator[dict[str, torch.Tensor]]:
    for step in range(STEPS):
        yield torch.utils.data.default_collate([data[8 * step + i] for i in range(8)])


def alone(model: Any, data: Any, change: int) -> list[float]:
    octavo.convert(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0), []
    for step, batch in enumerate(batches(data)):
        if step == change:
            octavo.convert(model, "rowwise_bf16_fprop")
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("stage", "change"), [(1, STEPS), (2, STEPS), (3, STEPS), (3, STEPS // 2)])
def test_a_converted_model_learns_as_without_it(llama, sequences, stage, change):
    model = llama()
    count = sum(p.numel() for p in model.parameters())
    settings = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
    }
    if change < STEPS:  # as transformers loads a model for ZeRO-3: parameters have no elements before it is converted
        deepspeed.zero.Init(module=model, config_dict_or_path=settings | {"train_batch_size": 8})
        assert not any(p.numel() for p in model.parameters())
    octavo.convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    losses = []
    with kernels.record() as ledger:
        for step, batch in enumerate(batches(sequences)):
            if step == change:
                plan = octavo.convert(model, "rowwise_bf16_fprop")
                assert plan.fp8_layers == 14 and plan.parameters == count
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert sum(ledger.gemms.values()) >= change * 2 * 15 + (STEPS - change) * 2 * 8
    expected = alone(llama(), sequences, change)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-2, atol=0)
    assert losses[-1] < losses[0]
