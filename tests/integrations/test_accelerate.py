"""Accelerate: a converted model under `mixed_precision="bf16"`, and with weights that it brings from elsewhere."""

import pytest
import torch

pytest.importorskip("accelerate", reason="needs accelerate (octavo[clients])")

from accelerate import Accelerator, cpu_offload
from safetensors.torch import load_file

import octavo
from octavo import kernels
from octavo.nn import Linear

FP8_LAYERS = 14


def losses_of(model, data, convert: bool) -> list[float]:
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    if convert:
        octavo.convert(model)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), loader)
    losses = []
    with kernels.record() as ledger:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    assert sum(ledger.gemms.values()) == convert * len(losses) * 2 * 15
    state = accelerator.get_state_dict(model)
    assert state.keys() == accelerator.unwrap_model(model).state_dict().keys()
    return losses


def test_a_converted_model_trains_with_the_loss_of_bf16(llama, sequences):
    expected, got = losses_of(llama(), sequences, False), losses_of(llama(), sequences, True)
    assert expected[-1] < 0.7 * expected[0] and abs(got[-1] - expected[-1]) < 0.05 * expected[-1]


def test_weights_that_hooks_bring_before_each_forward(llama, sequences):
    model = llama()
    octavo.convert(model)
    ids = sequences[0]["input_ids"][None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        cpu_offload(model, execution_device=torch.device("cpu"))
        assert all(m.weight.is_meta for m in model.modules() if isinstance(m, Linear))
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=1e-2)


def test_it_saves_the_values_of_weights_in_fp8(llama, tmp_path):
    model = llama().bfloat16()
    octavo.convert(model, policy=octavo.Policy(weights="fp8"))
    Accelerator(cpu=True).save_model(model, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    for name, parameter in model.named_parameters():
        stored = parameter.detach()
        assert torch.equal(stored.dequantize() if isinstance(stored, octavo.FP8Tensor) else stored, saved[name]), name
