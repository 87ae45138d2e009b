"""Experts in FP8 as inference engines load them: one tensor per expert, with the codes of the forward."""

import pytest
import torch
from safetensors.torch import load_file

import octavo
from octavo.serving import export

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("kind", "names"), [("Mixtral", ("w1", "w3", "w2")), ("Qwen3Moe", ("gate_proj", "up_proj", "down_proj"))]
)
def test_experts_are_stored_as_engines_load_them(kind, names, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 272, "head_dim": 32}
    sizes |= {"moe_intermediate_size": 32} if kind == "Qwen3Moe" else {}
    count = {"num_local_experts" if kind == "Mixtral" else "num_experts": 2}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **count, num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=1
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    octavo.convert(model)
    exported = export(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    experts, block = model.model.layers[0].mlp.experts, "block_sparse_moe" if kind == "Mixtral" else "mlp"
    gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
    for e in range(2):
        for name, weight in zip(names, (gate[e], up[e], experts.down_proj.detach()[e]), strict=True):
            want = octavo.kernels.quantize(weight, "e4m3", "row", "power_of_two")
            place = f"model.layers.0.{block}.experts.{e}.{name}"
            assert torch.equal(stored[f"{place}.weight"].view(torch.uint8), want.codes.view(torch.uint8))
            assert torch.equal(stored[f"{place}.weight_scale"], want.scale)
            assert place in exported.fp8_layers
    assert not any(name.endswith(("gate_up_proj", "down_proj")) or "_gemm" in name for name in stored)
    assert f"model.layers.0.{block}.gate.weight" in stored and not any(
        "_gemm" in name for name in exported.other_layers
    )
    assert any("one tensor per expert, as vLLM" in note for note in exported.notes)
