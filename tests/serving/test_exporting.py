"""Exported models: the codes that fprop reads, exported names and config, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import octavo
from octavo.errors import ConfigError, UnsupportedError
from octavo.nn.lora import add_lora, merge_lora
from octavo.numerics import E4M3, granularity_named, quantize, sqnr_db
from octavo.numerics.rotation import hadamard
from octavo.serving import export
from octavo.serving.exporting import served_tensors

BLOCKS = [("block", "compressed-tensors", "128x128"), ("block", "fp8", "128x128")]
FITTING = [("folded", "compressed-tensors", "row"), ("tensorwise", "compressed-tensors", "tensor"), *BLOCKS]


def read(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors, json.loads((directory / "config.json").read_text())


def expected(weight: Tensor, granularity: str, together: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return codes and scales by the specification; a scale per tensor is that of all that are computed together."""
    if granularity != "tensor":
        return quantize(weight.detach(), E4M3, granularity_named(granularity))[:2]
    stack = torch.cat([other.detach() for other in together])
    whole = quantize(stack, E4M3, granularity_named("tensor"), "float32")
    start = sum(other.shape[0] for other in together[: [other is weight for other in together].index(True)])
    return whole.codes[start : start + weight.shape[0]], whole.scale


@pytest.mark.parametrize(("recipe", "format", "granularity"), FITTING)
def test_codes_and_scales_are_those_of_the_specification(make_llama, tmp_path, recipe, format, granularity):
    model = make_llama(recipe)
    export(model, tmp_path / "out", format)
    tensors, _ = read(tmp_path / "out")
    ending = "weight_scale_inv" if format == "fp8" else "weight_scale"
    block = model.layers[1]
    qkv = [block.attention.wq.weight, block.attention.wk.weight, block.attention.wv.weight]
    inner = [block.feed_forward.w1.weight, block.feed_forward.w3.weight]
    places = {
        "self_attn.q_proj": (qkv[0], qkv),
        "self_attn.v_proj": (qkv[2], qkv),
        "self_attn.o_proj": (block.attention.wo.weight, [block.attention.wo.weight]),
        "mlp.gate_proj": (inner[0], inner),
        "mlp.up_proj": (inner[1], inner),
        "mlp.down_proj": (block.feed_forward.w2.weight, [block.feed_forward.w2.weight]),
    }
    for name, (weight, together) in places.items():
        codes, scale = expected(weight, granularity, together)
        stored = tensors[f"model.layers.1.{name}.weight"]
        assert stored.dtype == torch.float8_e4m3fn
        assert torch.equal(stored.view(torch.uint8), codes.view(torch.uint8)), name
        stored_scale = tensors[f"model.layers.1.{name}.{ending}"]
        assert stored_scale.dtype == torch.float32
        assert torch.equal(stored_scale.flatten(), scale.flatten()), name
        assert tuple(stored_scale.shape) == ((1,) if granularity == "tensor" else tuple(scale.shape))


def test_all_else_is_written_as_values(make_llama, tmp_path):
    model = make_llama()
    export(model, tmp_path / "out", dtype=torch.float16)
    tensors, config = read(tmp_path / "out")
    assert torch.equal(tensors["model.embed_tokens.weight"], model.tok_embeddings.weight.half())
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight.half())
    assert torch.equal(
        tensors["model.layers.0.post_attention_layernorm.weight"], model.layers[0].ffn_norm.weight.half()
    )
    assert len(tensors) == 2 * 7 * 2 + 2 * 2 + 3
    assert config["dtype"] == config["torch_dtype"] == "float16"


def test_the_model_stays_as_it_is(make_llama, tmp_path):
    model, tokens = make_llama(), torch.randint(256, (1, 16))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    y = model(tokens)
    export(model, tmp_path / "out")
    assert torch.equal(model(tokens), y)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("recipe", "weights", "inputs"),
    [
        ("folded", {"strategy": "channel"}, {"strategy": "token"}),
        ("tensorwise", {"strategy": "tensor"}, {"strategy": "tensor"}),
        ("block", {"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}),
    ],
)
def test_compressed_tensors_says_how_weights_and_inputs_are_quantised(make_llama, tmp_path, recipe, weights, inputs):
    export(make_llama(recipe), tmp_path / "out", "compressed-tensors")
    quantization = read(tmp_path / "out")[1]["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors" and quantization["format"] == "float-quantized"
    assert quantization["ignore"] == ["lm_head"]
    (group,) = quantization["config_groups"].values()
    numbers = {"num_bits": 8, "type": "float", "symmetric": True}
    assert group["targets"] == ["Linear"]
    assert group["weights"] == {**numbers, **weights, "dynamic": False}
    assert group["input_activations"] == {**numbers, **inputs, "dynamic": True}


def test_fp8_says_which_blocks_and_what_is_not_in_it(make_llama, tmp_path):
    policy = octavo.Policy(keep={"layers.0.*": "mine", "lm_head": "mine"})
    export(make_llama("block", policy), tmp_path / "out", "fp8")
    quantization = read(tmp_path / "out")[1]["quantization_config"]
    left = quantization.pop("modules_to_not_convert")
    assert quantization == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    }
    assert len(left) == 8 and "model.layers.0.self_attn.q_proj" in left and "lm_head" in left


def test_layers_of_different_recipes_are_named_by_their_groups(make_llama, tmp_path):
    model = make_llama("folded")
    mixed = {"base": "folded", "modules": {"layers.1.feed_forward.*": {"base": "block"}}}
    octavo.convert(model, mixed)
    exported = export(model, tmp_path / "out")
    groups = read(tmp_path / "out")[1]["quantization_config"]["config_groups"]
    by_strategy = {group["weights"]["strategy"]: group["targets"] for group in groups.values()}
    assert by_strategy["block"] == [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "down", "up")]
    assert len(by_strategy["channel"]) == 11
    assert "weights by row, inputs by token" in str(exported) and "weights by 128x128, inputs by 1x128" in str(exported)


def test_static_scales_of_inputs_are_written(make_llama, tmp_path):
    model = make_llama("bf16")
    tokens = torch.randint(256, (2, 32))
    calibration = octavo.calibrate(model, [tokens], loss=lambda model, batch: model(batch, batch))
    calibration.save(tmp_path / "scales.json")
    octavo.convert(model, "static", scales=tmp_path / "scales.json")
    export(model, tmp_path / "out")
    tensors, config = read(tmp_path / "out")
    (group,) = config["quantization_config"]["config_groups"].values()
    assert group["input_activations"]["dynamic"] is False
    known = octavo.scales(model).state_dict()["layers.0.attention.wo.input"][0]
    assert torch.equal(tensors["model.layers.0.self_attn.o_proj.input_scale"], known.reshape(1))


def test_weights_that_are_stored_in_fp8_are_written_as_they_are(make_llama, tmp_path):
    model = make_llama("folded", octavo.Policy(weights="fp8"))
    weight = model.layers[0].attention.wo.weight
    export(model, tmp_path / "out")
    tensors, _ = read(tmp_path / "out")
    assert torch.equal(
        tensors["model.layers.0.self_attn.o_proj.weight"].view(torch.uint8), weight.codes.view(torch.uint8)
    )
    assert torch.equal(tensors["model.layers.0.self_attn.o_proj.weight_scale"], weight.scale)
    export(model, tmp_path / "plain", "plain", dtype=torch.float32)
    plain, config = read(tmp_path / "plain")
    assert torch.equal(plain["model.layers.0.self_attn.o_proj.weight"], weight.dequantize(torch.float32))
    assert "quantization_config" not in config


def test_a_head_in_fp8_is_written_as_the_values_of_its_codes(make_llama, tmp_path):
    model = make_llama("folded", octavo.Policy(keep_defaults=False))
    exported = export(model, tmp_path / "out")
    tensors, config = read(tmp_path / "out")
    values = octavo.dequantize(octavo.quantize(model.lm_head.weight.detach()), torch.bfloat16)
    assert torch.equal(tensors["lm_head.weight"], values)  # exact: scales are powers of two
    assert config["quantization_config"]["ignore"] == ["lm_head"] and len(exported.fp8_layers) == 14
    assert "the values of its codes" in exported.other_layers["lm_head"]


def test_plain_writes_the_weights_that_are_trained(make_llama, tmp_path):
    model = make_llama()
    exported = export(model, tmp_path / "out", "plain", dtype=torch.float32)
    tensors, _ = read(tmp_path / "out")
    assert torch.equal(tensors["model.layers.0.mlp.gate_proj.weight"], model.layers[0].feed_forward.w1.weight)
    assert not exported.fp8_layers and len(tensors) == 2 * 9 + 3


def same_files(first: Path, second: Path) -> bool:
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in STORED)


STORED = ("model.safetensors", "config.json")
WRAPPED = {
    "a checkpointed block": lambda model: model.layers.__setitem__(0, checkpoint_wrapper(model.layers[0])),
    "a checkpointed layer": lambda model: setattr(
        model.layers[1].attention, "wo", checkpoint_wrapper(model.layers[1].attention.wo)
    ),
    "a compiled block": lambda model: model.layers.__setitem__(0, torch.compile(model.layers[0], backend="eager")),
    "a compiled head": lambda model: setattr(model, "lm_head", torch.compile(model.lm_head, backend="eager")),
    "a compiled model": lambda model: torch.compile(model, backend="eager"),
    "a checkpointed model": checkpoint_wrapper,
}


@pytest.mark.parametrize("keep_defaults", [True, False])
@pytest.mark.parametrize(
    ("recipe", "format"), [("folded", "compressed-tensors"), ("block", "fp8"), ("folded", "plain")]
)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_wrappers_change_nothing_of_what_is_written(make_llama, tmp_path, wrapped, recipe, format, keep_defaults):
    model = make_llama(recipe, octavo.Policy(keep_defaults=keep_defaults))
    expected = export(model, tmp_path / "out", format)
    pushed = dict(served_tensors(model, format))
    whole = WRAPPED[wrapped](model)
    model = model if whole is None else whole
    exported = export(model, tmp_path / "wrapped", format)
    assert exported.fp8_layers == expected.fp8_layers and exported.other_layers == expected.other_layers
    assert same_files(tmp_path / "out", tmp_path / "wrapped")
    assert [*dict(served_tensors(model, format))] == [*pushed]


def test_a_compiled_model_of_transformers_keeps_its_class_and_names(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 80}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    octavo.convert(model)
    names = ["model.layers.0", "lm_head"]
    for name in names:
        model.set_submodule(name, torch.compile(model.get_submodule(name), backend="eager"))
    exported = export(torch.compile(model, backend="eager"), tmp_path / "out")
    tensors, config = read(tmp_path / "out")
    assert config["architectures"] == ["LlamaForCausalLM"] and "model.layers.0.mlp.down_proj.weight_scale" in tensors
    assert len(exported.fp8_layers) == 7 and [*exported.other_layers] == ["lm_head"]
    assert not any("_orig_mod" in name for name in [*tensors, *exported.fp8_layers])


def test_codes_that_would_not_be_written_are_refused(make_llama, tmp_path):
    model = make_llama()

    def rename(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}other"] = state.pop(f"{prefix}weight")

    model.layers[0].attention.wo._register_state_dict_hook(rename)
    with pytest.raises(UnsupportedError, match=r"'layers\.0\.attention\.wo\.weight' is computed in FP8 and is not in"):
        export(model, tmp_path / "out")


def test_adapters_that_are_not_merged_are_refused(make_llama, tmp_path):
    model = make_llama()
    add_lora(model, 4, 8.0, "layers.0.attention.wo")
    with pytest.raises(UnsupportedError, match=r"wo\.lora\.[AB]' is not merged .*merge_lora\(model\)"):
        export(model, tmp_path / "out")
    merge_lora(model)
    export(model, tmp_path / "out")
    model.layers[0].attention.wo = nn.ModuleDict({"base_layer": model.layers[0].attention.wo})  # as PEFT does
    with pytest.raises(UnsupportedError, match=r"base_layer.*merge_and_unload\(\)"):
        export(model, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_weight_of_two_layers_is_written_for_both(make_llama, tmp_path):
    model = make_llama("bf16")
    first, second = (block.attention.wo for block in model.layers)
    second.weight = first.weight
    octavo.convert(model)
    exported, tensors = export(model, tmp_path / "out"), read(tmp_path / "out")[0]
    assert len(exported.fp8_layers) == 14
    names = [f"model.layers.{number}.self_attn.o_proj.weight" for number in range(2)]
    assert torch.equal(*(tensors[name].view(torch.uint8) for name in names))
    assert all(f"{name}_scale" in tensors for name in names)


def test_a_tied_head_is_written_once(make_llama, tmp_path):
    export(make_llama(tie_embeddings=True), tmp_path / "out")
    tensors, config = read(tmp_path / "out")
    assert "lm_head.weight" not in tensors and config["tie_word_embeddings"] is True


def test_layers_that_no_format_stores_are_named(tmp_path):
    """Those of GPT-2 are in FP8, but stored as (K, N)."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=128, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(ConfigError, match="no linear layer is in FP8"):
        export(model, tmp_path / "out")
    octavo.convert(model)
    message = r"in FP8, but .* no layer of it, such as 'transformer.h.0.attn.c_attn': .*\(K, N\).*'plain'"
    with pytest.raises(UnsupportedError, match=message):
        export(model, tmp_path / "out")
    export(model, tmp_path / "out", "plain", dtype=torch.float32)
    again, ids = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), torch.arange(8)[None]
    with octavo.disabled(model.eval()), torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_rotated_integers_are_written_with_their_rotation(make_llama, tmp_path):
    model = make_llama({"base": "rotated", "modules": {"layers.0.feed_forward.w2": {"base": "folded"}}})
    exported = export(model, tmp_path / "out")
    tensors, config = read(tmp_path / "out")
    quantization, layer = config["quantization_config"], "model.layers.1.mlp.down_proj"
    wanted = quantize(model.layers[1].feed_forward.w2.weight.detach(), "int8", "row", "float32", rotation=256)
    assert torch.equal(tensors[f"{layer}.weight"], wanted.codes)
    assert torch.equal(tensors[f"{layer}.weight_scale"], wanted.scale)
    matrix = tensors[f"{layer}.rotation_256_input.weight"]
    assert torch.equal(matrix.double() / 16, hadamard(256)) and matrix.dtype == torch.bfloat16
    assert exported.fp8_layers[layer] == "INT8, weights by row, inputs by token, rotated by blocks of 256"
    assert quantization["format"] == "mixed-precision"
    groups = quantization["config_groups"].values()
    assert {(group["format"], group["weights"]["type"], len(group["targets"])) for group in groups} == {
        ("int-quantized", "int", 13),
        ("float-quantized", "float", 1),
    }
    transforms = quantization["transform_config"]["config_groups"]
    assert {name: len(each["apply"][0]["targets"]) for name, each in transforms.items()} == {
        "rotation_64": 12,
        "rotation_256": 1,
    }
    assert "transformers ignores it" in exported.notes[-1] and "bias" not in exported.notes[-1]
    assert not any("rotation" in name for name, _ in served_tensors(model))  # engines have them


def test_a_rotated_head_is_written_in_its_own_basis(make_llama, tmp_path):
    model = make_llama("rotated", octavo.Policy(keep_defaults=False))
    assert model.lm_head.recipe.name == "rotated"
    export(model, tmp_path / "out", dtype=torch.float32)
    values = read(tmp_path / "out")[0]["lm_head.weight"]
    assert sqnr_db(model.lm_head.weight, values) > 35


def test_what_sylvesters_matrices_have_rotated_is_exported_as_values_alone(make_llama, tmp_path):
    operand = {"rotation": 64, "hadamard": "sylvester"}
    model = make_llama({"base": "rotated", "fprop": {"input": operand, "weight": operand}})
    with pytest.raises(UnsupportedError, match="rotated by Sylvester's matrices, but the export writes regular ones"):
        export(model, tmp_path / "codes", format="compressed-tensors")
    export(model, tmp_path / "values", format="plain", dtype=torch.float32)
    values = read(tmp_path / "values")[0]["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(values, model.layers[0].feed_forward.w3.weight.detach())


def test_rotated_experts_are_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 128}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    octavo.convert(model, "rotated")
    with pytest.raises(
        UnsupportedError, match=r"w1': its input is rotated, and engines .* not of experts\. .* 'plain'"
    ):
        export(model, tmp_path / "out")


def test_other_models_and_formats_are_refused(make_llama, tmp_path):
    with pytest.raises(ConfigError, match=r"'fp9' is not one of .* Did you mean 'fp8'\?"):
        export(make_llama(), tmp_path / "out", "fp9")
    with pytest.raises(
        UnsupportedError, match=r"'layers.0.attention.wq': .*128x128.*Use the format 'compressed-tensors'"
    ):
        export(make_llama(), tmp_path / "out", "fp8")
    with pytest.raises(UnsupportedError, match=r"by 1x32.* Use the format 'plain'"):
        export(make_llama("mxfp8"), tmp_path / "out")
    with pytest.raises(UnsupportedError, match=r"it is not all E4M3.*Use the format 'compressed-tensors' or 'plain'"):
        export(make_llama("rotated"), tmp_path / "out", "fp8")
    with pytest.raises(ConfigError, match="no linear layer is in FP8"):
        export(make_llama("bf16"), tmp_path / "out")
    with pytest.raises(UnsupportedError, match="no engine supports a Sequential"):
        export(nn.Sequential(nn.Linear(64, 64)), tmp_path / "out", "plain")
    with pytest.raises(UnsupportedError, match="span two layers"):
        export(make_llama("block", kv_heads=2), tmp_path / "out")
    drawn = {"base": "folded", "fprop": {"weight": {"rounding": "stochastic"}}}
    with pytest.raises(UnsupportedError, match="stochastically in each forward"):
        model = make_llama("bf16")
        octavo.convert(model, {**drawn, "dgrad": {"weight": {"rounding": "stochastic", "granularity": "row"}}})
        export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
