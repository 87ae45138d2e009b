from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.errors import ConfigError
from octavo.lab.models import GPT, ModelConfig, build

SMALL: dict[str, Any] = {
    "architecture": "gpt",
    "vocab": 48,
    "dim": 32,
    "layers": 2,
    "heads": 4,
    "sequence": 16,
}


def model_of(**change: Any) -> GPT:
    model = build(ModelConfig(**{**SMALL, **change}), seed=1)
    assert isinstance(model, GPT)
    return model


def independent_logits(model: GPT, tokens_T: Tensor) -> Tensor:
    """GPT-2 in float64, attention written out as a masked softmax for each head."""
    w = {name: p.double() for name, p in model.state_dict().items()}
    T, D, E = len(tokens_T), 32, 8

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        unit = centred / (centred.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt()
        return unit * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = w["tok_embeddings.weight"][tokens_T] + w["pos_embeddings.weight"][:T]
    future = torch.ones(T, T).triu(1).bool()
    for i in range(model.config.layers):
        q, k, v = linear(norm(x, f"layers.{i}.attention_norm"), f"layers.{i}.attention.wqkv").split(D, dim=-1)
        heads = []
        for at in range(0, D, E):
            scores = q[:, at : at + E] @ k[:, at : at + E].T / math.sqrt(E)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, at : at + E])
        x = x + linear(torch.cat(heads, -1), f"layers.{i}.attention.wo")
        hidden = gelu(linear(norm(x, f"layers.{i}.ffn_norm"), f"layers.{i}.feed_forward.w1"))
        x = x + linear(hidden, f"layers.{i}.feed_forward.w2")
    return norm(x, "norm") @ w["lm_head.weight"].T


def test_logits_equal_an_independent_gpt2() -> None:
    model, tokens_BT = model_of(), torch.randint(0, 48, (2, 12))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        logits_BTV = model(tokens_BT)
    torch.testing.assert_close(
        logits_BTV[1].double(), independent_logits(model, tokens_BT[1]).detach(), rtol=1e-4, atol=1e-4
    )


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model, tokens_BT, targets_BT = model_of(), torch.randint(0, 48, (2, 12)), torch.randint(0, 48, (2, 12))
    expected = F.cross_entropy(model(tokens_BT).reshape(-1, 48), targets_BT.reshape(-1))
    torch.testing.assert_close(model(tokens_BT, targets_BT), expected)


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"17 tokens.*16"):
        model_of()(torch.zeros(1, 17, dtype=torch.long))


def test_every_block_compiles_as_one_graph_under_autocast() -> None:
    model, tokens_BT = model_of(tie_embeddings=True), torch.randint(0, 48, (2, 12))
    for block in model.layers:
        block.compile(fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens_BT, tokens_BT)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
