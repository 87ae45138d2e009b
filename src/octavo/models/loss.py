"""What both models share at their ends: the check of the length that comes in, the loss that goes out."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from octavo.errors import ConfigError


def check_length(tokens_BT: Tensor, sequence: int) -> int:
    """Return T.

    Raises:
        ConfigError: T is longer than `sequence`, the length the model was built for.
    """
    length = tokens_BT.shape[-1]
    if length > sequence:
        raise ConfigError(f"a sequence of {length} tokens is longer than the model's {sequence}; raise model.sequence.")
    return length


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats a token, computed in FP32 whatever the logits come in."""
    return F.cross_entropy(logits_BTV.float().flatten(0, -2), targets_BT.flatten())
