"""Every process-wide switch that changes what kernels compute or launch: one frozen value, `host_state.now`.

Read it as an attribute of this module, which `update` replaces: a name imported from here would keep an old value.

A cache or a guard whose result depends on a switch reads it here: the key of a recording (`tape.replay`), the caches of
`dispatch.triton_unsupported_reason` and `gemm.choose`, and compiled code, which guards on
`HostState.is_open_to_compilers`, and where it has norms on `fake`.

Process-wide and not per thread: autograd runs backward in threads of its own, which do not inherit context variables.

Launch hooks (`has_launch_hooks`) are Triton's own switch: read where it is set, never copied.

What else a process keeps are registries and caches, which change no result (`tests/test_layers.py` has the list):

    kernels.tape._recordings, _thread              recorded launches by signature; the recorder of a thread
    kernels.gemm._choices                          kernels chosen for operands, by all that the choice reads
    kernels.sample._idle                           telemetry buffers of which no row is sampled
    kernels.ledger._warned                         warnings that were logged already
    nn.shared._steps, _this_thread                 number of optimizer steps; the last input with pending outputs
    nn.scaling_state._live, nn.telemetry._live     states that an optimizer's step updates
    conversion.autocast_mode._blocks               open `octavo.autocast` blocks of a thread
    conversion.first_step._WAITING, nn.first_call._OPEN    layers that have not computed yet, to be named after a step
    nn.switch._open, _switching                    open `octavo.disabled` blocks per module, and their lock
    _util.collector._capturing                     the lock of the thread that captures a CUDA graph
    _util.optimizer_steps._callbacks, _inner       what runs after the outermost optimizer's step; steps within it
    nn.seal._marking                               a lock around the seal of a tensor
    nn.weight_notes._KINDS                         kinds of notes on weights
    recipes.operands._plans                        plans of recipes, by their text
    nn.adopted._CLASSES, _util.compiler, distributed.checkpoint    classes, traces, groups
    kernels.runtime.operation._operations          operations by the names of their operators

Two hooks run after every optimizer step: that of nn.shared, and `_util.optimizer_steps` for nn.scaling_state and
nn.telemetry.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from octavo.kernels.runtime.ledger import Ledger


class HostState(NamedTuple):
    """The switches. Their defaults are those of a process in which nobody has changed any."""

    accumulator: str = ""
    """Name in `gemm.ACCUMULATORS` of the accumulator of every FP8 GEMM (`gemm_by`); empty: as the recipe says."""
    ledgers: tuple[Ledger, ...] = ()
    """Open ledgers (`ledger.record`), which count every GEMM."""
    planning: str | None = None
    """GPU of `devices.GPUS` to report support for (`dispatch.planning_for`); None: the present one."""
    fake: bool = False
    """Whether tensors without data count as being on a GPU (`dispatch.fake_mode`)."""
    warming_up: bool = False
    """Whether kernels are launched for idle telemetry buffers too (`sample.warm_up`)."""
    held_warnings: tuple[list[str], ...] = ()
    """Lists that collect warnings instead of the log (`ledger.hold_warnings`), the innermost last."""
    is_open_to_compilers: bool = True
    """Whether compiled code may launch kernels itself: no accumulator is set and no ledger open. Follows from these,
    and is stored so that compiled code has one guard, on one boolean."""


now = HostState()
"""The switches as they are now."""
_lock = threading.Lock()


def update(change: Callable[[HostState], HostState]) -> None:
    """Replace the switches by what `change` returns for them, with no other thread in between."""
    global now
    with _lock:
        state = change(now)
        now = state._replace(is_open_to_compilers=not (state.accumulator or state.ledgers))


@contextmanager
def switched(**switches: Any) -> Iterator[None]:
    """Set fields of the host state inside the block, in every thread, and restore these fields after it."""
    before = {name: getattr(now, name) for name in switches}
    update(lambda state: state._replace(**switches))
    try:
        yield
    finally:
        update(lambda state: state._replace(**before))


def has_launch_hooks() -> bool:
    """Return whether Triton has launch hooks, such as those of a profiler."""
    knobs = sys.modules.get("triton.knobs")
    hook = None if knobs is None else knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook is not None))
