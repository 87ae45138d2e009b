"""Permanent telemetry: the effect of FP8 on the operands of every layer, in one buffer on the device.

    telemetry = Telemetry(model)
    ...train: every optimizer step closes a step of telemetry...
    while (taken := telemetry.snapshot()) is not None:
        step, values = taken            # float32 (len(telemetry.rows), len(STATS))

Each GEMM that reads an operand in FP8 also reads a sample of it (`octavo.kernels.sample`): in eager mode, in compiled
code and in CUDA graphs, which keep the addresses of the buffer. Values are those of the last micro-batch of a step;
amax and nonfinite are the largest of all. Gradients of weights are sampled after the optimizer's step. Nothing waits
for the device: a copy to pinned memory is queued beside training, and read when it has arrived.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from octavo._util.optimizer_steps import after_outermost_step
from octavo.errors import ConfigError, UnsupportedError
from octavo.kernels.runtime.transfers import AsyncHostCopy
from octavo.kernels.sample import BINS, DETAILED, PHASE, SAMPLED, STATS, WIDTH, mark_idle
from octavo.nn.fused import fusion_groups
from octavo.nn.telemetry_ops import StatsSlot
from octavo.nn.telemetry_ranks import Gathering, RankMerger, RankRows
from octavo.nn.telemetry_rows import Layer, Row, find, rows_of, sample_gradient, weights_of

__all__ = ["STATS", "Row", "Telemetry"]

WAITING = 8
"""Number of steps whose values are kept until they are read; older ones are dropped."""
PATIENCE = 10.0
"""Seconds that `Telemetry.wait` waits for other ranks: the values of a failed one never arrive."""
_OF_QUANTISING = [STATS.index(name) for name in ("scale", "flushed", "subnormal", "saturated", "sqnr")]
"""Statistics without meaning for a tensor that is not quantised."""
_LOST = [STATS.index(name) for name in ("flushed", "saturated", "sqnr")]
"""Statistics that codes alone do not give."""

Snapshot = tuple[int, NDArray[np.float32]]


class Telemetry:
    """Statistics of the FP8 layers of a model, from now on. `detach` ends it; it is a context manager too.

    Args:
        model: converted, and on its device: its layers keep the addresses of this buffer.
        every: measures each step whose number this divides. In others nothing is read and there are no snapshots.
        histograms_every: also measures each step whose number this divides, there with `sqnr` and the exponents
            (`histograms`); 0: never. In all other steps `sqnr` is NaN.
        group: ranks that train the same model on parts of a batch, or each a stage of it. Each of them creates such a
            telemetry and makes the same steps; rows are then those of all ranks, with equal values. Use a separate
            group, so that its collectives and those of training do not wait for each other. By default this process
            alone.
        order: names of the layers of the whole model in order, if ranks have different layers.

    Raises:
        ConfigError: `every` is not positive, the layers are on several devices, or another telemetry measures them.
    """

    rows: tuple[Row, ...]
    """Meaning of the rows of a snapshot; those of layers that did not run in a step are NaN there."""
    not_watched: dict[str, str]
    """FP8 layers that are not measured, and why."""
    sampled: NDArray[np.float32]
    """Number of sampled elements per row of the last snapshot. A share p of n has a standard error of about sqrt(p (1 -
    p) / n), more if rows differ."""
    histograms: NDArray[np.float32] | None
    """Exponents in the last snapshot: (len(rows), BINS) sampled elements by exponent, as the format sees them
    (`octavo.kernels.sample`), NaN for tensors that were not measured. None for a step without."""

    def __init__(
        self,
        model: nn.Module,
        every: int = 1,
        *,
        histograms_every: int = 0,
        group: dist.ProcessGroup | None = None,
        order: Sequence[str] = (),
    ) -> None:
        if every < 1 or histograms_every < 0:
            given = f"every={every}, histograms_every={histograms_every}"
            raise ConfigError(f"Telemetry({given}): every must be a positive number of steps, the other not negative.")
        self.every, self.histograms_every, self._done = every, histograms_every, 0
        layers, self.not_watched = find(model)
        device = _device(model, layers)
        self._model, self._layers = model, list(layers.values())
        places = self._lay_out(model, layers, device)
        coded = {row for row in places if row.role == "input" and getattr(layers[row.layer], "reads_codes", False)}
        own = RankRows({row: number for number, row in enumerate(places)}, len(places), coded, self.not_watched)
        self._merger = None if group is None else RankMerger(own, group, order, device)
        self.rows = tuple(places)
        self._places = torch.tensor([*places.values()], dtype=torch.int64, device=device).reshape(-1, 2).t()
        if self._merger is not None:
            self.rows, self.not_watched, coded = self._merger.rows, self._merger.not_watched, self._merger.coded
        self._coded = [number for number, row in enumerate(self.rows) if row in coded]
        self.sampled, self.histograms = np.zeros(0, dtype=np.float32), None
        self._coming: deque[tuple[int, AsyncHostCopy | Gathering]] = deque(maxlen=WAITING)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and self.rows else None
        self._was_launched = False
        """Whether a step has launched the kernels, so that a capture finds them loaded."""
        self._begin()
        _live.add(self)

    @property
    def done(self) -> int:
        """Number of optimizer steps made. Set it when a run is resumed, before its first step."""
        return self._done

    @done.setter
    def done(self, steps: int) -> None:
        self._done = steps
        self._begin()  # the next step may be one that is measured, or is not

    def step(self) -> None:
        """Close a step: send its values, and choose the sample of the next one. An optimizer's step calls it.

        Call it yourself if a CUDA graph contains the optimizer's step, or the optimizer has no parameter of the model:
        before the gradients are dropped, which are sampled here.
        """
        if self._buffer.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._done += 1
        looks, detailed = self._wants(self.done)
        if looks and self.rows:
            for layer, row in zip(self._layers, self._of_gradients, strict=True):
                sample_gradient(layer, self._one, row)
            values = self._buffer.data if detailed else self._buffer.data[:, :WIDTH]
            self._coming.append((self.done, self._send(values)))
        self._was_launched = True
        self._begin()

    def snapshot(self) -> Snapshot | None:
        """Return the oldest step that has arrived and was not returned yet, with its values; otherwise None.

        Never waits. Values are float32 (len(rows), len(STATS)), NaN for tensors that were not measured.
        """
        if not self._coming or not self._coming[0][1].has_arrived():
            return None
        step, coming = self._coming.popleft()
        found = coming.result().numpy().copy()
        self.sampled = found[:, SAMPLED]
        self.histograms = found[:, WIDTH:] if found.shape[1] > WIDTH else None
        values = found[:, : len(STATS)]
        plain = [number for number, row in enumerate(self.rows) if not row.operand]
        values[np.ix_(plain, _OF_QUANTISING)] = np.nan
        values[np.ix_(self._coded, _LOST)] = np.nan  # in compiled code the sampled values are those of the codes
        return step, values

    def is_coming(self, step: int) -> bool:
        """Return True if `snapshot` will return the values of a step, now or once they have arrived."""
        return any(sent == step for sent, _ in self._coming)

    def wait(self) -> None:
        """Wait at the end of a run until all values have arrived, those of a failed rank at most `PATIENCE`."""
        until = time.monotonic() + PATIENCE
        for _, coming in self._coming:
            while not coming.has_arrived():
                if self._merger is not None and time.monotonic() > until:
                    return
                time.sleep(1e-4)

    def restart(self, done: int) -> None:
        """Continue after step `done`, for example after a rollback; values that were not read are dropped."""
        self.wait()
        self._coming.clear()
        self.done = done

    def detach(self) -> None:
        """Stop measuring. The layers are as before; values that have arrived can still be read."""
        for layer in self._layers:
            layer.__dict__.pop("stats_slot", None)
        _live.discard(self)

    def belongs_to(self, parameters: set[int]) -> bool:
        """Return whether the optimizer of these parameters (by `id`) counts steps: of several optimizers one does.

        It has the first measured weight that is trained; if all are frozen, as under adapters, the first parameter of
        the model that is.
        """
        weights = (weight for layer in self._layers for weight in weights_of(layer))
        candidates = itertools.chain(weights, self._model.parameters())
        first = next((parameter for parameter in candidates if parameter.requires_grad), None)
        return first is not None and id(first) in parameters

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "Telemetry: cannot be copied or pickled, as it measures the layers of one model. Copies of a model are not"
            " measured: give the other one a Telemetry of its own."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _lay_out(self, model: nn.Module, layers: dict[str, Layer], device: torch.device) -> dict[Row, tuple[int, int]]:
        """Create the buffer, give each layer its parts, and return the two positions of each row.

        The first is where its layer writes when its group is computed as one, the second when it is computed alone.
        """
        names = {id(layer): name for name, layer in layers.items()}
        last = {id(layer): number for number, layer in enumerate(layers.values())}
        groups = fusion_groups(model, layers.values())
        operands = sum(1 + 2 * len(group) + (3 * len(group) if len(group) > 1 else 0) for group in groups)
        width = WIDTH + BINS if self.histograms_every else WIDTH
        with torch.inference_mode(False):  # it is written outside of inference mode too
            self._buffer = torch.full((operands + len(layers), width), torch.nan, device=device, dtype=torch.float32)
            self._one = torch.ones(1, 1, device=device, dtype=torch.float32)
        self._of_gradients = self._buffer.data[operands:]
        places: list[tuple[Row, tuple[int, int]]] = []
        top = 0
        for group in groups:
            first, top = top, top + 1 + 2 * len(group)
            together = self._buffer[first:top]
            for number, layer in enumerate(group):
                name, gradient = names[id(layer)], operands + last[id(layer)]
                rows = rows_of(name, layer, first, number, len(group), gradient)
                alone, by_itself = together, rows
                if len(group) > 1:
                    alone, by_itself = self._buffer[top : top + 3], rows_of(name, layer, top, 0, 1, gradient)
                    top += 3
                layer.stats_slot = StatsSlot(together, len(group), alone)
                places += [(row, (one, other)) for (row, one), (_, other) in zip(rows, by_itself, strict=True)]
        order = {name: number for number, name in enumerate(layers)}
        places.sort(key=lambda place: order[place[0].layer])  # stable: roles stay in their order
        return dict(places)

    def _wants(self, step: int) -> tuple[bool, bool]:
        """Return whether a step is measured, and whether with exponents."""
        detailed = self.histograms_every > 0 and step % self.histograms_every == 0
        return detailed or step % self.every == 0, detailed

    def _begin(self) -> None:
        """Clear the values, and set which rows of its tensors the next step samples."""
        looks, detailed = self._wants(self.done + 1)
        values = self._buffer.data  # without a new version: compiled code may hold it for backward
        values.fill_(torch.nan)
        values[:, PHASE] = float(_phase(self.done + 1) if looks else -1)
        values[:, DETAILED] = float(detailed)
        mark_idle(values, self._was_launched and not looks)

    def _send(self, values: Tensor) -> AsyncHostCopy | Gathering:
        """Start sending the rows of FP32 (positions, width), with those of all ranks; from a GPU beside training."""
        together, alone = self._places
        sent = values[together]
        sent = torch.where(sent[:, :1].isnan(), values[alone], sent)
        sent = sent if self._merger is None else self._merger.padded(sent)
        gathering = None if self._merger is None else self._merger.gather(sent)
        if self._stream is None:
            return gathering or AsyncHostCopy(sent)
        self._stream.wait_stream(torch.cuda.current_stream(sent.device))
        with torch.cuda.stream(self._stream):
            sent.record_stream(self._stream)
            return AsyncHostCopy(sent if gathering is None else gathering.result())


def _phase(step: int) -> int:
    """Return a pseudo-random number below 2^23: the upper bits of Knuth's multiplicative hash."""
    return (step * 2654435761 % 2**32) >> 9


def _device(model: nn.Module, layers: dict[str, Layer]) -> torch.device:
    devices = {weights_of(layer)[0].device for layer in layers.values()}
    if len(devices) > 1:
        raise ConfigError(f"telemetry is of one device, and the layers lie on {', '.join(map(str, devices))}.")
    anywhere = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return next(iter(devices), anywhere)


_live: weakref.WeakSet[Telemetry] = weakref.WeakSet()


def _stepped(optimizers: Sequence[Optimizer]) -> None:
    if not _live:
        return
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    for telemetry in list(_live):
        if telemetry.belongs_to(stepped):
            telemetry.step()


after_outermost_step(_stepped)
