"""Forward and backward as a CUDA graph: a step launches one graph instead of thousands of kernels.

On models of a few hundred million parameters a GPU runs many kernels faster than Python launches them. After a few
steps forward and backward are captured, then replayed: the same kernels on the same memory. A graph fixes addresses,
shapes and recipes: if one of them changes (the schedule switches to BF16, a guardrail refines a recipe), steps are
launched kernel by kernel until the next capture. The optimizer step is not captured: the host queues it while the GPU
is still busy.

A graph keeps the memory of its activations between replays. Evaluations and probes call `make_room` first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.errors import OctavoError
from octavo.kernels import ledger
from octavo.optim import Optimizer
from octavo.tensor import FP8Tensor

WARM = 3
"""Uncaptured steps before a capture, which compile and autotune."""
_DECIDING = ("recipe", "mlp_recipes", "target", "enabled", "shared", "watch", "scaling_slot")
"""Module attributes that decide what is computed, or where."""

Run = Callable[[Tensor, Tensor, int], Tensor]
"""(inputs, targets, parts) -> loss; leaves gradients in the parameters."""
Work = Callable[[], Tensor]


class Captured(NamedTuple):
    """A captured graph."""

    replay: Callable[[], None]
    result: Tensor
    """Output tensor, overwritten by each replay."""
    held: int
    """Bytes kept between replays."""


class Graphs:
    """The CUDA graphs of a run, in one memory pool: no two are replayed at the same time."""

    refusal: str
    """Why capturing failed; empty if it did not."""

    def __init__(self) -> None:
        self.refusal = ""
        self._pool: Any = None
        self._replays: list[Replay] = []

    def replay(
        self, run: Run, model: nn.Module, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer
    ) -> Replay:
        """Return a `Replay` of these passes."""
        self._replays.append(Replay(self, run, model, parameters, optimizer))
        return self._replays[-1]

    def capture(self, work: Work) -> Captured:
        """Capture work. Other threads, which copy telemetry, continue meanwhile."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return Captured(graph.replay, result, torch.cuda.memory_reserved() - before)

    def make_room(self) -> None:
        """Drop all graphs unless as much memory is free as they hold; they are captured again later."""
        held = sum(replay.held for replay in self._replays)
        if held and self.free(held) < held:
            for replay in self._replays:
                replay.forget()
            self._pool = None

    def give_up(self, reason: str) -> None:
        """Drop all graphs and capture no more: those of one model would only take memory from the other."""
        self.refusal = reason
        for replay in self._replays:
            replay.forget()

    def free(self, held: int) -> int:
        """Return the bytes available to other work while graphs hold `held` bytes."""
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - held
        return torch.cuda.mem_get_info()[0] + max(cached, 0)


class _Passes(NamedTuple):
    """A captured forward and backward pass with its buffers."""

    graph: Captured
    inputs_BT: Tensor
    targets_BT: Tensor
    gradients: Sequence[tuple[Tensor, Tensor]]
    """Parameters and their gradients, overwritten by each replay."""
    stored: Mapping[int, Any]
    """Gradients that the optimizer stores in FP8."""
    counted: ledger.Ledger


class Replay:
    """Forward and backward of a model: captured after some calls, then replayed.

    A replay overwrites the gradients of the one before: use or drop them first.

    Args:
        graphs: graphs of the run.
        run: the captured function. It must not synchronise with the device or draw random numbers on the host.
        model: model whose recipes are tracked.
        parameters: parameters that get gradients; their `grad` must be None at each call.
        optimizer: their optimizer; one of `octavo.optim` may store gradients in FP8.
    """

    def __init__(
        self,
        graphs: Graphs,
        run: Run,
        model: nn.Module,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._graphs, self._run, self._model = graphs, run, model
        self._parameters, self._optimizer = parameters, optimizer
        self.forget()

    @property
    def refusal(self) -> str:
        """Why capturing failed."""
        return self._graphs.refusal

    @property
    def held(self) -> int:
        """Bytes that the graph keeps between replays."""
        return 0 if self._passes is None else self._passes.graph.held

    def forget(self) -> None:
        """Drop the graph and its memory; it is captured again later."""
        self._passes: _Passes | None = None
        self._known: list[Any] = []
        self._calls = 0

    def __call__(self, inputs_BT: Tensor, targets_BT: Tensor, parts: int) -> Tensor:
        """Run forward and backward on a batch; return its loss, FP32, shape ()."""
        found = [inputs_BT.shape, parts, *map(_address, self._parameters), *_computed_as(self._model)]
        if found != self._known:
            self.forget()
        if self._passes is None and self._calls >= WARM and not self.refusal:
            self._capture(inputs_BT, targets_BT, parts)
        if self._passes is None:
            self._graphs.make_room()
            self._known, self._calls = found, self._calls + 1
            return self._run(inputs_BT, targets_BT, parts)
        return self._replay(self._passes, inputs_BT, targets_BT)

    def _capture(self, inputs_BT: Tensor, targets_BT: Tensor, parts: int) -> None:
        inputs, targets = inputs_BT.clone(), targets_BT.clone()
        try:
            with ledger.apart() as counted:
                graph = self._graphs.capture(lambda: self._run(inputs, targets, parts))
        except (OctavoError, RuntimeError) as error:  # RuntimeError includes out of memory
            self._graphs.give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        else:
            gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
            self._passes = _Passes(graph, inputs, targets, gradients, _stored(self._optimizer), counted)
        self._optimizer.zero_grad(set_to_none=True)

    def _replay(self, passes: _Passes, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        passes.inputs_BT.copy_(inputs_BT)
        passes.targets_BT.copy_(targets_BT)
        passes.graph.replay()
        for parameter, gradient in passes.gradients:
            parameter.grad = gradient
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.stored_gradients = passes.stored
        ledger.enter(passes.counted)
        return passes.graph.result.clone()


def _stored(optimizer: torch.optim.Optimizer) -> Mapping[int, Any]:
    return optimizer.stored_gradients if isinstance(optimizer, Optimizer) else {}


def _address(parameter: Tensor) -> int:
    return (parameter.codes if isinstance(parameter, FP8Tensor) else parameter).data_ptr()


def _computed_as(model: nn.Module) -> list[Any]:
    """Return a key that changes whenever a module computes differently, or reads or writes other memory."""
    found: list[Any] = []
    for module in model.modules():
        own = vars(module)
        if slot := own.get("scaling_slot"):
            found.append(slot.cells.data_ptr())
        found.append(id(own.get("weight_codes")))
        found += (type(module), *(own[name] for name in _DECIDING if name in own))
    return found
