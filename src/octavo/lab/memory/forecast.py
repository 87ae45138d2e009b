"""Prediction of a training program's peak memory and its composition, before it runs and without a GPU.

Two steps run on fake tensors: the first creates the optimizer's states, the second is the one forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from octavo._util.terminal import Report, silent
from octavo.errors import ConfigError
from octavo.lab.memory.recorder import Recorder, fake_mode
from octavo.lab.memory.timeline import KINDS, Allocation, Kind, Timeline, reserved
from octavo.nn.linear import LinearLayer
from octavo.nn.modules import blocks_of

WORKSPACE_OF_CUBLAS = 2 * 32 * 2**20
"""Bytes that cuBLAS allocates on Hopper: 32 MiB per thread, for the forward thread and the backward thread."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A training program; in a forecast its tensors are fake."""

    models: Sequence[nn.Module]
    """All models whose parameters are in memory."""
    forward_backward: Callable[[], Any]
    """Computes the gradients."""
    update: Callable[[], Any] = lambda: None
    """Applies and frees the gradients. It may be part of `forward_backward` where a `torch.optim` optimizer steps."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted peak of `torch.cuda.max_memory_allocated()`, per GPU."""

    by_kind: dict[Kind, int]
    """Bytes at the peak."""
    reserved: int
    """Lower bound of the bytes that the allocator reserves; fragmentation comes on top."""
    parameters: int
    """Number of parameters of the program's models, over all GPUs."""
    gpus: int = 1

    @property
    def peak(self) -> int:
        """Total bytes of all kinds."""
        return sum(self.by_kind.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the figures in GiB, as JSON and result files store them."""
        kinds = {f"{kind}_gib": round(size / GIB, 3) for kind, size in self.by_kind.items()}
        figures = {"predicted_gib": round(self.peak / GIB, 3), **kinds, "reserved_gib": round(self.reserved / GIB, 3)}
        return {"parameters": self.parameters, "gpus": self.gpus, **figures}

    def __str__(self) -> str:
        unit, scale = ("GiB", GIB) if self.peak >= GIB else ("MiB", 2**20)
        rows = [*self.by_kind.items(), ("peak", self.peak)]
        where = "a GPU" if self.gpus == 1 else f"each of {self.gpus} GPUs"
        return "\n".join(f"{name:<12}{size / scale:>10.2f} {unit}" for name, size in rows) + f" allocated on {where}"


SHARES = {"building the model": 0.0, "first step": 0.3, "second step": 0.85}
"""Phases of a forecast, each with the share of its time that precedes it; for Llamas of 100 M to 8 B parameters."""


def forecast(
    build: Callable[[], Program],
    *,
    gpus: int = 1,
    steady: bool = False,
    gathers_codes: bool = True,
    reshard: bool = True,
    report: Report = silent,
) -> Forecast:
    """Return the predicted peak of a program.

    Args:
        build: makes the program, with tensors on the CPU. It is called in a mode in which all tensors are fake.
        gpus: number of GPUs that FSDP2 shards the program over; `build` makes the work of one.
        gathers_codes: whether weights of FP8 layers are gathered as codes, where the model is sharded.
        reshard: whether gathered weights are freed after forward, and gathered again for backward.
        steady: exclude building and the first step, like a measurement after a warm-up.
        report: called before building and before each step.

    Raises:
        ConfigError: fewer than one GPU.
    """
    building, *steps = SHARES.items()
    report(*building)
    with fake_mode() as recorder:
        program = build()
        for model in program.models:
            _name(recorder, model)
        for each in steps:
            report(*each)
            with recorder.step():
                program.forward_backward()
                recorder.updates()
                program.update()
        timeline = recorder.timeline
        timeline.settle()
        parameters = sum(p.numel() for model in program.models for p in model.parameters())
        return _at_peak(timeline, Shards.of(program.models, gpus, gathers_codes, reshard), parameters, steady)


def largest(peak_of: Callable[[int], int], budget: int, *, start: int = 32) -> int:
    """Return the largest size whose peak is within `budget` bytes, or 0 if none is.

    Each size is evaluated once, and few are: the next guess assumes that peaks grow with the third power of the size.

    Args:
        peak_of: size -> bytes, increasing.
        start: first size to try.
    """
    low, high, size = 0, None, max(start, 1)
    while True:
        peak = peak_of(size)
        if peak <= budget:
            low = size
        else:
            high = size
        if high is not None and high - low <= 1:
            return low
        guess = int(size * (budget / peak) ** (1 / 3))
        size = max(guess, low + 1) if high is None else min(max(guess, low + 1), high - 1)


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


# Memory under FSDP2: shards of weights, gradients and states, plus what is gathered temporarily. Each block is gathered
# before it computes, forward and backward, while the next one is prefetched: the weights of two blocks are whole at a
# time, and so are the gradients of two. Without `reshard` the weights of all blocks are. Parameters outside of blocks
# (embedding, head, last norm) stay whole through forward and backward. Source: PyTorch FSDP2, `fully_shard` on each
# block and on the model, prefetching one block.
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
    def of(cls, models: Sequence[nn.Module], gpus: int, gathers_codes: bool, reshard: bool) -> Shards:
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
            fp8 = _gathered_in_fp8(model) if gathers_codes else set()
            whole = [sum(_sent(p, fp8) for p in block.parameters()) for block in blocks]
            grads = [sum(p.numel() * min(p.element_size(), 4) for p in block.parameters()) for block in blocks]
            outside = [p for p in model.parameters() if id(p) not in inside]
            gathered += sum(sorted(whole)[-IN_FLIGHT:] if reshard else whole) + sum(_sent(p, fp8) for p in outside)
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
    layers = (module for module in model.modules() if isinstance(module, LinearLayer) and module.recipe.fprop.is_fp8)
    return {id(layer.weight) for layer in layers}


def _sent(parameter: nn.Parameter, fp8: set[int]) -> int:
    """Return the bytes of a gathered weight: one byte per element and one scale per row, or BF16."""
    if id(parameter) in fp8:
        return parameter.numel() + 4 * parameter.shape[0]
    return 2 * parameter.numel()
