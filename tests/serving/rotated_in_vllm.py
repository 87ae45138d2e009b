"""A program, as vLLM has one engine per process: prints how far a rotated INT8 export is from the model, as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
import vllm
from transformers import AutoModelForCausalLM
from vllm.model_executor.layers.quantization.compressed_tensors.transform.module import HadamardTransform

import octavo
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama
from octavo.serving import export, mismatch, rotate_inputs

TOKENS = torch.randint(272, (1, 48), generator=torch.Generator().manual_seed(1))


def of_tokens(logits: Any) -> Any:
    return logits[0, :-1].float().log_softmax(-1).gather(1, TOKENS[0, 1:, None])[:, 0]


@torch.no_grad()
def main(directory: Path) -> None:
    model = Llama(ModelConfig(vocab=272, dim=256, layers=2, heads=4, ffn=512, sequence=64))
    model.reset_parameters(torch.Generator().manual_seed(0))
    model.lm_head.weight *= 20  # at initialisation all tokens are about as likely, whatever the layers do
    octavo.convert(model.bfloat16(), "rotated", policy=octavo.Policy(min_gain=0))
    ours = of_tokens(model(TOKENS))
    export(model, directory)
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    ignored = of_tokens(loaded(TOKENS).logits)
    library = of_tokens(rotate_inputs(loaded, directory)(TOKENS).logits)
    if not torch.cuda.is_available():  # the build for CPUs multiplies by what its linear layers have, and this has not
        HadamardTransform.cpu_linear = staticmethod(F.linear)
    settings = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "dtype": "bfloat16"}
    engine = vllm.LLM(str(directory), **settings)
    sampling = vllm.SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    prompt = TOKENS[0].tolist()
    (answer,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    pairs = zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)
    theirs = torch.tensor([found[token].logprob for found, token in pairs])
    found = {"vllm": theirs, "transformers": library, "without the rotation": ignored}
    print(json.dumps({name: mismatch(ours, each).kl for name, each in found.items()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
