"""Reference models in plain PyTorch: a Llama, a GPT and a mixture of experts, built from one `ModelConfig`.

`ModelConfig` and `flops_per_token` do not need torch; the rest is imported on first use, so that the command line
starts fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo._util.lazy import lazy
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.flops import flops_per_token

if TYPE_CHECKING:
    from octavo.lab.models.factory import build, count_parameters
    from octavo.lab.models.gpt import GPT
    from octavo.lab.models.llama import Llama
    from octavo.lab.models.moe import MoE

__all__ = ["GPT", "Llama", "MoE", "ModelConfig", "build", "count_parameters", "flops_per_token"]

__getattr__ = lazy(__name__, {"gpt": "GPT", "llama": "Llama", "moe": "MoE", "factory": "build count_parameters"})
