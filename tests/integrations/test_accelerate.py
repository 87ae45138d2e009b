"""Accelerate: a converted model under `mixed_precision="bf16"`, and with weights that it brings from elsewhere."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("accelerate", reason="needs accelerate (octavo[clients])")

from accelerate import Accelerator, cpu_offload
from safetensors.torch import load_file

import octavo
from octavo import kernels
from octavo.errors import ConfigError
from octavo.integrations.accelerate import Accelerator as OctavoAccelerator
from octavo.integrations.accelerate import main
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


SCRIPT = """
import sys
import torch
from accelerate import Accelerator
import helper

accelerator = Accelerator(mixed_precision="bf16", cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.randn(16, 64)).float().square().mean())
optimizer.step()
inner = accelerator.unwrap_model(model)
print(sys.argv[1:], helper.NAME, type(inner[0]).__name__, inner[0].recipe.name)
"""


@pytest.mark.parametrize("module", [[], ["accelerate.commands.launch", "--cpu", "--mixed_precision", "bf16", "-m"]])
def test_a_script_runs_in_fp8_without_a_change(tmp_path, module):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("NAME = 'beside'")
    command = [*module, "octavo.integrations.accelerate", str(tmp_path / "train.py"), "--lr", "3"]
    environ = os.environ | {"OCTAVO_RECIPE": "rowwise", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-m", *command], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["['--lr', '3'] beside Linear rowwise"], done.stderr


def test_models_that_are_prepared_alone_are_converted_once(llama):
    accelerator = OctavoAccelerator(mixed_precision="bf16", cpu=True)
    accelerator.octavo_recipe, accelerator.octavo_policy = "folded", octavo.Policy(keep=["*.q_proj"])
    reference, own = llama(), llama()
    octavo.convert(own, "rowwise")
    accelerator.prepare_model(reference, evaluation_mode=True)
    assert accelerator.plan is not None and accelerator.plan.fp8_layers == FP8_LAYERS - 2
    plan = accelerator.plan
    accelerator.prepare(reference, own)
    assert accelerator.plan is plan and own.model.layers[0].mlp.up_proj.recipe.name == "rowwise"


def test_another_librarys_fp8_is_refused(llama, monkeypatch):
    accelerator = OctavoAccelerator(cpu=True)
    monkeypatch.setattr(type(accelerator), "mixed_precision", "fp8")
    with pytest.raises(ConfigError, match="torchao, Transformer Engine or MS-AMP"):
        accelerator.prepare(llama())
    with pytest.raises(ConfigError, match="name a script"):
        main([])
