"""A model laid out over ranks, and its training step: data parallel, with layers cut, or in stages.

A step has as many sequences in all layouts of a workload, each a micro-batch, and the same ones: losses are comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from octavo.distributed import send_tokens, tensor_parallel
from octavo.distributed.pipeline.run import Pipeline
from octavo.distributed.pipeline.schedules import SCHEDULES
from octavo.distributed.pipeline.stage import Sent
from octavo.kernels.uploads import upload
from octavo.models.config import ModelConfig
from octavo.models.llama import Llama
from octavo.models.stages import stages
from octavo_bench.distributed.implementations import Implementation

VOCABULARY_USED = 64
"""Token ids differ from their neighbour by less than that: there is something to learn within a few steps."""


class Layout(NamedTuple):
    """How ranks share a model; all that is left of them is data parallel, sharded by FSDP2."""

    tensor: int = 1
    """Ranks that share each layer."""
    stages: int = 1
    """Stages of a pipeline (1F1B)."""
    sent: Sent = "bf16"
    """How activations travel between stages."""

    def __str__(self) -> str:
        cut = [f"tensor {self.tensor}"] if self.tensor > 1 else []
        cut += [f"pipeline {self.stages}"] if self.stages > 1 else []
        cut += ["FP8 between stages"] if self.sent == "fp8" else []
        return ", ".join(cut) or "data"


class Trainer(Protocol):
    """A model laid out over the ranks."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """What this rank has of it."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks among them."""

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor | None:
        """Go forward and backward over the data-parallel rank's sequences, which the host has.

        Return the mean loss, where this rank has it.
        """


def part_of_batch(config: ModelConfig, sequences: int, step: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Return the host's tokens and targets (B, T) of this data-parallel rank, of a step of so many sequences in all."""
    generator = torch.Generator().manual_seed(step)
    moves = torch.randint(0, min(VOCABULARY_USED, config.vocab), (sequences, config.sequence + 1), generator=generator)
    tokens = moves.cumsum(1).remainder(config.vocab).chunk(mesh.size())[mesh.get_local_rank()]
    return tokens[:, :-1], tokens[:, 1:]


def lay_out(
    config: ModelConfig,
    implementation: Implementation,
    layout: Layout,
    device: torch.device,
) -> tuple[Trainer, DeviceMesh]:
    """Make a model, equal in every layout, and return it laid out over all ranks, with the mesh of data parallel."""
    shape = (layout.stages, dist.get_world_size() // layout.stages // layout.tensor, layout.tensor)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "data", "tensor"))
    with device:
        model = Llama(config)
        model.reset_parameters(torch.Generator(device).manual_seed(0))
    implementation.convert(model)
    if layout.stages > 1:
        return Staged(model, implementation, layout, mesh), mesh["data"]
    if layout.tensor > 1:
        tensor_parallel(model, mesh["tensor"])
    return Whole(model, implementation, mesh["data"]), mesh["data"]


class Whole:
    """Every rank has all layers, or its cut of each."""

    def __init__(self, model: Llama, implementation: Implementation, data: DeviceMesh) -> None:
        implementation.shard(model, data)
        self._device = next(model.parameters()).device
        self.model, self.modules, self.blocks = model, [model], list(model.layers)

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """One sequence after the other; each one's gradients are reduced, as FSDP2 does it by itself."""
        losses = []
        tokens_BT = send_tokens(tokens_BT, self._device, self.model, parts=len(tokens_BT))
        targets_BT = upload(targets_BT, self._device)
        for tokens_1T, targets_1T in zip(tokens_BT.split(1), targets_BT.split(1), strict=True):
            loss = self.model(tokens_1T, targets_1T) / len(tokens_BT)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()


class Staged:
    """Every rank has one stage."""

    def __init__(self, model: Llama, implementation: Implementation, layout: Layout, mesh: DeviceMesh) -> None:
        place = mesh["pipeline"].get_local_rank()
        part = stages(model, layout.stages)[place]
        self._device = model.tok_embeddings.weight.device
        implementation.shard(part, mesh["data"], reshard_after_forward=False)
        self.modules, self.blocks = [part], list(part.layers)
        self._pipeline = Pipeline(
            {place: part},
            SCHEDULES["1f1b"],
            mesh.get_group("pipeline"),
            device=self._device,
            width=model.config.dim,
            stream=torch.bfloat16,
            sent=layout.sent,
        )

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor | None:
        """One micro-batch a sequence."""
        parts = len(tokens_BT)
        tokens_BT = send_tokens(tokens_BT, self._device, *self.modules, parts=parts)
        return self._pipeline.step(tokens_BT, upload(targets_BT, self._device), parts)
