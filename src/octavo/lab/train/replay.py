"""Forward and backward as a CUDA graph: a step launches one graph instead of thousands of kernels.

On models of a few hundred million parameters a GPU runs many kernels faster than Python launches them. After a few
steps forward and backward are captured, then replayed: the same kernels on the same memory. A graph fixes addresses,
shapes and recipes: if one of them changes (the schedule switches to BF16, a guardrail refines a recipe), steps are
launched kernel by kernel until the next capture. The optimizer step is not captured: the host queues it while the GPU
is still busy.

A graph keeps the memory of its activations between replays. Evaluations and probes call `make_room` first.

A model sharded by FSDP2 is captured with its collectives. All ranks capture and replay the same ones in the same order,
so one rank may replay while another launches kernel by kernel. Graphs that hold collectives must be dropped
(`Graphs.give_up`) before the process group is destroyed, which waits for them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo._util.collector import no_collection
from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.kernels import sample
from octavo.kernels.runtime import ledger
from octavo.kernels.runtime.dispatch import launches_on
from octavo.optim import Optimizer
from octavo.tensor import FP8Tensor, local

WARM = 3
"""Uncaptured steps before a capture, which compile and autotune."""
_DECIDING = ("recipe", "mlp_recipes", "target", "enabled", "shared", "stats_slot", "scaling_slot")
"""Module attributes that decide what is computed, or where."""

Run = Callable[..., Tensor]
"""(*arguments) -> loss; leaves gradients in the parameters."""
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

    def __init__(self, *, warns: bool = False) -> None:
        """Start without a graph; with `warns` a failure is a warning."""
        self.refusal = ""
        self._warns = warns
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._replays: list[Replay] = []

    def replay(
        self, run: Run, model: nn.Module, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer
    ) -> Replay:
        """Return a `Replay` of these passes."""
        self._replays.append(Replay(self, run, model, parameters, optimizer))
        return self._replays[-1]

    def remove(self, replay: Replay) -> None:
        """Drop the graph of a replay for good, and the model and optimizer that it holds."""
        replay.forget()
        self._replays.remove(replay)

    def capture(self, work: Work) -> Captured:
        """Capture work. Other threads, which copy telemetry, continue meanwhile."""
        with no_collection():
            return self._capture(work)

    def _capture(self, work: Work) -> Captured:
        if not any(replay.is_captured for replay in self._replays):
            self._pool = torch.cuda.graph_pool_handle()  # PyTorch refuses the pool of graphs that are gone
        self._stream = self._stream or torch.cuda.Stream()  # PyTorch's own is of the GPU that it first captured on
        graph = torch.cuda.CUDAGraph()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                result = work()
        except Exception:
            with (
                warnings.catch_warnings(action="ignore"),
                torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream),
            ):
                pass  # an empty one: PyTorch's generator takes itself to be captured until a capture ends well
            raise
        return Captured(graph.replay, result, torch.cuda.memory_reserved() - before)

    def make_room(self) -> None:
        """Drop all graphs unless as much memory is free as they hold; they are captured again later."""
        held = sum(replay.held for replay in self._replays)
        if held and self.free(held) < held:
            for replay in self._replays:
                replay.forget()

    def give_up(self, reason: str) -> None:
        """Drop all graphs and capture no more: those of one model would only take memory from the other."""
        self.refusal = reason
        for replay in self._replays:
            replay.forget()
        if self._warns:
            warnings.warn(f"octavo.graph: kernels are launched one by one, capturing failed: {reason}", stacklevel=4)

    def free(self, held: int) -> int:
        """Return the bytes available to other work while graphs hold `held` bytes."""
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - held
        return torch.cuda.mem_get_info()[0] + max(cached, 0)


class _Passes(NamedTuple):
    """A captured forward and backward pass with its buffers."""

    graph: Captured
    arguments: Sequence[Any]
    """Those of the capture; each replay copies its tensors into them."""
    gradients: Sequence[tuple[Tensor, Tensor]]
    """Parameters and their gradients, overwritten by each replay."""
    stored: Mapping[int, Any]
    """Gradients that the optimizer stores in FP8."""
    counted: ledger.Ledger
    sharded: Sequence[Any]
    """FSDP2's modules."""


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
        self._failure = ""
        self.forget()

    @property
    def refusal(self) -> str:
        """Why capturing failed."""
        return self._graphs.refusal

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph."""
        return self._passes is not None

    @property
    def held(self) -> int:
        """Bytes that the graph keeps between replays."""
        return 0 if self._passes is None else self._passes.graph.held

    def forget(self) -> None:
        """Drop the graph and its memory; it is captured again later."""
        self._passes: _Passes | None = None
        self._known: list[Any] = []
        self._calls = 0

    def __call__(self, *arguments: Any) -> Tensor:
        """Run forward and backward; return the loss.

        Raises:
            ConfigError: a parameter has a gradient already, which a replay would overwrite.
            UnsupportedError: the passes of a sharded model cannot be captured. Every later call raises it too.
        """
        if self._failure:
            raise UnsupportedError(self._failure)
        if any(parameter.grad is not None for parameter in self._parameters):
            raise ConfigError(
                "graph: a parameter has a gradient already, which a replay overwrites. Call optimizer.zero_grad() after"
                " each step, and run all micro-batches of a step within the captured function."
            )
        with launches_on(self._parameters[0].device):  # a graph is captured on a stream of the current GPU
            return self._call(arguments)

    def _call(self, arguments: Sequence[Any]) -> Tensor:
        found = [
            ledger.is_open(),
            *map(_described, arguments),
            *map(_address, self._parameters),
            *_computed_as(self._model),
        ]
        if found != self._known:
            self.forget()
        if self._passes is None and self._calls >= WARM and not self.refusal:
            self._capture(arguments)
        if self._passes is None:
            self._graphs.make_room()
            self._known, self._calls = found, self._calls + 1
            with contextlib.nullcontext() if self.refusal else sample.warm_up():
                return self._run(*arguments).detach()
        return self._replay(self._passes, arguments)

    def _capture(self, arguments: Sequence[Any]) -> None:
        own = [each.detach().clone() if isinstance(each, Tensor) else each for each in arguments]
        sharded = _sharded(self._model)
        _reshard(sharded)
        try:
            with ledger.apart() as counted:
                graph = self._graphs.capture(lambda: self._run(*own).detach())
        except (OctavoError, RuntimeError) as error:  # RuntimeError includes out of memory
            first: BaseException = error  # what the capture says of its end hides why it ended
            while first.__context__ is not None:
                first = first.__context__
            reason = f"{type(first).__name__}: {' '.join(str(first).split())[:300]}"
            if sharded:  # FSDP2 is in the middle of a pass: streams would not wait for each other in the next one
                self._failure = (
                    f"graph: the passes of this sharded model cannot be captured: {reason}. The failed capture left the"
                    " model in the middle of a pass: build it again, and run it without a graph."
                )
                raise UnsupportedError(self._failure) from error
            self._graphs.give_up(reason)
        else:
            gradients = [(p, p.grad) for p in self._parameters if p.grad is not None]
            self._passes = _Passes(graph, own, gradients, _stored(self._optimizer), counted, sharded)
        self._optimizer.zero_grad(set_to_none=True)

    def _replay(self, passes: _Passes, arguments: Sequence[Any]) -> Tensor:
        for own, given in zip(passes.arguments, arguments, strict=True):
            if isinstance(own, Tensor):
                own.copy_(given)
        _reshard(passes.sharded)
        passes.graph.replay()
        for parameter, gradient in passes.gradients:
            parameter.grad = gradient
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.stored_gradients = passes.stored
        ledger.enter(passes.counted)
        return passes.graph.result.clone()


def graph(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> Replay:
    """Return forward and backward of a model as one CUDA graph: captured in the fourth call, replayed from then on.

        passes = octavo.graph(forward_and_backward, model, optimizer)
        for tokens, targets in batches:
            loss = passes(tokens, targets)
            optimizer.step()
            optimizer.zero_grad()

    The model may be sharded by FSDP2, its blocks compiled, its layers in FP8 or not. If shapes, parameters or recipes
    change, it is captured again. If capturing fails, kernels are launched one by one, with a warning; if the model is
    sharded, that call and all later ones raise UnsupportedError.

    Args:
        run: `run(*arguments)` returns the loss, shape (), and leaves gradients in the parameters. It must not
            synchronise with the GPU. Apart from tensor arguments, parameters and buffers, a replay sees the values at
            the time of the capture. With several micro-batches it runs all of them.
        model: on a GPU.
        optimizer: steps the parameters of `model`; `zero_grad` follows each step.

    Returns:
        A callable with the arguments of `run`. Gradients are overwritten by its next call, its result is not. Call
        `forget()` before the process group is destroyed.

    Raises:
        UnsupportedError: the model is not on a GPU.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters or not parameters[0].is_cuda:
        raise UnsupportedError("graph: only a GPU replays CUDA graphs, and the model is not on one. Call the function.")
    return Graphs(warns=True).replay(run, model, parameters, optimizer)


def _stored(optimizer: torch.optim.Optimizer) -> Mapping[int, Any]:
    return optimizer.stored_gradients if isinstance(optimizer, Optimizer) else {}


def _described(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.shape, argument.dtype, argument.device
    return argument


def _address(parameter: Tensor) -> int:
    own = local(parameter)
    return (own.codes if isinstance(own, FP8Tensor) else own).data_ptr()


def _sharded(model: nn.Module) -> list[Any]:
    """Return the modules that FSDP2 gathers."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _reshard(sharded: Sequence[Any]) -> None:
    """Drop weights that an evaluation has left gathered: FSDP2, unaware of replays, would read them after the step."""
    for module in sharded:
        module.reshard()


def _computed_as(model: nn.Module) -> list[Any]:
    """Return a key that changes whenever a module computes differently, or reads or writes other memory."""
    found: list[Any] = []
    for module in model.modules():
        own = vars(module)
        if slot := own.get("scaling_slot"):
            found.append(slot.scale_and_amax.data_ptr())
        found.append(id(own.get("weight_codes")))
        found += (type(module), *(own[name] for name in _DECIDING if name in own))
    return found
