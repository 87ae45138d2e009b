"""Weight initialisation, bitwise reproducible from a seed."""

from __future__ import annotations

import math

import torch
from torch import nn

STD = 0.02
RESIDUAL_OUTPUTS = ("wo.weight", "w2.weight")


@torch.no_grad()
def reset_parameters(model: nn.Module, layers: int, generator: torch.Generator) -> None:
    """Initialise all parameters of `model`, in the order of `named_parameters`.

    Matrices are normal with standard deviation 0.02. The two that write to the residual stream (`wo`, `w2`)
    are scaled by `1 / sqrt(2 * layers)`, so that the stream's variance does not grow with depth (Radford et
    al. 2019, GPT-2). Norm weights are one, biases zero. A tied weight is initialised once.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            std = STD / math.sqrt(2 * layers) if name.endswith(RESIDUAL_OUTPUTS) else STD
            nn.init.normal_(parameter, std=std, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)
