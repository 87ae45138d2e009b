from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from octavo.lab.models import ModelConfig, build, flops_per_token
from octavo.lab.models.flops import datasheet_tflops, matmul_parameters


@pytest.mark.parametrize(
    "change",
    [{}, {"kv_heads": 2}, {"ffn": 100}, {"architecture": "gpt"}, {"tie_embeddings": True}],
)
def test_weights_are_those_of_the_linear_layers(change: dict[str, Any]) -> None:
    config = ModelConfig(**{"vocab": 272, "dim": 64, "layers": 3, "heads": 4, "sequence": 32, **change})
    linears = [m for m in build(config, 0).modules() if isinstance(m, nn.Linear)]
    assert matmul_parameters(config) == sum(linear.weight.numel() for linear in linears)


def test_a_124_million_llama_by_hand() -> None:
    config = ModelConfig(vocab=50304, dim=768, layers=12, heads=12, sequence=1024)
    weights = 12 * (4 * 768 * 768 + 3 * 768 * 2048) + 50304 * 768
    assert flops_per_token(config, 1024) == 6 * weights + 6 * 12 * 768 * 1024


def test_attention_grows_with_the_sequence_and_weights_do_not() -> None:
    config = ModelConfig(vocab=272, dim=64, layers=3, heads=4, sequence=32)
    assert flops_per_token(config, 32) - flops_per_token(config, 16) == 6 * 3 * 64 * 16


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA B200", None),
    ],
)
def test_the_datasheet_is_quoted_for_what_it_is_about(gpu: str, peak: float | None) -> None:
    assert datasheet_tflops(gpu) == peak
