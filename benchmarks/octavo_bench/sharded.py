"""Training on many GPUs by BF16 with FSDP2, torchao with FP8 all-gather, and Octavo: layouts, and a step in each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import octavo
from octavo.distributed import BF16_GRADIENTS_POLICY, BF16_POLICY, context_parallel, send_tokens, shard, tensor_parallel
from octavo.distributed.context_parallel import Context
from octavo.distributed.pipeline import SCHEDULES, Pipeline, Sent
from octavo.distributed.sharding.shard import gather_ahead
from octavo.kernels.runtime.transfers import upload
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.llama import Llama
from octavo.lab.models.stages import Stage, stages
from octavo.lab.train.replay import Replay
from octavo.tensor import is_distributed
from octavo_bench.implementations import BF16, ONCE, TORCHAO, convert_torchao, is_no_head

Sharded = Llama | Stage
"""A whole model, or a stage of one."""
LEARNING_RATE = 1e-4
_KEEP: dict[str, Any] = {"reshard_after_forward": False}


def _leave(model: nn.Module) -> None:
    """Change nothing."""


def _fsdp(model: Sharded, mesh: DeviceMesh, **options: Any) -> None:
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=BF16_POLICY, **options)
    fully_shard(model, mesh=mesh, mp_policy=BF16_POLICY, **options)
    gather_ahead(model, list(model.layers))  # as in Octavo


def _fused_adamw(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=LEARNING_RATE, fused=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One way to train a sharded Llama. Its shards are FP32, gathered in BF16 or FP8."""

    name: str
    """Name in results."""
    convert: Callable[[nn.Module], object] = _leave
    """Converts the whole model in place, before it is divided."""
    shard: Callable[..., object] = _fsdp
    """(model or stage, mesh, **options of `fully_shard`): shards it, in place."""
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer] = _fused_adamw
    """(named parameters) -> optimizer."""
    after_step: Callable[[nn.Module], object] = _leave
    """Called with the model after each update of the weights."""


def implementations() -> dict[str, Implementation]:
    """Return every implementation by name, the baseline first; torchao's only if installed."""
    found = [Implementation(name=BF16), Implementation(name=f"{BF16}{ONCE}", shard=partial(_fsdp, **_KEEP))]
    if importlib.util.find_spec("torchao") is not None:
        found.append(
            Implementation(
                name=f"{TORCHAO}, FP8 gather",
                convert=partial(convert_torchao, enable_fsdp_float8_all_gather=True),
                after_step=_precompute_scales,
            )
        )
    found += [_octavo("folded"), _octavo("folded_fast"), _octavo("rotated")]
    by_default: dict[str, Any] = {"shard": _shard_bf16_gradients}
    found.append(_octavo("folded", ", bf16 gradients", **by_default))
    found.append(_octavo("folded_fast", ", bf16 gradients", **by_default))
    found.append(_octavo("folded", ", bf16 gradients, fp8 states", **by_default, optimizer=_fp8_states))
    with_head = partial(_convert, recipe="folded_fast", fp8_head=True)
    found.append(_octavo("folded_fast", ", fp8 head, bf16 gradients", **by_default, convert=with_head))
    keeps_least: dict[str, Any] = {"activation_inputs": "fp8", "norm_inputs": "fp8"}
    lean: dict[str, Any] = {"convert": partial(_convert, recipe="folded", **keeps_least)}
    found.append(_octavo("folded", ", bf16 gradients (lean)", **by_default, **lean, optimizer=_fp8_states))
    sends_least: dict[str, Any] = {"shard": _shard_fewest_bytes, "optimizer": _fp8_states}
    found.append(_octavo("folded", ", fp8-block", **sends_least))
    found.append(_octavo("folded", ", fp8-block (lean)", **sends_least, **lean))
    fastest = {"convert": partial(with_head, **keeps_least)}
    found.append(_octavo("folded_fast", ", fp8 head, fp8-block (lean)", **sends_least, **fastest))
    for suffix, how in ((", bf16 gradients", by_default), (", fp8-block", sends_least)):
        once = how | {"shard": partial(how["shard"], **_KEEP)}
        found += [_octavo(recipe, f"{suffix}{ONCE}", **once) for recipe in ("folded", "rotated")]
        for recipe in ("folded_fast", "rotated_fast"):
            with_head = partial(_convert, recipe=recipe, fp8_head=True)
            found.append(_octavo(recipe, f", fp8 head{suffix}{ONCE}", **once, convert=with_head))
    return {implementation.name: implementation for implementation in found}


def _octavo(recipe: str, suffix: str = "", **how: Any) -> Implementation:
    settings: dict[str, Any] = {"convert": partial(_convert, recipe=recipe), "shard": shard} | how
    return Implementation(name=f"octavo {recipe}{suffix}", **settings)


def _convert(model: nn.Module, recipe: str, *, fp8_head: bool = False, **policy_options: Any) -> None:
    assert isinstance(model, Llama)
    selected = None if fp8_head else is_no_head
    policy = octavo.Policy(min_gain=0.0, keep_defaults=False, filter=selected, **policy_options)
    octavo.convert(model, recipe, policy=policy, tokens=model.config.sequence)


def _shard_bf16_gradients(model: Sharded, mesh: DeviceMesh, **options: Any) -> None:
    """Shard as a run does by default: gradients are sent as computed, in BF16, and summed in FP32."""
    shard(model, mesh, reduce="bf16", mp_policy=_policy(model), **options)


def _shard_fewest_bytes(model: Sharded, mesh: DeviceMesh, **options: Any) -> None:
    """Shard with FP8 gradients; of the embedding send only the looked-up rows."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]  # a later stage has none
    by_rows = [module for module in embeddings if not is_distributed(module.weight)]  # tensor parallel has its own
    shard(model, mesh, reduce="fp8-block", mp_policy=_policy(model), by_rows=by_rows, **options)


def _policy(model: Sharded) -> MixedPrecisionPolicy:
    """Return the policy: a pipeline accumulates the gradients of its micro-batches before their reduction."""
    return BF16_POLICY if isinstance(model, Stage) else BF16_GRADIENTS_POLICY


def _fp8_states(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return octavo.optim.AdamW(parameters, lr=LEARNING_RATE, states="fp8")


def _precompute_scales(model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


VOCABULARY_USED = 64
"""Adjacent token ids differ by less than this, so that a few steps suffice to learn something."""


class Layout(NamedTuple):
    """Division of the ranks; the remaining factor is data parallel, sharded by FSDP2."""

    tensor: int = 1
    """Ranks that share each layer."""
    context: int = 1
    """Ranks that share the tokens of each sequence; blocks are not compiled."""
    stages: int = 1
    """Stages of a pipeline (1F1B)."""
    sent: Sent = "bf16"
    """Format of activations between stages."""
    graph: bool = False
    """Forward and backward are replayed as a CUDA graph."""

    def __str__(self) -> str:
        cut = [f"tensor {self.tensor}"] if self.tensor > 1 else []
        cut += [f"context {self.context}"] if self.context > 1 else []
        cut += [f"pipeline {self.stages}"] if self.stages > 1 else []
        cut += ["FP8 between stages"] if self.sent == "fp8" else []
        return ", ".join((cut or ["data"]) + (["graph"] if self.graph else []))


class Trainer(Protocol):
    """A model laid out over the ranks."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """Modules of this rank."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks among them."""

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor | None:
        """Run forward and backward over the data-parallel rank's sequences, given on the host.

        Return the mean loss if this rank has it.
        """


def part_of_batch(config: ModelConfig, sequences: int, step: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Return tokens and targets (B, T) of this data-parallel rank, on the host, of a step of `sequences` in all."""
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
    """Build a model, equal in every layout, and return it laid out over all ranks, with the data-parallel mesh."""
    copies = dist.get_world_size() // layout.stages // layout.tensor // layout.context
    shape = (layout.stages, copies, layout.context, layout.tensor)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pipeline", "data", "context", "tensor"))
    with device:
        model = Llama(config)
        model.reset_parameters(torch.Generator(device).manual_seed(0))
    implementation.convert(model)
    if layout.stages > 1:
        return Staged(model, implementation, layout, mesh), mesh["data"]
    if layout.context > 1:
        context = context_parallel(model, mesh["context"])
        return Whole(model, implementation, mesh["data", "context"]._flatten("shard"), context), mesh["data"]
    if layout.tensor > 1:
        tensor_parallel(model, mesh["tensor"])
    return Whole(model, implementation, mesh["data"]), mesh["data"]


class Whole:
    """Every rank has all layers, or its tensor-parallel part of each."""

    def __init__(
        self, model: Llama, implementation: Implementation, data: DeviceMesh, context: Context | None = None
    ) -> None:
        self._context = context
        self._alone = data.size() == 1  # no other rank has shards: all implementations gather once per step
        implementation.shard(model, data, **({"reshard_after_forward": False} if self._alone else {}))
        self._device = next(model.parameters()).device
        self.model, self.modules, self.blocks = model, [model], list(model.layers)
        self._passes: Callable[[Tensor, Tensor], Tensor] = self._run
        self._graph: Replay | None = None

    def replay(self, optimizer: torch.optim.Optimizer) -> None:
        """Replay forward and backward as a CUDA graph from now on."""
        self._passes = self._graph = octavo.graph(self._run, self.model, optimizer)

    def launch(self) -> None:
        """Launch kernels one by one from now on."""
        self._passes = self._run
        if self._graph is not None:
            self._graph.forget()

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Run one sequence after the other; gradients are reduced after each, as FSDP2 does by default."""
        tokens_BT = send_tokens(tokens_BT, self._device, self.model, parts=len(tokens_BT))
        return self._passes(tokens_BT, upload(targets_BT, self._device))

    def _run(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        losses = []
        for part, (tokens_1T, targets_1T) in enumerate(zip(tokens_BT.split(1), targets_BT.split(1), strict=True), 1):
            if self._alone and isinstance(self.model, FSDPModule):
                self.model.set_reshard_after_backward(part == len(tokens_BT))
            with nullcontext() if self._context is None else self._context.attending(tokens_1T):
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
        """Run one micro-batch per sequence."""
        parts = len(tokens_BT)
        tokens_BT = send_tokens(tokens_BT, self._device, *self.modules, parts=parts)
        return self._pipeline.step(tokens_BT, upload(targets_BT, self._device), parts)
