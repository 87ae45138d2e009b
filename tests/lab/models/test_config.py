from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.lab.models import ModelConfig

SMALL: dict[str, Any] = {"vocab": 272, "dim": 64, "layers": 2, "heads": 4, "sequence": 32}


def test_defaults_are_filled_in_by_the_properties() -> None:
    config = ModelConfig(**SMALL)
    assert config.kv_heads is None and config.key_value_heads == 4
    assert config.head_dim == 16


@pytest.mark.parametrize(
    ("architecture", "dim", "ffn"),
    [
        ("llama", 64, 192),
        ("llama", 256, 704),
        ("llama", 512, 1408),
        ("llama", 768, 2048),
        ("llama", 4096, 11008),
        ("gpt", 64, 256),
        ("gpt", 768, 3072),
    ],
)
def test_feed_forward_width(architecture: Any, dim: int, ffn: int) -> None:
    assert ModelConfig(**{**SMALL, "architecture": architecture, "dim": dim}).ffn_dim == ffn


def test_a_given_feed_forward_width_is_kept() -> None:
    assert ModelConfig(**SMALL, ffn=100).ffn_dim == 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "llamma"}, ["model.architecture", "'llamma'", "Did you mean 'llama'"]),
        ({"heads": 5}, ["model.heads", "5", "64"]),
        ({"kv_heads": 3}, ["model.kv_heads", "3", "4"]),
        ({"kv_heads": 8}, ["model.kv_heads"]),
        ({"kv_heads": 2, "architecture": "gpt"}, ["model.kv_heads", "gpt"]),
        ({"heads": 64}, ["odd"]),
        ({"layers": 0}, ["model.layers", "0"]),
        ({"vocab": -1}, ["model.vocab"]),
        ({"ffn": 0}, ["model.ffn"]),
        ({"norm_eps": float("nan")}, ["model.norm_eps"]),
        ({"rope_theta": 0.0}, ["model.rope_theta"]),
    ],
)
def test_impossible_shapes_name_the_field(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**{**SMALL, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_configuration_needs_no_torch() -> None:
    code = "import sys, octavo.lab.models, octavo.lab.data; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
