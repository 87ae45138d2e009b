"""Pipeline parallel: stages that send activations and gradients in fewer bytes, and PyTorch's schedules over them.

    parts = octavo.lab.models.stages.stages(model, 2)                 # after octavo.convert
    stage = PipelineStage(parts[rank], rank, 2, device, group=mesh["pipeline"].get_group(), sent="fp8")
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=given_loss, scale_grads=True)

All of PyTorch's schedules support converted layers, including those that compute gradients of inputs and of weights
separately (zero bubble, arXiv 2401.10241), which need PyTorch 2.13; see `octavo.nn.needed_grads`.

Shapes: B sequences in a batch, T tokens in a sequence, D width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage as TorchPipelineStage
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.torch_version import TorchVersion

from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels import QuantSpec, quantize_matrix
from octavo.nn.cross_entropy import count_targets, weighted
from octavo.nn.linear import LinearLayer
from octavo.numerics import Quantized, dequantize

Sent = Literal["as is", "bf16", "fp8"]
_CODES = QuantSpec("e4m3", "row", "power_of_two")
_SCALE_BYTES = 4


class PipelineStage(TorchPipelineStage):
    """Pipeline stage that sends activations in BF16, or as FP8 codes with one scale per token; gradients in BF16.

    Scales are powers of two. With FP8 the residual stream itself is rounded to E4M3 (3 bits of mantissa) between
    stages, more coarsely than by any other operation of a block; backward treats the rounding as the identity. All
    stages of a pipeline must use the same format. Between two stages of one rank nothing is sent.

    Args:
        submodule, stage_index, num_stages, device, kwargs: as for PyTorch's `PipelineStage`.
        sent: `as is` (also gradients), `bf16` or `fp8`.

    Attributes:
        sent_bytes: bytes that this stage has sent to other ranks, activations and gradients.

    Raises:
        ConfigError: an unknown `sent`.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        sent: Sent = "bf16",
        **kwargs: Any,
    ) -> None:
        if sent not in get_args(Sent):
            raise ConfigError(f"PipelineStage: sent = {sent!r} is none of {', '.join(map(repr, get_args(Sent)))}.")
        super().__init__(submodule, stage_index, num_stages, device, **kwargs)
        self.sent, self.sent_bytes = sent, 0
        self._pending: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send a microbatch's activations."""
        return self._packed(super().get_fwd_send_ops(fwd_chunk_id), self.sent)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the gradients of a microbatch's inputs."""
        return self._packed(super().get_bwd_send_ops(bwd_chunk_id), self._gradients)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive a microbatch's activations."""
        return self._awaited(super().get_fwd_recv_ops(fwd_chunk_id), ("forward", fwd_chunk_id), self.sent)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradients of a microbatch's outputs."""
        return self._awaited(super().get_bwd_recv_ops(bwd_chunk_id), ("backward", bwd_chunk_id), self._gradients)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """Run backward on a microbatch, like PyTorch's stage.

        Raises:
            UnsupportedError: gradients of inputs only, with FP8 layers, before PyTorch 2.13.
        """
        converted = any(isinstance(module, LinearLayer) for module in self.submod.modules())
        if not full_backward and converted and TorchVersion(torch.__version__) < "2.13":
            raise UnsupportedError(
                f"PipelineStage: PyTorch {torch.__version__} computes gradients of inputs and weights separately only "
                "in its own layers. Take PyTorch 2.13, or Schedule1F1B or ScheduleInterleaved1F1B."
            )
        return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    @property
    def _gradients(self) -> Sent:
        return "as is" if self.sent == "as is" else "bf16"

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._unpack("forward", fwd_chunk_id)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._unpack("backward", bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _packed(self, operations: list[dist.P2POp], sent: Sent) -> list[dist.P2POp]:
        for operation in operations:
            operation.tensor = pack(operation.tensor.detach(), sent)
            self.sent_bytes += operation.tensor.nbytes
        return operations

    def _awaited(self, operations: list[dist.P2POp], key: tuple[str, int], sent: Sent) -> list[dist.P2POp]:
        """Redirect receive operations into packed buffers, and record the tensor that each is for."""
        for operation in operations:
            target = operation.tensor.detach()
            if _is_packed(target, sent):
                operation.tensor = pack(torch.zeros_like(target), sent)
                self._pending.setdefault(key, []).append((target, operation.tensor))
        return operations

    def _unpack(self, direction: str, chunk: int) -> None:
        for target, received in self._pending.pop((direction, chunk), ()):
            target.copy_(unpack(received, target))


def given_loss(output: Tensor, _: Any = None) -> Tensor:
    """`loss_fn` of a schedule, for a last stage that computes the loss itself.

    The schedule averages microbatches, whatever number of targets each has; `Pipeline` averages targets.
    """
    return output.mean()


def pack(x: Tensor, sent: Sent) -> Tensor:
    """Return a tensor as it is sent: unchanged, BF16, or bytes (rows, K + 4), codes and scale of each row."""
    if not _is_packed(x, sent):
        return x.contiguous()
    if sent == "bf16":
        return x.to(torch.bfloat16)
    made = quantize_matrix(x.reshape(-1, x.shape[-1]), _CODES)
    return torch.cat([made.codes.view(torch.uint8), made.scale.contiguous().view(torch.uint8)], dim=1)


def unpack(received: Tensor, like: Tensor) -> Tensor:
    """Return the values of a tensor packed by `pack`, in the shape of `like`."""
    if received.dtype != torch.uint8:
        return received
    codes = received[:, :-_SCALE_BYTES].contiguous().view(_CODES.fmt.dtype)
    scale = received[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    return dequantize(Quantized(codes, scale, _CODES.tile)).view(like.shape)


def _is_packed(x: Tensor, sent: Sent) -> bool:
    if sent == "as is" or not x.is_floating_point() or x.dim() < 2:
        return False
    return sent == "fp8" or x.dtype != torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule of `torch.distributed.pipelining`."""

    kind: Any
    """Class of PyTorch."""
    stages: int
    """Stages per rank."""
    is_v: bool = False
    """V-shaped placement: a rank's second stage is as far from the end as its first from the beginning."""

    def places(self, ranks: int) -> list[int]:
        """Return the rank of each stage, in order."""
        down = list(range(ranks))
        return down + down[::-1] if self.is_v else down * self.stages


SCHEDULES = {
    "1f1b": Schedule(kind=Schedule1F1B, stages=1),
    "interleaved": Schedule(kind=ScheduleInterleaved1F1B, stages=2),
    "zero-bubble": Schedule(kind=ScheduleInterleavedZeroBubble, stages=2),
    "zero-bubble-v": Schedule(kind=ScheduleZBVZeroBubble, stages=2, is_v=True),
}
"""Schedules by the names of `parallel.schedule`. Zero-bubble schedules (arXiv 2401.10241) compute gradients of inputs
and of weights separately."""


class Pipeline:
    """Pipeline over the ranks of a process group. All ranks call the same methods, with the same batch.

    Args:
        stages: this rank's stages (`octavo.lab.models.stages`) by their number in the model; sharded or not.
        schedule: the schedule, which also determines the rank of each stage.
        width: width of the residual stream.
        stream: dtype of the residual stream.
        sent: format in which it is sent, see `PipelineStage`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        width: int,
        stream: torch.dtype,
        sent: Sent = "bf16",
    ) -> None:
        self.stages, self.schedule, self.sent = dict(sorted(stages.items())), schedule, sent
        self.places = schedule.places(group.size())
        self._group, self._device, self._width, self._stream = group, device, width, stream
        self._made: dict[tuple[int, torch.Size], Any] = {}
        self._losses: list[Tensor] = []
        self._scaled: Callable[[Tensor], Tensor]

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which alone computes losses."""
        return len(self.places) - 1 in self.stages

    def step(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        parts: int,
        scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> Tensor | None:
        """Run forward and backward on a batch, split into `parts` microbatches of equally many sequences.

        Loss and gradients are those of the mean over all targets of the batch that are not -100.

        Args:
            scaled: maps the part of the loss that a microbatch adds to the value on which backward is called.

        Returns:
            The mean loss in nats per target, not scaled, FP32, shape (); None on ranks without the last stage.

        Raises:
            ConfigError: `parts` does not divide the batch.
        """
        if len(tokens_BT) % parts:
            raise ConfigError(f"pipeline: {len(tokens_BT)} sequences do not divide into {parts} equal microbatches.")
        self._losses, self._scaled = [], scaled
        first = (tokens_BT.contiguous(),) if 0 in self.stages else ()  # PyTorch compares strides with a microbatch's
        last = {}
        if self.has_last:
            counts = count_targets(targets_BT, parts)
            last = {"targets_BT": targets_BT, "target": counts / counts.sum()}
        self._schedule_for(parts, tokens_BT.shape).step(*first, **last, return_outputs=False)
        return torch.stack(self._losses).sum() if self.has_last else None

    @torch.no_grad()
    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, *, by_sequence: bool = False) -> Tensor | None:
        """Return the mean loss of a batch, (1,), or of each sequence, (B,); None on ranks without the last stage.

        Ranks do not wait for later stages, which may still be processing earlier batches.
        """
        x = tokens_BT
        for index, stage in self.stages.items():
            if index > 0 and index - 1 not in self.stages:
                x = self._received(tokens_BT.shape, self.places[index - 1])
            is_last = index == len(self.places) - 1
            x = stage(x, targets_BT, by_sequence=by_sequence) if is_last else stage(x)
            if not is_last and index + 1 not in self.stages:
                dist.send(pack(x, self.sent), group=self._group, group_dst=self.places[index + 1])
        self._reshard()
        return x if self.has_last else None

    def _received(self, shape: torch.Size, place: int) -> Tensor:
        """Receive the residual stream from another rank."""
        x_BTD = torch.zeros((*shape, self._width), dtype=self._stream, device=self._device)
        coming = pack(x_BTD, self.sent)
        dist.recv(coming, group=self._group, group_src=place)
        return x_BTD.copy_(unpack(coming, x_BTD))

    def _reshard(self) -> None:
        """Free gathered weights: the shards may change before the next pass."""
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _schedule_for(self, parts: int, shape: torch.Size) -> Any:
        """Return PyTorch's schedule for batches of this shape."""
        if (parts, shape) not in self._made:
            part = (shape[0] // parts, shape[1])
            stages = [self._prepared(index, stage, part) for index, stage in self.stages.items()]
            own = stages[0] if self.schedule.stages == 1 else stages
            self._made[parts, shape] = self.schedule.kind(
                own, parts, loss_fn=lambda loss, share: self._noted(weighted(loss, share).sum()), scale_grads=False
            )
        return self._made[parts, shape]

    def _noted(self, loss: Tensor) -> Tensor:
        """Store what a microbatch adds to the loss, and return the value on which backward is called."""
        self._losses.append(loss.detach().float())
        return self._scaled(loss)

    def _prepared(self, index: int, stage: nn.Module, shape: tuple[int, int]) -> PipelineStage:
        """Return a stage for schedules, with its shapes, so that PyTorch need not run it to infer them."""
        stream_BTD = torch.empty((*shape, self._width), dtype=self._stream, device="meta", requires_grad=True)
        tokens_BT = torch.empty(shape, dtype=torch.int64, device="meta")
        loss = torch.empty(1, dtype=torch.float32, device="meta")
        return PipelineStage(
            stage,
            index,
            len(self.places),
            self._device,
            group=self._group,
            sent=self.sent,
            input_args=stream_BTD if index > 0 else tokens_BT,
            output_args=stream_BTD if index < len(self.places) - 1 else loss,
        )
