"""Execution of a rank's pipeline stages: forward and backward by a schedule of PyTorch, or forward only.

Shapes: B sequences in a batch, T tokens in a sequence, D width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from octavo.distributed.pipeline.stage import PipelineStage, Sent, pack, unpack


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
        stages: this rank's stages, as `octavo.models.stages` makes them, by their number in the model; sharded or not.
        schedule: the schedule, which also determines the rank of each stage.
        group: the ranks of the pipeline.
        device: device of this rank.
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
        """Run forward and backward on a batch, split into `parts` equal microbatches whose gradients are averaged.

        Args:
            scaled: maps the loss of a microbatch to the value on which backward is called.

        Returns:
            The mean loss in nats per token, not scaled, FP32, shape (); None on ranks without the last stage.
        """
        self._losses, self._scaled = [], scaled
        first = (tokens_BT.contiguous(),) if 0 in self.stages else ()  # PyTorch compares strides with a microbatch's
        last = {"targets_BT": targets_BT, "target": targets_BT} if self.has_last else {}
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
                own, parts, loss_fn=lambda loss, _: self._noted(loss.sum() / parts), scale_grads=False
            )
        return self._made[parts, shape]

    def _noted(self, loss: Tensor) -> Tensor:
        """Store the loss of a microbatch, and return the value on which backward is called."""
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
