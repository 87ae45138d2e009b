"""A small Llama that has learned nothing, in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import octavo
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama

MakeLlama = Callable[..., Llama]


@pytest.fixture
def make_llama() -> MakeLlama:
    def make(recipe: str = "folded", policy: octavo.Policy | None = None, **shape: Any) -> Llama:
        sizes = {"vocab": 272, "dim": 128, "layers": 2, "heads": 4, "ffn": 256, "sequence": 64} | shape
        model = Llama(ModelConfig(**sizes))
        model.reset_parameters(torch.Generator().manual_seed(0))
        if recipe != "bf16":
            octavo.convert(model, recipe, policy=policy)
        return model

    return make
