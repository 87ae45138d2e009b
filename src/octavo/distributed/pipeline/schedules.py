"""The schedules of `torch.distributed.pipelining` that octavo runs, by name, and which rank has which stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from octavo.distributed.pipeline.stage import PipelineStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule of PyTorch."""

    kind: Any
    """Its class."""
    stages: int
    """Stages of a rank."""
    is_v: bool = False
    """Whether a rank's second stage is as far from the end as its first from the beginning; else ranks take turns."""

    def places(self, ranks: int) -> list[int]:
        """Return the rank of each stage, in the order of the stages."""
        down = list(range(ranks))
        return down + down[::-1] if self.is_v else down * self.stages

    def make(self, stages: Sequence[PipelineStage], microbatches: int, loss: Callable[..., Tensor]) -> Any:
        """Return the schedule over the stages of this rank. What `loss` gives is gone backward from as it is."""
        own = stages[0] if self.stages == 1 else list(stages)
        return self.kind(own, microbatches, loss_fn=loss, scale_grads=False)


SCHEDULES = {
    "1f1b": Schedule(kind=Schedule1F1B, stages=1),
    "interleaved": Schedule(kind=ScheduleInterleaved1F1B, stages=2),
    "zero-bubble": Schedule(kind=ScheduleInterleavedZeroBubble, stages=2),
    "zero-bubble-v": Schedule(kind=ScheduleZBVZeroBubble, stages=2, is_v=True),
}
"""By the names of `parallel.schedule`. Those without bubbles (arXiv 2401.10241) go backward for inputs and for weights
at separate times."""
