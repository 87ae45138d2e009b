"""Forward and backward as a CUDA graph: a step launches one graph in place of thousands of kernels.

A GPU finishes many kernels of a model of a few hundred million parameters sooner than Python can launch the next. So
after a few steps the passes over a batch are captured, and from then on replayed: the same kernels on the same memory.
What a graph keeps for itself are addresses and shapes, and what layers compute in: where one of those changes (the
schedule goes to BF16, a guardrail refines a recipe), steps are launched one by one again until the next capture.
The optimizer's step is not part of it: the host makes it while the GPU is still busy with the passes.
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
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Captures some work: returns what replays it, and where each replay leaves its result."""


class _Captured(NamedTuple):
    replay: Callable[[], None]
    inputs_BT: Tensor
    targets_BT: Tensor
    loss: Tensor
    gradients: Sequence[tuple[Tensor, Tensor]]
    """Parameters, and where replays leave their gradients."""
    stored: Mapping[int, Any]
    """Where they leave those that the optimizer stores in FP8."""
    counted: ledger.Ledger


def captured(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Capture some work as a CUDA graph. Other threads, which copy what telemetry measured, go on meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


class Replay:
    """The passes of a lane, captured after some calls and replayed from then on.

    The gradients of a replay lie where those of the last one did: drop them, or be done with them, before the next.

    Args:
        run: what is captured. It must not wait for the device, nor draw random numbers on the host.
        model: whose layers say what they compute in.
        parameters: those that get gradients; they have none when this is called.
        optimizer: of theirs; one of `octavo.optim` may store gradients in FP8.
        capture: how; another one for tests.
    """

    refusal: str
    """Why steps are launched one by one although they were to be captured; empty for no reason."""

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        capture: Capture = captured,
    ) -> None:
        self._run, self._model, self._parameters, self._how = run, model, parameters, capture
        self._optimizer = optimizer
        self.refusal = ""
        self.forget()

    def forget(self) -> None:
        """Drop the graph and its memory: for passes of another kind, which need as much. It is captured anew."""
        self._graph: _Captured | None = None
        self._known: list[Any] = []
        self._calls = 0

    def __call__(self, inputs_BT: Tensor, targets_BT: Tensor, parts: int) -> Tensor:
        """Go through a batch as `run` does; return its loss, FP32, shape ()."""
        found = [inputs_BT.shape, parts, *map(_address, self._parameters), *_computed_as(self._model)]
        if found != self._known:
            self.forget()
            self._known = found
        if self._graph is None and self._calls >= WARM and not self.refusal:
            self._capture(inputs_BT, targets_BT, parts)
        if self._graph is None:
            self._calls += 1
            return self._run(inputs_BT, targets_BT, parts)
        return self._replay(self._graph, inputs_BT, targets_BT)

    def _capture(self, inputs_BT: Tensor, targets_BT: Tensor, parts: int) -> None:
        inputs, targets = inputs_BT.clone(), targets_BT.clone()
        try:
            with ledger.apart() as counted:
                replay, loss = self._how(lambda: self._run(inputs, targets, parts))
        except (OctavoError, RuntimeError) as error:  # out of memory is one, too
            self.refusal = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
            self._graph = _Captured(replay, inputs, targets, loss, gradients, _stored(self._optimizer), counted)
        self._optimizer.zero_grad(set_to_none=True)
        if self._graph is None:
            gc.collect()
            torch.cuda.empty_cache()

    def _replay(self, graph: _Captured, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        graph.inputs_BT.copy_(inputs_BT)
        graph.targets_BT.copy_(targets_BT)
        graph.replay()
        for parameter, gradient in graph.gradients:
            parameter.grad = gradient
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.stored_gradients = graph.stored
        ledger.enter(graph.counted)
        return graph.loss.clone()


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
