"""Replay of what a function launched, without running its Python again.

On small layers eager FP8 waits for Python: between two launches there is more of it than the GPU needs for a kernel. A
function that only launches kernels and calls PyTorch's operators does the same for tensors of the same shapes. `replay`
runs such a function when it first meets a signature, records it the second time, and from then on allocates, launches
and calls what was recorded, on new tensors. Nothing is captured: it is eager execution, on any stream, also into a CUDA
graph.

A recording consists of slots and steps. A step takes its arguments from slots, tensors as well as constants, and puts
its result into one; a slot is cleared after its last use. Whatever is not understood makes a signature unrecordable,
and the function runs as written: tensors of unknown origin, results that are no tensors, one tensor passed twice.
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

from octavo.kernels import ledger
from octavo.kernels.dispatch import PLAIN, has_launch_hooks, is_planning, launches_on_current

CAPACITY = 4096
"""Signatures kept; the one met first goes first."""

Result = tuple[Sequence[Tensor | None], ...]
_aten = torch.ops.aten


class Unrecordable(Exception):
    """A function did something that a recording has no step for."""


class Step(NamedTuple):
    """One allocation, operator call or launch."""

    call: Callable[..., Any]
    arguments: Callable[[list[Any]], tuple[Any, ...]]
    """Takes them from the slots."""
    outputs: tuple[int, ...] | int | None
    """The slot of a result, those of a list of results, or None for a launch."""
    finished: tuple[int, ...]
    """Slots that no later step reads."""


class Recording(NamedTuple):
    """What a function did for tensors of one signature."""

    slots: list[Any]
    """Initial values of all slots after the inputs: constants, and None for what steps make."""
    steps: list[Step]
    results: tuple[Callable[[list[Any]], tuple[Any, ...]], ...]
    holds: Any
    """What must stay alive, so that its `id` in the signature names nothing else."""

    def replay(self, tensors: Sequence[Tensor | None], stream: int) -> Result:
        """Do the same with other tensors, launching on a stream."""
        slots = [*tensors, stream, *self.slots]
        for call, arguments, outputs, finished in self.steps:
            made = call(*arguments(slots))
            if isinstance(outputs, int):
                slots[outputs] = made
            elif outputs is not None:
                for slot, part in zip(outputs, made, strict=True):
                    slots[slot] = part
            for slot in finished:
                slots[slot] = None
        return tuple(result(slots) for result in self.results)


_recordings: OrderedDict[tuple[Any, ...], Recording | Literal["met", "unrecordable"]] = OrderedDict()
"""By signature."""
_thread = threading.local()


def replay(function: Callable[..., Result], options: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> Result:
    """Return `function(options, *tensors)`, from a recording where there is one.

    Args:
        function: makes its results from the tensors alone, by PyTorch's operators and by launches (`launch.Kernel`),
            in the same order for tensors of the same shapes, strides, dtypes and alignments. Its results are groups of
            tensors and None.
        options: everything else that it depends on. Recipes and other objects are compared by identity.
    """
    if not _is_recordable(tensors):
        return function(options, *tensors)
    first = next(x for x in tensors if x is not None)
    device, kind = first.get_device(), first.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    key = (function, *map(_key_of, options), device, autocast, *map(_facts_of, tensors))
    recording = _recordings.get(key)
    if not isinstance(recording, Recording):
        return _first_runs(recording, key, function, options, tensors)
    stream = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0
    if autocast is None:
        return recording.replay(tensors, stream)
    torch.set_autocast_enabled(kind, False)  # the recording has its casts
    try:
        return recording.replay(tensors, stream)
    finally:
        torch.set_autocast_enabled(kind, True)


def _is_recordable(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether these are plain tensors of one GPU that nothing but the kernels looks at."""
    if torch.compiler.is_compiling() or ledger.is_open() or is_planning() or has_launch_hooks():
        return False
    first = next((x for x in tensors if x is not None), None)
    if first is None or not first.is_cuda or not launches_on_current(first):
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and all(x is None or type(x) in PLAIN for x in tensors)


def _key_of(option: Any) -> Any:
    return option if option is None or isinstance(option, _BY_VALUE) else id(option)


_BY_VALUE = (int, float, str, tuple, torch.dtype)


def _facts_of(x: Tensor | None) -> Any:
    """Return what of a tensor a host function may depend on."""
    return x if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.get_device())


def _first_runs(
    state: str | None,
    key: tuple[Any, ...],
    function: Callable[..., Result],
    options: tuple[Any, ...],
    tensors: Sequence[Tensor | None],
) -> Result:
    """Run a function; the second time that a signature is met, record it."""
    if state == "met":
        results, recording = record(function, options, tensors)
        _recordings[key] = recording or "unrecordable"
        return results
    if state is None:
        _recordings[key] = "met"
        if len(_recordings) > CAPACITY:
            _recordings.popitem(last=False)
    return function(options, *tensors)


def record(
    function: Callable[..., Result], options: tuple[Any, ...], tensors: Sequence[Tensor | None]
) -> tuple[Result, Recording | None]:
    """Run a function, and return its results and what it did; None where that cannot be replayed."""
    recorder = _Recorder(tensors)
    before = recorder_here()
    _thread.recorder = recorder
    try:
        with recorder:
            results = function(options, *tensors)
    finally:
        _thread.recorder = before
    return results, recorder.finish(results, (options, function))


def recorder_here() -> _Recorder | None:
    """Return the recorder of this thread, while a function is recorded: a launch tells it what it does."""
    return getattr(_thread, "recorder", None)


class _Recorder(TorchDispatchMode):
    """Collects the steps of a function while it runs."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.inputs = len(tensors)
        self.slots: list[Any] = []
        self.steps: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...] | int | None]] = []
        self.alive: list[Any] = list(tensors)
        self.known = {id(x): i for i, x in enumerate(tensors) if x is not None}
        self.refused = len(self.known) < sum(x is not None for x in tensors)

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
        """Note that something cannot be replayed."""
        self.refused = True

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
            made = (outputs,) if isinstance(outputs, int) else outputs or ()
            last |= dict.fromkeys((*arguments, *made), number)
        returned = {slot for group in groups for slot in group}
        temporary = {slot for slot in last if slot > self.inputs and self.slots[slot - self.inputs - 1] is None}
        ends: dict[int, list[int]] = {}
        for slot in temporary - returned:
            ends.setdefault(last[slot], []).append(slot)
        steps = [
            Step(call, _getter(arguments), outputs, tuple(ends.get(number, ())))
            for number, (call, arguments, outputs) in enumerate(self.steps)
        ]
        return Recording(self.slots, steps, tuple(map(_getter, groups)), holds)

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
        """Return the slot of a tensor that a step gives: an in-place operator gives its argument."""
        if id(tensor) not in self.known:
            self.known[id(tensor)] = self._add(None)
            self.alive.append(tensor)
        return self.known[id(tensor)]

    def _slot(self, x: Any) -> int:
        if not isinstance(x, Tensor):
            return self._constant(x)
        if id(x) not in self.known:
            raise Unrecordable
        return self.known[id(x)]

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
"""Python bindings that take the arguments of an operator in a fraction of the time that `torch.ops` takes."""


def _regrouped(call: Callable[..., Any], lengths: tuple[int | None, ...], *flat: Any, **options: Any) -> Any:
    """Call an operator that takes lists, given their elements."""
    rest = iter(flat)
    arguments = [next(rest) if n is None else [next(rest) for _ in range(n)] for n in lengths]
    return call(*arguments, **options)


def _getter(slots: tuple[int, ...]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return what takes the values of these slots."""
    if not slots:
        return _nothing
    if len(slots) == 1:
        return partial(_one, slots[0])
    return itemgetter(*slots)


def _nothing(slots: list[Any]) -> tuple[Any, ...]:
    return ()


def _one(slot: int, slots: list[Any]) -> tuple[Any, ...]:
    return (slots[slot],)
