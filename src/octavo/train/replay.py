"""Forward and backward as a CUDA graph: a step launches one graph in place of thousands of kernels.

A GPU finishes many kernels of a model of a few hundred million parameters sooner than Python can launch the next. So
after a few steps the passes over a batch are captured, and from then on replayed: the same kernels on the same memory.
What a graph keeps for itself are addresses and shapes, and what layers compute in: where one of those changes (the
schedule goes to BF16, a guardrail refines a recipe), steps are launched one by one again until the next capture.
The optimizer's step is not part of it: the host makes it while the GPU is still busy with the passes.

A graph keeps the memory of its activations between replays. Work of another kind that may need as much, an evaluation
or a probe, makes room first.
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
"""Steps that are launched one by one before a capture: they compile, and let kernels choose what they choose once."""
_DECIDING = ("recipe", "mlp_recipes", "target", "enabled", "shared", "watch", "page")
"""Attributes of modules by which what they compute is another, or elsewhere."""

Run = Callable[[Tensor, Tensor, int], Tensor]
"""Goes through a batch in so many parts, leaves gradients in the parameters and returns the loss."""
Work = Callable[[], Tensor]


class Captured(NamedTuple):
    """Work that was captured."""

    replay: Callable[[], None]
    result: Tensor
    """Where each replay leaves it."""
    held: int
    """Bytes that it keeps between replays."""


class Graphs:
    """The graphs of a run. They share memory, as no two of them are replayed at the same time."""

    refusal: str
    """Why steps are launched one by one although they were to be captured; empty for no reason."""

    def __init__(self) -> None:
        self.refusal = ""
        self._pool: Any = None
        self._replays: list[Replay] = []

    def replay(
        self, run: Run, model: nn.Module, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer
    ) -> Replay:
        """Return what captures these passes and replays them; see `Replay`."""
        self._replays.append(Replay(self, run, model, parameters, optimizer))
        return self._replays[-1]

    def capture(self, work: Work) -> Captured:
        """Capture some work. Other threads, which copy what telemetry measured, go on meanwhile."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        return Captured(graph.replay, result, torch.cuda.memory_reserved() - before)

    def make_room(self) -> None:
        """Drop all graphs, unless there is as much memory elsewhere as they hold; they are captured anew."""
        held = sum(replay.held for replay in self._replays)
        if held and self.free(held) < held:
            for replay in self._replays:
                replay.forget()
            self._pool = None

    def give_up(self, reason: str) -> None:
        """Capture nothing any more: graphs of some lanes would only take memory from the others."""
        self.refusal = reason
        for replay in self._replays:
            replay.forget()

    def free(self, held: int) -> int:
        """Return the bytes that other work can have, where graphs hold so many."""
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - held
        return torch.cuda.mem_get_info()[0] + max(cached, 0)


class _Passes(NamedTuple):
    """Passes that were captured, and what goes in and out."""

    graph: Captured
    inputs_BT: Tensor
    targets_BT: Tensor
    gradients: Sequence[tuple[Tensor, Tensor]]
    """Parameters, and where replays leave their gradients."""
    stored: Mapping[int, Any]
    """Where they leave those that the optimizer stores in FP8."""
    counted: ledger.Ledger


class Replay:
    """The passes of a lane, captured after some calls and replayed from then on.

    The gradients of a replay lie where those of the last one did: drop them, or be done with them, before the next.

    Args:
        graphs: of the run.
        run: what is captured. It must not wait for the device, nor draw random numbers on the host.
        model: whose layers say what they compute in.
        parameters: those that get gradients; they have none when this is called.
        optimizer: of theirs; one of `octavo.optim` may store gradients in FP8.
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
        """That of all graphs of the run."""
        return self._graphs.refusal

    @property
    def held(self) -> int:
        """Bytes that the graph keeps between replays."""
        return 0 if self._passes is None else self._passes.graph.held

    def forget(self) -> None:
        """Drop the graph and its memory; it is captured anew."""
        self._passes: _Passes | None = None
        self._known: list[Any] = []
        self._calls = 0

    def __call__(self, inputs_BT: Tensor, targets_BT: Tensor, parts: int) -> Tensor:
        """Go through a batch as `run` does; return its loss, FP32, shape ()."""
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
        except (OctavoError, RuntimeError) as error:  # out of memory is one, too
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
    """Return what is another, by ==, once a module computes otherwise, or reads or writes elsewhere."""
    found: list[Any] = []
    for module in model.modules():
        own = vars(module)
        if page := own.get("page"):
            found.append(page.cells.data_ptr())
        found += (type(module), *(own[name] for name in _DECIDING if name in own))
    return found
