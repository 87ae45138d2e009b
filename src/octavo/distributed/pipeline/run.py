"""The stages of a model that a rank has, run: by a schedule forward and backward, or forward alone.

Shapes: B sequences in a batch, T tokens in a sequence, D width of the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from octavo.distributed.pipeline.schedules import Schedule
from octavo.distributed.pipeline.stage import PipelineStage, Sent, pack, unpack


class Pipeline:
    """The stages of a model on the ranks of a process group. All its ranks call the same methods, on the same batch.

    Args:
        stages: those of this rank, as `octavo.models.stages` makes them, by their number in the model; sharded or not.
        schedule: in which order batches go through them, and where each stage is.
        group: the ranks of the pipeline.
        device: of this rank.
        width: of the residual stream.
        stream: its dtype.
        sent: what it is sent as, see `PipelineStage`.
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
        """Whether the last stage is this rank's: it alone knows losses."""
        return len(self.places) - 1 in self.stages

    def step(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        parts: int,
        scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
    ) -> Tensor | None:
        """Go forward and backward through a batch in so many equal parts, whose gradients are averaged.

        Args:
            scaled: makes of a part's loss what is gone backward from.

        Returns:
            The mean loss in nats a token, not scaled, FP32, shape (); None where the last stage is another rank's.
        """
        self._losses, self._scaled = [], scaled
        first = (tokens_BT.contiguous(),) if 0 in self.stages else ()  # its strides are checked against those of a part
        last = {"targets_BT": targets_BT, "target": targets_BT} if self.has_last else {}
        self._schedule_for(parts, tokens_BT.shape).step(*first, **last, return_outputs=False)
        return torch.stack(self._losses).sum() if self.has_last else None

    @torch.no_grad()
    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, *, by_sequence: bool = False) -> Tensor | None:
        """Return the mean loss of a batch, (1,), or of each sequence, (B,); None where `step` gives None.

        Ranks that are done do not wait for the others, which may still have earlier batches.
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
        """Return the residual stream that another rank sends."""
        x_BTD = torch.zeros((*shape, self._width), dtype=self._stream, device=self._device)
        coming = pack(x_BTD, self.sent)
        dist.recv(coming, group=self._group, group_src=place)
        return x_BTD.copy_(unpack(coming, x_BTD))

    def _reshard(self) -> None:
        """Keep no gathered weights: those of the shards may change before the next pass."""
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _schedule_for(self, parts: int, shape: torch.Size) -> Any:
        """Return PyTorch's schedule for batches of a shape."""
        if (parts, shape) not in self._made:
            part = (shape[0] // parts, shape[1])
            own = [self._prepared(index, stage, part) for index, stage in self.stages.items()]
            self._made[parts, shape] = self.schedule.make(own, parts, lambda loss, _: self._noted(loss.sum() / parts))
        return self._made[parts, shape]

    def _noted(self, loss: Tensor) -> Tensor:
        """Remember the loss of a part, and return what is gone backward from."""
        self._losses.append(loss.detach().float())
        return self._scaled(loss)

    def _prepared(self, index: int, stage: nn.Module, shape: tuple[int, int]) -> PipelineStage:
        """Return a stage as schedules want it. Told the shapes, PyTorch need not run it to find them."""
        stream_BTD = torch.empty((*shape, self._width), dtype=self._stream, device="meta", requires_grad=True)
        tokens_BT, loss = torch.empty(shape, dtype=torch.int64, device="meta"), torch.empty(1, device="meta")
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
