"""Creation of a model from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from octavo.lab.models.config import ModelConfig
from octavo.lab.models.gpt import GPT
from octavo.lab.models.llama import Llama
from octavo.lab.models.moe import MoE
from octavo.lab.models.pretrained import load_weights


def build(config: ModelConfig, seed: int, start_from: Path | None = None) -> nn.Module:
    """Return a new model in FP32 on the CPU; under `torch.device("meta")`, one without values.

    Weights depend on the seed only, bit for bit; the global random state is not changed. Or they are those in the
    directory `start_from`, see `pretrained.load_weights`.
    """
    with _SkipInit():
        model = _MODELS[config.architecture](config)
    if start_from is not None and isinstance(model, Llama):
        load_weights(model, start_from)
        return model
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


_MODELS: dict[str, type[Llama] | type[GPT]] = {"llama": Llama, "gpt": GPT, "moe": MoE}


class _SkipInit(TorchFunctionMode):
    """Skips the default initialisation of layers, which takes minutes for a large model and is overwritten."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if getattr(func, "__module__", "") == nn.init.__name__ else func(*args, **kwargs)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, a tied weight counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def model_name(architecture: str, parameters: int) -> str:
    """Return a short name of a model: `llama-129m`."""
    million = parameters >= 1e6
    return f"{architecture}-{round(parameters / (1e6 if million else 1e3))}{'m' if million else 'k'}"
