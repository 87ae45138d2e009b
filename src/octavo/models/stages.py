"""A Llama in stages, for a pipeline: each a module of its own, its parameters under the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.models.llama import Llama
from octavo.models.loss import check_length, head_output


class Stage(nn.Module):
    """Some blocks of a Llama that follow each other; the first stage has the embedding, the last one norm and head.

    The modules are those of the whole model, not copies. `model.state_dict()` is that of all stages together.
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
        for index in kept:  # by their number in the model; a list goes through its modules in this order
            self.layers.add_module(str(index), model.layers[index])
        if self.is_last:
            self.norm, self.lm_head = model.norm, model.lm_head
        self.register_buffer("rope_cos", model.rope_cos, persistent=False)
        self.register_buffer("rope_sin", model.rope_sin, persistent=False)

    def forward(self, x: Tensor, targets_BT: Tensor | None = None, *, by_sequence: bool = False) -> Tensor:
        """Return the residual stream (B,T,D), or of the last stage the logits (B,T,V), or the mean loss (1,) in FP32.

        Args:
            x: tokens (B,T) of the first stage, of any other what the stage before it gave.
            targets_BT: the next tokens, read by the last stage.
            by_sequence: the loss of each sequence, (B,), in place of the mean.

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
        return output if targets_BT is None or by_sequence else torch.stack([output])  # no view, of which FSDP2 warns


def stages(model: Llama, count: int) -> list[Stage]:
    """Cut a model into stages of as many blocks each as can be; the first and the last have fewer where it is uneven.

    Convert the model before. Keep the stages of this rank only, and drop the model.

    Raises:
        ConfigError: fewer blocks than stages, or an embedding that is the head too, which would be in two stages.
    """
    blocks = len(model.layers)
    if not 1 <= count <= blocks:
        raise ConfigError(f"stages: {count} stages of {blocks} blocks: each needs one block at least.")
    if count > 1 and model.lm_head.weight is model.tok_embeddings.weight:
        raise ConfigError("stages: the embedding is the head too (model.tie_embeddings): no two stages can share it.")
    sizes = [blocks // count] * count
    from_the_middle = sorted(range(count), key=lambda stage: abs(2 * stage - count + 1))
    for stage in from_the_middle[: blocks % count]:  # the ends have the embedding and the head to do
        sizes[stage] += 1
    ends = list(accumulate(sizes))
    return [Stage(model, range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
