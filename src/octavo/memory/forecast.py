"""How much memory a training program will take at its peak, and for what, before it runs and without a GPU.

Two steps of it are run on fake tensors: the first makes the optimizer's states, the second has all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from octavo.memory.recorder import Recorder, on_paper
from octavo.memory.sharding import Shards
from octavo.memory.timeline import KINDS, Kind, Timeline, reserved

WORKSPACE_OF_CUBLAS = 2 * 32 * 2**20
"""Bytes that cuBLAS takes on Hopper, 32 MiB for each thread that multiplies: that of forward and that of backward."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A training program, made of fake tensors where it is to be forecast."""

    models: Sequence[nn.Module]
    """All whose parameters are in memory."""
    forward_backward: Callable[[], Any]
    """Leaves the gradients."""
    update: Callable[[], Any] = lambda: None
    """Takes them up, and drops them. It may be part of `forward_backward` where an optimizer of PyTorch's makes it."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted peak of `torch.cuda.max_memory_allocated()`, on each GPU."""

    by_kind: dict[Kind, int]
    """Bytes at the peak."""
    reserved: int
    """Bytes that the allocator asks the driver for at the least; fragments come on top."""
    parameters: int
    """Of the program's models, on all GPUs together."""
    gpus: int = 1

    @property
    def peak(self) -> int:
        """Return the bytes of all kinds."""
        return sum(self.by_kind.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the figures in GiB, for JSON and result files."""
        kinds = {f"{kind}_gib": round(size / GIB, 3) for kind, size in self.by_kind.items()}
        figures = {"predicted_gib": round(self.peak / GIB, 3), **kinds, "reserved_gib": round(self.reserved / GIB, 3)}
        return {"parameters": self.parameters, "gpus": self.gpus, **figures}

    def __str__(self) -> str:
        lines = [f"{kind:<12}{size / GIB:>10.2f} GiB" for kind, size in self.by_kind.items()]
        where = "a GPU" if self.gpus == 1 else f"each of {self.gpus} GPUs"
        return "\n".join([*lines, f"{'peak':<12}{self.peak / GIB:>10.2f} GiB allocated on {where}"])


def forecast(build: Callable[[], Program], *, gpus: int = 1, steady: bool = False) -> Forecast:
    """Return the predicted peak of a program.

    Args:
        build: makes the program. It is called where all tensors are fake; let it make them on the CPU.
        gpus: over how many of them FSDP2 shards it; what is built is the work of one.
        steady: leave out building and the first step, as a measurement after a warm-up does.

    Raises:
        ConfigError: fewer than one GPU.
    """
    with on_paper() as recorder:
        program = build()
        for model in program.models:
            _name(recorder, model)
        for _ in range(2):
            with recorder.step():
                program.forward_backward()
                recorder.updates()
                program.update()
        timeline = recorder.timeline
        timeline.settle()
        parameters = sum(p.numel() for model in program.models for p in model.parameters())
        return _at_peak(timeline, Shards.of(program.models, gpus), parameters, steady)


def _name(recorder: Recorder, model: nn.Module) -> None:
    parameters = list(model.parameters())
    for allocation in recorder.of([*parameters, *model.buffers()]):
        allocation.kind = "weights"
    for allocation in recorder.of(parameters):
        allocation.is_parameter = True


def _at_peak(timeline: Timeline, shards: Shards, parameters: int, steady: bool) -> Forecast:
    shards.gather(timeline)
    event = timeline.peak(shards.size_of, timeline.steps[-1].start if steady else 0)
    alive = timeline.alive_at(event)
    by_kind: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for allocation in alive:
        by_kind[allocation.kind or "workspace"] += shards.size_of(allocation)
    by_kind["workspace"] += WORKSPACE_OF_CUBLAS
    surplus = max(reserved(alive) - sum(a.size for a in alive), 0)
    return Forecast(by_kind, sum(by_kind.values()) + surplus, parameters, shards.gpus)
