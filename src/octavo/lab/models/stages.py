"""Pipeline stages of a Llama: modules whose parameters keep the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.lab.models.language_model import check_length, head_output
from octavo.lab.models.llama import Llama


class Stage(nn.Module):
    """Consecutive blocks of a Llama; the first stage has the embedding, the last one norm and head.

    The modules are shared with the whole model. `model.state_dict()` is that of all stages together.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, model: Llama, blocks: Iterable[int]) -> None:
        super().__init__()
        self.config = model.config
        self.blocks = kept = list(blocks)
        self.is_first, self.is_last = 0 in kept, len(model.layers) - 1 in kept
        if self.is_first:
            self.tok_embeddings = model.tok_embeddings
        self.layers = nn.ModuleList()
        for index in kept:  # named by their number in the model; a list iterates over its modules in this order
            self.layers.add_module(str(index), model.layers[index])
        if self.is_last:
            self.norm, self.lm_head = model.norm, model.lm_head
        self.register_buffer("rope_cos", model.rope_cos, persistent=False)
        self.register_buffer("rope_sin", model.rope_sin, persistent=False)

    def forward(self, x: Tensor, targets_BT: Tensor | None = None, *, by_sequence: bool = False) -> Tensor:
        """Return the residual stream (B,T,D), or on the last stage the logits (B,T,V) or the mean loss (1,) in FP32.

        Args:
            x: tokens (B,T) for the first stage, the result of the previous stage for others.
            targets_BT: the next tokens, for the last stage.
            by_sequence: return the loss of each sequence, (B,), instead of the mean.

        Raises:
            ConfigError: T is longer than `config.sequence`.
        """
        length = check_length(x if self.is_first else x[..., 0], self.config.sequence)
        cos_TE, sin_TE = self.rope_cos[:length], self.rope_sin[:length]
        x_BTD = self.tok_embeddings(x) if self.is_first else x
        for block in self.layers:
            x_BTD = block(x_BTD, cos_TE, sin_TE)
        if not self.is_last:
            return x_BTD
        output = head_output(self.norm(x_BTD), self.lm_head, targets_BT, by_sequence)
        return output if targets_BT is None or by_sequence else torch.stack([output])  # FSDP2 warns about views


def stages(model: Llama, count: int) -> list[Stage]:
    """Split a model into stages of equally many blocks; if uneven, the first and the last have fewer.

    Convert the model before. Keep only the stages of this rank, and drop the model.

    Raises:
        ConfigError: fewer blocks than stages, or an embedding tied to the head, which would be in two stages.
    """
    blocks = len(model.layers)
    if not 1 <= count <= blocks:
        raise ConfigError(f"stages: {count} stages of {blocks} blocks: each needs at least one block.")
    if count > 1 and model.lm_head.weight is model.tok_embeddings.weight:
        raise ConfigError("stages: the embedding is the head too (model.tie_embeddings): two stages cannot share it.")
    sizes = [blocks // count] * count
    from_the_middle = sorted(range(count), key=lambda stage: abs(2 * stage - count + 1))
    for stage in from_the_middle[: blocks % count]:  # the ends also compute embedding and head
        sizes[stage] += 1
    ends = list(accumulate(sizes))
    return [Stage(model, range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
