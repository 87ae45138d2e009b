"""Memory of a program sharded by FSDP2: shards of weights, gradients and states, plus what is gathered temporarily.

Each block is gathered before it computes, forward and backward, while the next one is prefetched: the weights of two
blocks are whole at a time, and so are the gradients of two. Parameters outside of blocks (embedding, head, last norm)
stay whole through forward and backward. Source: PyTorch FSDP2, `fully_shard` on each block and on the model,
prefetching one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from octavo.conversion.policy import blocks_of
from octavo.errors import ConfigError
from octavo.memory.timeline import Allocation, Timeline
from octavo.nn import Linear

IN_FLIGHT = 2
"""Number of blocks that are gathered at a time."""


@dataclass(frozen=True, slots=True)
class Shards:
    """Effect of sharding on a timeline."""

    gpus: int
    gathered: int
    """Bytes of gathered weights at a time."""
    reduced: int
    """Bytes of unreduced gradients at a time."""

    @classmethod
    def of(cls, models: Sequence[nn.Module], gpus: int) -> Shards:
        """Return the sharding of models.

        Raises:
            ConfigError: fewer than one GPU.
        """
        if gpus < 1:
            raise ConfigError(f"a run is sharded over 1 GPU or more, not over {gpus}.")
        if gpus == 1:
            return cls(1, 0, 0)
        gathered = reduced = 0
        for model in models:
            blocks = [model.get_submodule(name) for name in blocks_of(model)]
            inside = {id(p) for block in blocks for p in block.parameters()}
            fp8 = _gathered_in_fp8(model)
            whole = [sum(_sent(p, fp8) for p in block.parameters()) for block in blocks]
            grads = [sum(p.numel() * min(p.element_size(), 4) for p in block.parameters()) for block in blocks]
            outside = [p for p in model.parameters() if id(p) not in inside]
            gathered += sum(sorted(whole)[-IN_FLIGHT:]) + sum(_sent(p, fp8) for p in outside)
            reduced += sum(sorted(grads)[-IN_FLIGHT:])
        return cls(gpus, gathered, reduced)

    def size_of(self, allocation: Allocation) -> int:
        """Return the bytes that an allocation takes on each GPU."""
        if self.gpus == 1:
            return allocation.size
        if allocation.kind == "weights" and allocation.phase != "outside":  # codes of gathered weights: in `gathered`
            return 0
        is_sharded = allocation.is_parameter or allocation.kind in ("gradients", "states")
        return -(-allocation.size // self.gpus) if is_sharded else allocation.size

    def gather(self, timeline: Timeline) -> None:
        """Add the gathered weights and unreduced gradients of each step."""
        if self.gpus > 1:
            for step in timeline.steps:
                whole = [(self.gathered, step.start), (self.reduced, step.backward)]
                for size, born in whole:
                    timeline.allocations.append(Allocation(size, born, "forward", died=step.update, kind="workspace"))


def _gathered_in_fp8(model: nn.Module) -> set[int]:
    layers = (module for module in model.modules() if isinstance(module, Linear) and module.recipe.fprop.is_fp8)
    return {id(layer.weight) for layer in layers}


def _sent(parameter: nn.Parameter, fp8: set[int]) -> int:
    """Return the bytes of a gathered weight: one byte per element and one scale per row, or BF16."""
    if id(parameter) in fp8:
        return parameter.numel() + 4 * parameter.shape[0]
    return 2 * parameter.numel()
