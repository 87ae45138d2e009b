"""Record and replay of kernel launches, without running the Python that made them.

On small layers eager FP8 is bound by Python: host time between two launches exceeds the kernel's. A function that only
launches kernels and calls PyTorch operators makes the same calls for tensors of the same shapes. `replay` runs such a
function at the first call with a signature, records it at the second, and from then on repeats the recorded
allocations, launches and operator calls on new tensors. This is not graph capture: it executes eagerly, on any stream,
also inside a CUDA graph capture.

A recording consists of slots and steps. A step reads its arguments, tensors and constants, from slots and writes its
result to one; slots are cleared after their last use. Anything unsupported makes a signature unrecordable, and the
function runs as written: tensors of unknown origin, results other than tensors, one tensor passed twice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels.runtime import host_state
from octavo.kernels.runtime.dispatch import PLAIN, launches_on_current
from octavo.kernels.runtime.host_state import has_launch_hooks

CAPACITY = 4096
"""Maximum number of signatures, evicted first-in, first-out."""

Result = tuple[Sequence[Tensor | None], ...]
_aten = torch.ops.aten


class Unrecordable(Exception):
    """A function made a call that cannot be recorded as a step."""


class Step(NamedTuple):
    """One allocation, operator call or launch."""

    call: Callable[..., Any]
    arguments: Callable[[list[Any]], Sequence[Any]]
    """Reads the arguments from the slots."""
    outputs: tuple[int, ...] | int | None
    """Slot of the result, slots of a list of results, or None for a launch."""
    finished: tuple[int, ...]
    """Slots to clear: no later step reads them."""


class Recording(NamedTuple):
    """Calls of a function for tensors of one signature."""

    slots: list[Any]
    """Initial values of the slots after inputs and stream: constants, and None for results of steps."""
    steps: list[Step]
    results: tuple[Callable[[list[Any]], Sequence[Any]], ...]
    holds: Any
    """Objects whose `id` is in the signature, kept alive so that ids stay unique."""

    def replay(self, tensors: Sequence[Tensor | None], stream: int) -> Result:
        """Repeat the calls on other tensors, launching on `stream`."""
        slots = [*tensors, stream, *self.slots]
        for call, arguments, outputs, finished in self.steps:
            value = call(*arguments(slots))
            if isinstance(outputs, int):
                slots[outputs] = value
            elif outputs is not None:
                for slot, part in zip(outputs, value, strict=True):
                    slots[slot] = part
            for slot in finished:
                slots[slot] = None
        return tuple([result(slots) for result in self.results])


_recordings: OrderedDict[tuple[Any, ...], Recording | Literal["seen", "unrecordable"]] = OrderedDict()
"""By signature."""
_thread = threading.local()


def replay(function: Callable[..., Result], options: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> Result:
    """Return `function(options, *tensors)`, replayed from a recording if there is one.

    Args:
        function: computes its results from the tensors only, by PyTorch operators and launches (`launch.Kernel`), in
            the same order for tensors of the same shapes, strides, dtypes and alignments, under the same accumulator
            (`gemm_by`). Returns groups of tensors and None.
        options: all other arguments. Recipes and other objects are compared by identity.
    """
    first = None
    for first in tensors:  # no generators in what runs for each layer: they are calls, too
        if first is not None:
            break
    if first is None or not _is_launched_here(first):
        return function(options, *tensors)
    device, kind = first.get_device(), first.device.type
    key = _signature(function, (*options, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)), tensors)
    if key is None:
        return function(options, *tensors)
    recording = _recordings.get(key)
    if not isinstance(recording, Recording):
        return _run_or_record(recording, key, function, options, tensors)
    stream = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0
    if not torch.is_autocast_enabled(kind):
        return recording.replay(tensors, stream)
    torch.set_autocast_enabled(kind, False)  # the recording includes the casts
    try:
        return recording.replay(tensors, stream)
    finally:
        torch.set_autocast_enabled(kind, True)


def _is_launched_here(x: Tensor) -> bool:
    """Return whether kernels on x are launches on the current GPU."""
    return x.is_cuda and launches_on_current(x)


def _signature(
    function: Callable[..., Result], options: tuple[Any, ...], tensors: Sequence[Tensor | None]
) -> tuple[Any, ...] | None:
    """Return what decides which launches a call makes; None if it cannot be recorded.

    It can if all are plain tensors, with no compiler, mode, hook or ledger active.
    """
    state = host_state.now
    if torch.compiler.is_compiling() or state.ledgers or state.planning or state.fake or has_launch_hooks():
        return None
    if torch._C._len_torch_dispatch_stack():
        return None
    key: list[Any] = [function, state.accumulator]
    for option in options:
        key.append(option if option is None or isinstance(option, _BY_VALUE) else id(option))
    for x in tensors:
        if x is None:
            key.append(None)
        elif type(x) in PLAIN:  # the metadata that a host function may depend on
            key.append((x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.get_device()))
        else:
            return None
    return tuple(key)


_BY_VALUE = (int, float, str, tuple, torch.dtype)


def _run_or_record(
    state: str | None,
    key: tuple[Any, ...],
    function: Callable[..., Result],
    options: tuple[Any, ...],
    tensors: Sequence[Tensor | None],
) -> Result:
    """Run a function, and record it at the second call with a signature."""
    if state == "seen":
        results, recorder = _recorded(function, options, tensors)
        again: Literal["seen", "unrecordable"] = "seen" if recorder.is_postponed else "unrecordable"
        _recordings[key] = recorder.finish(results, (options, function)) or again
        return results
    if state is None:
        _recordings[key] = "seen"
        if len(_recordings) > CAPACITY:
            _recordings.popitem(last=False)
    return function(options, *tensors)


def record(
    function: Callable[..., Result], options: tuple[Any, ...], tensors: Sequence[Tensor | None]
) -> tuple[Result, Recording | None]:
    """Run a function; return its results and the recording, or None if it cannot be replayed."""
    results, recorder = _recorded(function, options, tensors)
    return results, recorder.finish(results, (options, function))


def _recorded(
    function: Callable[..., Result], options: tuple[Any, ...], tensors: Sequence[Tensor | None]
) -> tuple[Result, _Recorder]:
    """Run a function under a recorder."""
    recorder = _Recorder(tensors)
    before = recorder_here()
    _thread.recorder = recorder
    try:
        with recorder:
            results = function(options, *tensors)
    finally:
        _thread.recorder = before
    return results, recorder


def recorder_here() -> _Recorder | None:
    """Return the active recorder of this thread, or None; launches report to it."""
    return getattr(_thread, "recorder", None)


class _Recorder(TorchDispatchMode):
    """Records the steps of a function as it runs."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = len(tensors)
        self.slots: list[Any] = []
        self.steps: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...] | int | None]] = []
        self.alive: list[Any] = list(tensors)
        self.known = {id(x): i for i, x in enumerate(tensors) if x is not None}
        self.refused = len(self.known) < sum(x is not None for x in tensors)
        self.is_postponed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        try:
            self._operator(func, args, kwargs, result)
        except Unrecordable:
            self.refused = True
        return result

    def launch(self, kernel: tuple[Any, Any, Any], grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Record a launch of a compiled kernel."""
        call, function, metadata = kernel
        try:
            head = [*map(self._constant, grid), self.inputs]  # the stream is the slot after the inputs
            tail = [self._constant(x) for x in (function, metadata, None, None, None)]
            self.steps.append((call, (*head, *tail, *map(self._slot, arguments)), None))
        except Unrecordable:
            self.refused = True

    def refuse(self) -> None:
        """Mark the recording as not replayable."""
        self.refused = True

    def postpone(self) -> None:
        """Refuse, and let a later call record: this one has left out launches that others need."""
        self.refused = self.is_postponed = True

    def finish(self, results: Result, holds: Any) -> Recording | None:
        """Return the recording, with slots cleared after their last use."""
        try:
            groups = [tuple(self._slot(x) for x in group) for group in results]
        except Unrecordable:
            return None
        if self.refused:
            return None
        last: dict[int, int] = {}
        for number, (_, arguments, outputs) in enumerate(self.steps):
            written = (outputs,) if isinstance(outputs, int) else outputs or ()
            last |= dict.fromkeys((*arguments, *written), number)
        returned = {slot for group in groups for slot in group}
        temporary = {slot for slot in last if slot > self.inputs and self.slots[slot - self.inputs - 1] is None}
        ends: dict[int, list[int]] = {}
        for slot in temporary - returned:
            ends.setdefault(last[slot], []).append(slot)
        steps = [
            Step(call, _slot_reader(arguments), outputs, tuple(ends.get(number, ())))
            for number, (call, arguments, outputs) in enumerate(self.steps)
        ]
        return Recording(self.slots, steps, tuple(map(_slot_reader, groups)), holds)

    def _operator(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if func is _aten.detach.default and not args[0]._is_view():  # autograd refuses writes to undetached views
            self.known[id(result)] = self._slot(args[0])
            self.alive.append(result)
            return
        if func in _ALLOCATIONS:
            sizes = tuple(result.shape), result.stride()
            call: Any = partial(torch.empty_strided, *sizes, dtype=result.dtype, device=result.device)
            self.steps.append((call, (), self._new(result)))
            return
        if any(isinstance(x, Tensor) for x in kwargs.values()):
            raise Unrecordable
        call = _FAST.get(func, func)
        if any(isinstance(x, list | tuple) and any(isinstance(y, Tensor) for y in x) for x in args):
            call = partial(_regrouped, call, tuple(len(x) if isinstance(x, list | tuple) else None for x in args))
            args = [y for x in args for y in (x if isinstance(x, list | tuple) else [x])]
        slots = tuple([self._slot(x) for x in args])
        self.steps.append((partial(call, **kwargs) if kwargs else call, slots, self._outputs(result)))

    def _outputs(self, result: Any) -> tuple[int, ...] | int | None:
        if isinstance(result, Tensor):
            return self._new(result)
        if isinstance(result, list | tuple) and result and all(isinstance(x, Tensor) for x in result):
            return tuple(self._new(x) for x in result)
        raise Unrecordable

    def _new(self, tensor: Tensor) -> int:
        """Return the slot of a step's result; for an in-place operator, that of its argument."""
        if id(tensor) not in self.known:
            self.known[id(tensor)] = self._add(None)
            self.alive.append(tensor)
        return self.known[id(tensor)]

    def _slot(self, x: Any) -> int:
        if type(x).__name__ == "TensorDescriptor":
            return self._described(x)
        if not isinstance(x, Tensor):
            return self._constant(x)
        if id(x) not in self.known:
            raise Unrecordable
        return self.known[id(x)]

    def _described(self, x: Any) -> int:
        """Record that a descriptor of Triton's is made, as x is, of the tensor that its base will be."""
        self.steps.append((partial(_descriptor, _descriptor(x, None)), (self._slot(x.base),), self._add(None)))
        return self.inputs + len(self.slots)

    def _constant(self, x: Any) -> int:
        self.alive.append(x)
        return self._add(x)

    def _add(self, value: Any) -> int:
        self.slots.append(value)
        return self.inputs + len(self.slots)


_ALLOCATIONS = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.new_empty.default)
_FAST: dict[Any, Callable[..., Any]] = {
    _aten._scaled_mm.default: torch._scaled_mm,
    _aten.mm.default: torch.mm,
    _aten.t.default: Tensor.t,
    _aten.view.default: Tensor.view,
    _aten.view.dtype: Tensor.view,
    _aten.split_with_sizes.default: Tensor.split_with_sizes,
    _aten.expand.default: Tensor.expand,
    _aten.clone.default: Tensor.clone,
    _aten.detach.default: Tensor.detach,
    _aten.copy_.default: Tensor.copy_,
    _aten.reciprocal.default: Tensor.reciprocal,
    _aten.new_ones.default: Tensor.new_ones,
    _aten.zeros.default: torch.zeros,
}
"""Python bindings with a fraction of the call overhead of `torch.ops`."""


def _descriptor(like: Any, base: Tensor | None) -> Any:
    """Return a descriptor as another, of a tensor of the same shape, strides and alignment.

    Not by `copy`, which takes nine times as long, three times per GEMM.
    """
    made = object.__new__(type(like))
    vars(made).update(vars(like), base=base)
    return made


def _regrouped(call: Callable[..., Any], lengths: tuple[int | None, ...], *flat: Any, **options: Any) -> Any:
    """Call an operator on lists rebuilt from flat elements."""
    rest = iter(flat)
    arguments = [next(rest) if n is None else [next(rest) for _ in range(n)] for n in lengths]
    return call(*arguments, **options)


def _slot_reader(slots: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a function that reads these slots: one of C, since a replay calls it for each step."""
    if len(slots) > 1:
        return itemgetter(*slots)
    return itemgetter(slice(slots[0], slots[0] + 1) if slots else slice(0))
