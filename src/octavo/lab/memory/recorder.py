"""Execution of a program on fake tensors, with every allocation recorded."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.kernels.runtime import dispatch
from octavo.kernels.runtime.operation import composite
from octavo.lab.memory.compiled import compiler
from octavo.lab.memory.fake_kernels import AsOnGpu, FakeMode, clear_caches, replacements, workspace
from octavo.lab.memory.timeline import Allocation, Step, Timeline

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Records the birth and death of every storage. Tensors are fakes on the CPU, computed as on a GPU."""

    def __init__(self, fakes: FakeMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes
        self.timeline = Timeline()
        self._step: Step | None = None
        self._is_paused = False
        self._known: dict[int, Allocation] = {}
        """Allocations by the address of their storage."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Allow compilation inside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on fakes and record what it allocates; one composed of kernels runs kernel by kernel."""
        kwargs = kwargs or {}
        if TracingContext.try_get() is not None:  # a compiler is tracing: nothing runs
            return func(*args, **kwargs)
        if func in _READS:
            return _placeholder(args[0].dtype)
        if func is aten.addmm.dtype_out:  # CUDA only: PyTorch 2.11 has no fake implementation
            return kwargs["out"]
        phase = self._phase()
        run = composite(func)
        if run is None:
            result = func(*args, **kwargs)
        else:
            with self:
                result = run(*args, **kwargs)
        self._fakes.forget_outputs()
        self.enter(result)
        if (taken := workspace(func, args)) and not self._is_paused:
            self.timeline.free(self.timeline.allocate(taken, phase))
        return result

    def enter(self, values: Any) -> None:
        """Record the memory of the tensors in nested `values` that is not known yet."""
        if self._is_paused:
            return
        for storage in map(Tensor.untyped_storage, parts(values)):
            key = storage._cdata
            if key not in self._known and storage.nbytes():
                self._known[key] = self.timeline.allocate(storage.nbytes(), self._phase())
                weakref.finalize(storage, self._forget, key).atexit = False

    def of(self, values: Any) -> list[Allocation]:
        """Return the allocations of the tensors in nested `values`."""
        keys = (part.untyped_storage()._cdata for part in parts(values))
        return [self._known[key] for key in keys if key in self._known]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside the block."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record a training step inside the block."""
        now = self.timeline.now
        self._step = Step(start=now, backward=-1, update=-1)
        before = register_optimizer_step_pre_hook(self.updates)
        after = register_optimizer_step_post_hook(self._updated)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            step, self._step = self._step, None
            step.backward = step.backward if step.backward >= 0 else self.timeline.now
            step.update = step.update if step.update >= 0 else self.timeline.now
            self.timeline.steps.append(step)

    def updates(self, *_: Any) -> None:
        """Mark that gradients are complete and the update begins. Optimizers call it through a hook."""
        if self._step is not None and self._step.update < 0:
            self._step.update = self.timeline.now

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for allocation in self.of([list(state.values()) for state in optimizer.state.values()]):
            allocation.kind = "states"

    def _forget(self, key: int) -> None:
        self.timeline.free(self._known.pop(key))

    def _phase(self) -> str:
        if self._step is None:
            return "outside"
        if torch._C._current_graph_task_id() == -1:
            return "forward"
        if self._step.backward < 0:
            self._step.backward = self.timeline.now
        return "backward"


@contextmanager
def fake_mode() -> Iterator[Recorder]:
    """Run a program on fake tensors inside the block, as on a GPU, and record its memory.

    Tensors have no data: reading one gives 1, or True. Random states are restored; compiled code is discarded before
    and after.
    """
    fakes = FakeMode()
    recorder = Recorder(fakes)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        for clear in (torch._dynamo.reset, clear_caches):
            clear()
            stack.callback(clear)
        for module, name, fake in replacements():
            stack.enter_context(mock.patch.object(module, name, fake))
        stack.enter_context(torch.compiler.set_stance("default", force_backend=compiler(recorder)))
        stack.enter_context(dispatch.fake_mode())
        stack.enter_context(AsOnGpu())
        stack.enter_context(fakes)
        stack.enter_context(recorder)
        yield recorder


def parts(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries; for a wrapper subclass, the tensors that it wraps."""
    for leaf in tree_leaves(values):
        if not isinstance(leaf, Tensor):
            continue
        if isinstance(leaf, FakeTensor) or not hasattr(leaf, "__tensor_flatten__"):
            yield leaf
        else:
            names, _ = leaf.__tensor_flatten__()
            yield from parts([getattr(leaf, name) for name in names])


_READS = (aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default)


def _placeholder(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1
