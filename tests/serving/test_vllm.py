"""vLLM itself, where it is installed: it serves an export, and takes pushed weights while it runs.

The build for CPUs computes scales per channel and token in FP8 on any processor, and blocks on those with AMX only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import octavo
from octavo.kernels.quant_spec import spec_of
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama
from octavo.recipes import load
from octavo.serving import WeightPush, export, mismatch

vllm = pytest.importorskip("vllm")
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

TOKENS = torch.randint(272, (48,), generator=torch.Generator().manual_seed(1)).tolist()
EXACT = 1e-3
"""Nats per token: what rounding the residual stream to BF16 elsewhere may cost."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = Llama(ModelConfig(vocab=272, dim=256, layers=2, heads=4, ffn=512, sequence=64))
    model.reset_parameters(torch.Generator().manual_seed(0))
    octavo.convert(model.bfloat16(), "served", policy=octavo.Policy(min_gain=0))
    directory = tmp_path_factory.mktemp("served") / "model"
    export(model, directory)
    settings = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "dtype": "bfloat16"}
    return model, vllm.LLM(str(directory), **settings)


def of_engine(llm):
    settings = vllm.SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    (answer,) = llm.generate([{"prompt_token_ids": TOKENS}], settings, use_tqdm=False)
    pairs = zip(answer.prompt_logprobs[1:], TOKENS[1:], strict=True)
    return torch.tensor([found[token].logprob for found, token in pairs])


@torch.no_grad()
def of_trainer(model):
    logits = model(torch.tensor([TOKENS]))[0, :-1].float().log_softmax(-1)
    return logits.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def test_it_quantises_inputs_as_the_recipe_does(served):
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8

    layer = served[1].llm_engine.model_executor.driver_worker.worker.model_runner.model.model.layers[0]
    quantiser = next(m for m in vars(layer.self_attn.qkv_proj.scheme.fp8_linear).values() if isinstance(m, QuantFP8))
    x = (torch.randn(64, 256) * 10 ** torch.linspace(-5, 3, 64)[:, None]).bfloat16()
    codes, scale = quantiser(x)
    spec = spec_of(load("served").fprop.input)
    ours = octavo.quantize(x, granularity=spec.tile, scaling=spec.scaling)
    assert torch.equal(codes.view(torch.uint8), ours.codes.view(torch.uint8)) and torch.equal(scale, ours.scale)


def test_it_serves_what_was_trained_and_takes_pushed_weights(served):
    model, llm = served
    push = WeightPush(model)
    push.changed()
    assert mismatch(of_trainer(model), of_engine(llm)).kl < EXACT
    for name in ("attention.wk", "feed_forward.w2"):
        weight = model.layers[1].get_submodule(name).weight.data
        weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    stale = mismatch(of_trainer(model), of_engine(llm)).kl
    assert stale > 20 * EXACT
    assert push.to_vllm(llm) == 8 + 6
    assert mismatch(of_trainer(model), of_engine(llm)).kl < EXACT


def test_it_rotates_the_inputs_of_an_int8_export(tmp_path):
    """By its dense matrix, as near to training as compressed-tensors is. What ignores the transform is far off."""
    program = Path(__file__).with_name("rotated_in_vllm.py")
    run = subprocess.run([sys.executable, program, tmp_path / "model"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["vllm"] < 3 * found["transformers"] and found["without the rotation"] > 100 * found["vllm"], found
