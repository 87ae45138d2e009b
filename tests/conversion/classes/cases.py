"""Sixty classes of models with what the plan should say of them: which weights stay in high precision, and why.

Every other matrix that the model multiplies by, with at least 16 rows and columns, belongs in FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import written
from torch import nn

HEAD, ROUTER = "output head", "router"
WITHIN = "itself"
"""Of a weight that no layer reads."""
Inputs = Callable[[], dict[str, Any] | tuple[Any, ...]]


class Case(NamedTuple):
    name: str
    package: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    kept: dict[str, str]
    """Pattern of parameter names -> start of the reason why they stay in high precision."""


def ids(rows: int = 2, columns: int = 16) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 90, (rows, columns))}


def pixels(size: int = 32, name: str = "pixel_values") -> dict[str, Any]:
    return {name: torch.randn(2, 3, size, size)}


def sound(name: str = "input_values", length: int = 1600) -> dict[str, Any]:
    return {name: torch.randn(2, length)}


def pair() -> dict[str, Any]:
    return {**ids(), "decoder_input_ids": torch.randint(3, 90, (2, 8))}


def _of_transformers(name: str, config: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**settings))
        return made

    return make


def _of(package: str, name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import importlib

        made: nn.Module = getattr(importlib.import_module(package), name)(**settings)
        return made

    return make


SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LM, MOE = {"*lm_head.weight": HEAD}, {"*lm_head.weight": HEAD, "*.gate.weight": ROUTER}
SEQ2SEQ = {
    "vocab_size": 96, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
IMAGES = {**SIZES, "image_size": 32, "patch_size": 8}
SPEECH = {
    **SIZES, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


def _language() -> list[Case]:
    """Return causal language models of transformers: (class stem, config stem or None, settings, kept)."""
    rows: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("Llama", GROUPED, LM),
        ("Mistral", GROUPED, LM),
        ("Qwen2", GROUPED, LM),
        ("Qwen3", {**GROUPED, "head_dim": 16}, LM),
        ("Gemma2", {**GROUPED, "head_dim": 16}, LM),
        ("GPTNeoX", SIZES, {"embed_out.weight": HEAD, "*lm_head.weight": HEAD}),
        ("Falcon", SIZES, LM),
        ("Phi3", GROUPED, LM),
        ("Bloom", {**SIZES, "n_head": 4, "n_layer": 2}, LM),
        ("Olmo2", GROUPED, LM),
        ("Cohere", GROUPED, LM),
        ("Granite", GROUPED, LM),
        ("Mamba", {**SIZES, "state_size": 16}, LM),
        ("Mixtral", {**GROUPED, **EXPERTS}, MOE),
        ("Qwen3Moe", {**GROUPED, **EXPERTS, "head_dim": 16}, MOE),
        ("Olmoe", {**GROUPED, **EXPERTS}, MOE),
        ("GptOss", {**GROUPED, "num_local_experts": 128, "num_experts_per_tok": 2, "head_dim": 16,
                    "layer_types": ["full_attention", "full_attention"]}, {**LM, "*.router.weight": ROUTER}),
        ("JetMoe", {**GROUPED, "num_local_experts": 16, "num_experts_per_tok": 2, "kv_channels": 16,
                    "num_key_value_heads": 4}, {**LM, "*.router.layer.weight": ROUTER}),
        ("DeepseekV3", {**GROUPED, "n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 32,
                        "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
                        "num_key_value_heads": 4}, MOE),
        ("Qwen3Next", {**GROUPED, **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32,
                       "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                       "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}, MOE),
    ]  # fmt: skip
    made = [
        Case(f"{stem}ForCausalLM", "transformers", _of_transformers(f"{stem}ForCausalLM", f"{stem}Config", s), ids, k)
        for stem, s, k in rows
    ]
    llama4 = {
        **GROUPED,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "head_dim": 16,
        "intermediate_size_mlp": 128,
    }
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 256}
    opt = {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 32}
    return [
        *made,
        Case(
            "Llama4ForCausalLM", "transformers", _of_transformers("Llama4ForCausalLM", "Llama4TextConfig", llama4), ids,
            {**LM, "*.router.weight": ROUTER},
        ),
        Case("GPT2LMHeadModel", "transformers", _of_transformers("GPT2LMHeadModel", "GPT2Config", gpt2), ids, LM),
        Case("OPTForCausalLM", "transformers", _of_transformers("OPTForCausalLM", "OPTConfig", opt), ids, LM),
    ]  # fmt: skip


def _others() -> list[Case]:
    """Return further classes of transformers."""
    t5 = {
        "vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }  # fmt: skip
    mae = {
        **IMAGES, "decoder_hidden_size": 32, "decoder_intermediate_size": 64, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2, "norm_pix_loss": False,
    }  # fmt: skip
    whisper = {**SEQ2SEQ, "num_mel_bins": 20, "max_source_positions": 16, "max_target_positions": 16}
    swin = {
        "image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
        "num_labels": 40,
    }  # fmt: skip
    clip = {
        "text_config": {**SIZES, "max_position_embeddings": 32}, "vision_config": IMAGES, "projection_dim": 64,
    }  # fmt: skip
    llava = {
        "text_config": {**GROUPED, "model_type": "llama"},
        "vision_config": {**IMAGES, "model_type": "clip_vision_model"},
        "image_token_index": 95, "vision_feature_layer": -1,
    }  # fmt: skip
    segformer = {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [32, 64],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
        "decoder_hidden_size": 32, "num_labels": 20,
    }  # fmt: skip
    big_bird = {**SEQ2SEQ, "attention_type": "original_full"}
    both = {"max_position_embeddings": 128, "type_vocab_size": 2}
    dots = {**IMAGES, "num_labels": 40}
    lm = {"*lm_head*": HEAD}
    rows: list[tuple[str, str, dict[str, Any], Inputs, dict[str, str]]] = [
        ("BertForMaskedLM", "BertConfig", {**SIZES, **both}, ids, {"cls.predictions.*": HEAD}),
        ("BertModel", "BertConfig", {**SIZES, **both}, ids, {}),
        ("RobertaForSequenceClassification", "RobertaConfig", {**SIZES, **both, "num_labels": 20}, ids,
         {"classifier.*": HEAD}),
        ("DebertaV2ForTokenClassification", "DebertaV2Config", {**SIZES, **both, "num_labels": 20}, ids,
         {"classifier.*": HEAD}),
        ("T5ForConditionalGeneration", "T5Config", t5, pair, lm),
        ("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, pair, lm),
        ("BigBirdPegasusForConditionalGeneration", "BigBirdPegasusConfig", big_bird, pair, lm),
        ("WhisperForConditionalGeneration", "WhisperConfig", whisper,
         lambda: {"input_features": torch.randn(2, 20, 32), "decoder_input_ids": torch.randint(3, 90, (2, 8))},
         {"proj_out.weight": HEAD}),
        ("ViTForImageClassification", "ViTConfig", dots, pixels, {"classifier.weight": HEAD}),
        ("ViTMAEForPreTraining", "ViTMAEConfig", mae, pixels, {"decoder.decoder_pred.weight": HEAD}),
        ("BeitForImageClassification", "BeitConfig", dots, pixels, {"classifier.weight": HEAD}),
        ("Swinv2ForImageClassification", "Swinv2Config", swin, pixels, {"classifier.weight": HEAD}),
        ("SegformerForSemanticSegmentation", "SegformerConfig", segformer, lambda: pixels(64),
         {"decode_head.classifier.weight": HEAD}),
        ("CLIPModel", "CLIPConfig", clip, lambda: {**ids(), **pixels()}, {}),
        ("LlavaForConditionalGeneration", "LlavaConfig", llava, ids, LM),
        ("Dinov2ForImageClassification", "Dinov2Config", dots, pixels, {"classifier.weight": HEAD}),
        ("Wav2Vec2ForCTC", "Wav2Vec2Config", SPEECH, sound, {"lm_head.weight": HEAD}),
        ("WavLMModel", "WavLMConfig", SPEECH, sound, {"*.attention.*_proj.weight": "WavLMAttention reads"}),
    ]  # fmt: skip
    return [Case(name, "transformers", _of_transformers(name, config, s), i, k) for name, config, s, i, k in rows]


def _timm() -> list[Case]:
    small = {"img_size": 32, "num_classes": 40, "depth": 2, "embed_dim": 64, "num_heads": 4, "patch_size": 8}

    def make(name: str, **settings: Any) -> Callable[[], nn.Module]:
        return _of("timm", "create_model", model_name=name, **settings)

    def image(size: int = 32) -> Inputs:
        return lambda: (torch.randn(2, 3, size, size),)

    swin = {
        "img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 32, "depths": (1, 1), "num_heads": (2, 2),
        "num_classes": 40,
    }  # fmt: skip
    nets = {"depths": (1, 1, 1, 1), "dims": (32, 32, 64, 64), "num_classes": 40}
    head = {"head.weight": HEAD}
    return [
        Case("timm vit", "timm", make("vit_tiny_patch16_224", **small), image(), head),
        Case("timm swin", "timm", make("swin_tiny_patch4_window7_224", **swin), image(), {"head.fc.weight": HEAD}),
        Case("timm beit", "timm", make("beit_base_patch16_224", **small), image(),
             {**head, "*.qkv.weight": "Attention reads"}),
        Case("timm eva02", "timm", make("eva02_tiny_patch14_224", **small), image(),
             {**head, "*.qkv.weight": "EvaAttention reads"}),
        Case("timm convnext", "timm", make("convnext_tiny", **nets), image(64), {"head.fc.weight": HEAD}),
        Case("timm mixer", "timm", make("mixer_s32_224", img_size=64, num_classes=40), image(64), head),
    ]  # fmt: skip


def _diffusers() -> list[Case]:
    def latent(size: int = 8) -> dict[str, Any]:
        return {"hidden_states": torch.randn(2, 4, size, size), "timestep": torch.randint(10, (2,))}

    dit = {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2, "sample_size": 8,
           "patch_size": 2, "num_embeds_ada_norm": 16, "norm_num_groups": 4}  # fmt: skip
    sd3 = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 16,
           "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 64,
           "pooled_projection_dim": 32, "out_channels": 4}  # fmt: skip
    flux = {"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8)}  # fmt: skip
    unet = {"sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 32,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "norm_num_groups": 8,
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4}  # fmt: skip

    def conditioned() -> dict[str, Any]:
        return {"encoder_hidden_states": torch.randn(2, 6, 32), "pooled_projections": torch.randn(2, 32)}

    def of_flux() -> dict[str, Any]:
        places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)}
        return {"hidden_states": torch.randn(2, 16, 16), "timestep": torch.rand(2), **conditioned(), **places}

    def of_unet() -> dict[str, Any]:
        made = {"sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 4])}
        return {**made, "encoder_hidden_states": torch.randn(2, 6, 32)}

    return [
        Case("DiTTransformer2DModel", "diffusers", _of("diffusers", "DiTTransformer2DModel", **dit),
             lambda: {**latent(), "class_labels": torch.randint(10, (2,))}, {"proj_out_2.weight": HEAD}),
        Case("SD3Transformer2DModel", "diffusers", _of("diffusers", "SD3Transformer2DModel", **sd3),
             lambda: {**latent(), **conditioned()}, {"proj_out.weight": HEAD}),
        Case("FluxTransformer2DModel", "diffusers", _of("diffusers", "FluxTransformer2DModel", **flux), of_flux,
             {"proj_out.weight": HEAD}),
        Case("UNet2DConditionModel", "diffusers", _of("diffusers", "UNet2DConditionModel", **unet), of_unet, {}),
    ]  # fmt: skip


def _written() -> list[Case]:
    def tokens() -> tuple[Any, ...]:
        return (torch.randint(90, (2, 16)),)

    def image() -> tuple[Any, ...]:
        return (torch.randn(2, 3, 32, 32),)

    rows: list[tuple[type[nn.Module], Inputs, dict[str, str]]] = [
        (written.NanoGPT, tokens, LM),
        (written.Nanochat, tokens, LM),
        (written.Speedrun, tokens, {**LM, "*.qkv_w": WITHIN}),
        (written.Titan, tokens, {"output.weight": HEAD}),
        (written.TitanMixture, tokens, {"output.weight": HEAD, "*.scores.weight": ROUTER}),
        (written.TorchViT, image, {"heads.0.weight": HEAD}),
        (written.Swinlike, image, {"head.weight": HEAD, "features.*.qkv.weight": "ReadsChildren reads",
                                   "features.*.proj.weight": "ReadsChildren reads"}),
        (written.Translator, lambda: (*tokens(), *tokens()), {"generator.weight": HEAD}),
        (written.Retriever, image, {"projection.weight": HEAD}),
    ]  # fmt: skip
    return [Case(kind.__name__, "written", kind, inputs, kept) for kind, inputs, kept in rows]


CASES = {case.name: case for case in (*_language(), *_others(), *_timm(), *_diffusers(), *_written())}
