"""From a configuration to a model."""

from __future__ import annotations

import torch
from torch import nn

from octavo.models.config import ModelConfig
from octavo.models.gpt import GPT
from octavo.models.llama import Llama


def build(config: ModelConfig, seed: int) -> nn.Module:
    """Return a new model in FP32 on the CPU.

    One seed gives the same bits, whatever was drawn before; the global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):  # layers draw when they are made
        model: Llama | GPT = Llama(config) if config.architecture == "llama" else GPT(config)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, a tied weight counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
