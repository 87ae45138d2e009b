"""Reference models in plain PyTorch: a Llama, a GPT and a mixture of experts, built from one `ModelConfig`.

`ModelConfig` and `flops_per_token` do not need torch; the rest is imported on first use, so that the command line
starts fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo.models.config import ModelConfig
from octavo.models.flops import flops_per_token

if TYPE_CHECKING:
    from octavo.models.factory import build, count_parameters
    from octavo.models.gpt import GPT
    from octavo.models.llama import Llama
    from octavo.models.moe import MoE

__all__ = ["GPT", "Llama", "MoE", "ModelConfig", "build", "count_parameters", "flops_per_token"]

_HOME = {
    "GPT": "octavo.models.gpt",
    "Llama": "octavo.models.llama",
    "MoE": "octavo.models.moe",
    "build": "octavo.models.factory",
    "count_parameters": "octavo.models.factory",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo.models' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
