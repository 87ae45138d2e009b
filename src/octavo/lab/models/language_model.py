"""Parts shared by the language models: weight initialisation, input check and loss head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.nn import Linear
from octavo.nn.cross_entropy import chunk_of, linear_cross_entropy
from octavo.nn.modules import has_hooks
from octavo.recipes import RecipeLike

STD = 0.02
RESIDUAL_OUTPUTS = ("wo.weight", "w2.weight", "experts.down")


@torch.no_grad()
def reset_parameters(model: nn.Module, layers: int, generator: torch.Generator) -> None:
    """Initialise all parameters of `model`, in the order of `named_parameters`, bitwise reproducible from a seed.

    Matrices are normal with standard deviation 0.02. Those that write to the residual stream (`wo`, `w2`)
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


def check_length(tokens_BT: Tensor, sequence: int) -> int:
    """Return T.

    Raises:
        ConfigError: T is longer than `sequence`, the length the model was built for.
    """
    length = tokens_BT.shape[-1]
    if length > sequence:
        raise ConfigError(f"a sequence of {length} tokens is longer than the model's {sequence}; raise model.sequence.")
    return length


def separate_documents(tokens_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and number of each token's document, all int64 (B,T), of packed documents.

    The first id of a document is given as its complement, `~id`, which is negative. Its position is 0.
    """
    starts_BT = tokens_BT < 0
    place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
    first_BT = torch.where(starts_BT, place_T, 0).cummax(1).values
    return torch.where(starts_BT, ~tokens_BT, tokens_BT), place_T - first_BT, starts_BT.cumsum(1)


def head_output(
    x_BTD: Tensor, head: nn.Linear, targets_BT: Tensor | None, by_sequence: bool = False, hits: bool = False
) -> Tensor:
    """Return the output of a model: the head's logits (B,T,V), or with targets `head_loss`."""
    if targets_BT is None:
        logits_BTV: Tensor = head(x_BTD)
        return logits_BTV
    return head_loss(x_BTD, head, targets_BT, by_sequence, hits)


def head_loss(
    x_BTD: Tensor, head: nn.Linear, targets_BT: Tensor, by_sequence: bool = False, hits: bool = False
) -> Tensor:
    """Return `cross_entropy(head(x), targets)`, by chunks of tokens, without storing all logits at once.

    A head with hooks, stored scales, or of a subclass of `nn.Linear` is called instead. `by_sequence`: return the loss
    of each sequence, (B,), instead of the mean. `hits`: return also the `hit_shares`, (B, 2).
    """
    if hits:
        return torch.stack([head_loss(x_BTD, head, targets_BT, True), hit_shares(x_BTD, head, targets_BT)], dim=1)
    if by_sequence:
        pairs = zip(x_BTD.split(1), targets_BT.split(1), strict=True)
        return torch.stack([head_loss(x, head, targets) for x, targets in pairs])
    recipe = _recipe_of(head)
    if recipe is None:
        return cross_entropy(head(x_BTD), targets_BT)
    return linear_cross_entropy(x_BTD, head.weight, targets_BT, bias=head.bias, recipe=recipe)


def hit_shares(x_BTD: Tensor, head: nn.Linear, targets_BT: Tensor) -> Tensor:
    """Return the top-1 accuracy of each sequence over the targets that are not -100, FP32 (B,)."""
    size = chunk_of(head.weight.shape[0], torch.float32, x_BTD.device.type)
    shares = []
    for x_TD, targets_T in zip(x_BTD, targets_BT, strict=True):
        likeliest = torch.cat([head(part).argmax(dim=-1) for part in x_TD.split(size)])
        shares.append((likeliest == targets_T).sum().float() / (targets_T >= 0).sum())
    return torch.stack(shares)


def _recipe_of(head: nn.Linear) -> RecipeLike | None:
    """Return the recipe of a head that computes exactly x W^T + b, or None."""
    if has_hooks(head) or "forward" in vars(head):
        return None
    if type(head) is Linear:
        if head.scaling_slot is not None and head.enabled:
            return None
        return head.recipe if head.enabled else "bf16"
    return "bf16" if type(head) is nn.Linear else None


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token, computed in FP32."""
    return F.cross_entropy(logits_BTV.float().flatten(0, -2), targets_BT.flatten())
