"""Telemetry that is always on: what FP8 does to the operands of every layer, in one buffer on the device.

    telemetry = Telemetry(model)
    ...train: every optimizer step closes a step of telemetry...
    while (taken := telemetry.snapshot()) is not None:
        step, values = taken            # float32 (len(telemetry.rows), len(STATS))

Each GEMM that reads an operand in FP8 also looks at a sample of it (`octavo.kernels.sample`): in eager mode, in
compiled code and in CUDA graphs, which keep the addresses of the buffer. Values are those of the last micro-batch of a
step, amax and nonfinite the largest of all. Nothing ever waits for the device: a copy to pinned memory is queued beside
the training, and read when it has arrived.
"""

from __future__ import annotations

import weakref
from collections import deque
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from octavo.errors import ConfigError
from octavo.kernels.sample import PHASE, SAMPLED, STATS, WIDTH
from octavo.nn.fused import FusedMLP
from octavo.nn.grouped import GroupedLinear
from octavo.nn.linear import Linear
from octavo.nn.own_codes import has_codes
from octavo.nn.watched import Watch

__all__ = ["STATS", "Row", "Telemetry"]

WAITING = 8
"""Steps whose values wait to be read; older ones are dropped."""

Snapshot = tuple[int, NDArray[np.float32]]


class Row(NamedTuple):
    """What a row of a snapshot is about."""

    layer: str
    """The full name of the layer."""
    role: str
    """`input`, `weight` or `grad_output`."""
    operand: str
    """How it is quantised: for fprop, and a gradient for dgrad."""
    shape: tuple[int, ...]
    """Of a weight; empty where it follows the batch."""


class Telemetry:
    """Watches the FP8 linear layers of a model from now on. `detach` ends it; it is a context manager too.

    Args:
        model: converted, and on its device: its layers keep the addresses of this buffer.
        every: look at each step whose number this divides. In others nothing is read and there are no snapshots.

    Raises:
        ConfigError: `every` is not positive, the layers lie on several devices, or telemetry watches them already.
    """

    rows: tuple[Row, ...]
    """What the rows of a snapshot are about; those of layers that never ran in a step are NaN there."""
    not_watched: tuple[str, ...]
    """FP8 layers that are not looked at: experts, convolutions, those whose weight is an FP8 tensor."""
    done: int
    """Optimizer steps made. Set it when a run is resumed."""
    sampled: NDArray[np.float32]
    """How many elements the shares of the snapshot that was returned last are of, one a row. A share p of n has a
    standard error of about sqrt(p (1 - p) / n), more where rows differ."""

    def __init__(self, model: nn.Module, every: int = 1) -> None:
        if every < 1:
            raise ConfigError(f"Telemetry(every={every}): it must be a positive number of steps.")
        self.every, self.done = every, 0
        layers, self.not_watched = _find(model)
        names = {id(layer): name for name, layer in layers.items()}
        groups = _groups(model, layers)
        self._layers = [layer for group in groups for layer in group]
        device = _device(layers)
        total = sum(1 + 2 * len(group) for group in groups)
        with torch.inference_mode(False):  # it is written to outside of it too
            self._buffer = torch.full((total, WIDTH), torch.nan, device=device)
        self.sampled = np.zeros(0, dtype=np.float32)
        places: list[tuple[Row, int]] = []
        top = 0
        for group in groups:
            watch = Watch(self._buffer[top : top + 1 + 2 * len(group)], len(group))
            for number, layer in enumerate(group):
                layer.watch = watch
                places += _rows(names[id(layer)], layer, top, number, len(group))
            top += len(watch.page)
        order = {name: number for number, name in enumerate(layers)}
        places.sort(key=lambda place: order[place[0].layer])  # stable: roles stay in their order
        self.rows = tuple(row for row, _ in places)
        self._places = np.array([place for _, place in places], dtype=np.int64)
        self._coming: deque[_Coming] = deque(maxlen=WAITING)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and layers else None
        self._begin()
        _live.add(self)

    def step(self) -> None:
        """Close a step: hand its values on, and choose what the next one looks at. An optimizer's step calls it.

        Call it yourself where a CUDA graph holds the optimizer's step, or the optimizer has none of the weights.
        """
        if self._buffer.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self.done += 1
        if self.done % self.every == 0 and len(self._buffer):
            self._coming.append(_Coming(self.done, self._buffer.detach().clone(), self._stream))
        self._begin()

    def snapshot(self) -> Snapshot | None:
        """Return the oldest step whose values have arrived and were not returned yet, with them; None: there is none.

        Never waits. Values are float32 (len(rows), len(STATS)), NaN where a tensor was not looked at.
        """
        if not self._coming or not self._coming[0].has_arrived():
            return None
        coming = self._coming.popleft()
        values = coming.host.numpy()[self._places]
        self.sampled = values[:, SAMPLED]
        return coming.step, values[:, : len(STATS)]

    def wait(self) -> None:
        """Wait until all steps that were made have arrived: at the end of a run."""
        for coming in self._coming:
            coming.wait()

    def detach(self) -> None:
        """Stop watching. The layers are as before; values that have arrived can still be read."""
        for layer in self._layers:
            layer.__dict__.pop("watch", None)
        _live.discard(self)

    def belongs_to(self, parameters: set[int]) -> bool:
        """Return whether the first weight that is watched is among these (`id`): of several optimizers one counts."""
        return bool(self._layers) and id(self._layers[0].weight) in parameters

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _begin(self) -> None:
        """Forget the values, and say which rows of its tensors the next step looks at."""
        number = self.done + 1
        values = self._buffer.data  # no versions count: compiled code may hold it for a backward
        values.fill_(torch.nan)
        values[:, PHASE] = float(-1 if number % self.every else _phase(number))


class _Coming:
    """The values of one step on their way from the device."""

    def __init__(self, step: int, values: Tensor, stream: torch.cuda.Stream | None) -> None:
        self.step, self._values, self._copied = step, values, None
        self.host = values
        if stream is None:
            return
        self.host = torch.empty(values.shape, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(values.device))
        with torch.cuda.stream(stream):
            self.host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(stream)
        values.record_stream(stream)

    def has_arrived(self) -> bool:
        return self._copied is None or self._copied.query()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()


def _phase(step: int) -> int:
    """Return a number below 2^23 that looks random: Knuth's multiplicative hash, its upper bits."""
    return (step * 2654435761 % 2**32) >> 9


def _find(model: nn.Module) -> tuple[dict[str, Linear], tuple[str, ...]]:
    """Return the layers to watch by name, and the names of FP8 layers that nothing looks at."""
    found: dict[str, Linear] = {}
    left: list[str] = []
    for name, module in model.named_modules():
        recipe = getattr(module, "recipe", None)
        if recipe is None or not getattr(recipe, "is_fp8", False) or not isinstance(module, nn.Module):
            continue
        if isinstance(module, Linear) and recipe.fprop.is_fp8 and not has_codes([module.weight]):
            found[name] = module
        elif isinstance(module, Linear | GroupedLinear) or hasattr(module, "weight"):
            left.append(name)
    return found, tuple(left)


def _groups(model: nn.Module, layers: dict[str, Linear]) -> list[list[Linear]]:
    """Return the layers by what is computed together: all that share an input, gate and up of an MLP, the rest alone.

    Raises:
        ConfigError: a layer is watched already.
    """
    for name, layer in layers.items():
        if layer.watch is not None:
            raise ConfigError(f"telemetry watches '{name}' already: detach that before you make another.")
    watched = {id(layer) for layer in layers.values()}
    together: list[list[Any]] = []
    for module in model.modules():
        if isinstance(module, FusedMLP):
            together.append([module.get_submodule(name) for name in module.mlp_roles.inner])
    together += [list(layer.shared.layers) for layer in layers.values() if layer.shared is not None]
    together += [[layer] for layer in layers.values()]
    groups, placed = [], set[int]()
    for group in together:
        members = {id(layer) for layer in group}
        if members <= watched and not members & placed:
            groups.append(group)
            placed |= members
    return groups


def _rows(name: str, layer: Linear, top: int, number: int, members: int) -> list[tuple[Row, int]]:
    """Return what is known of a layer, and where in the buffer. Gradients that no GEMM reads in FP8 have no row."""
    recipe = layer.recipe
    rows = [
        (Row(name, "input", str(recipe.fprop.input), ()), top),
        (Row(name, "weight", str(recipe.fprop.weight), tuple(layer.weight.shape)), top + 1 + number),
    ]
    if recipe.dgrad.is_fp8:
        rows.append((Row(name, "grad_output", str(recipe.dgrad.grad_output), ()), top + 1 + members + number))
    return rows


def _device(layers: dict[str, Linear]) -> torch.device:
    devices = {layer.weight.device for layer in layers.values()}
    if len(devices) > 1:
        raise ConfigError(f"telemetry is of one device, and the layers lie on {', '.join(map(str, devices))}.")
    return next(iter(devices), torch.device("cpu"))


_live: weakref.WeakSet[Telemetry] = weakref.WeakSet()


def _stepped(optimizer: Optimizer, *_: Any) -> None:
    if not _live:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for telemetry in list(_live):
        if telemetry.belongs_to(stepped):
            telemetry.step()


register_optimizer_step_post_hook(_stepped)
