"""A training run as guardrails see it (`octavo.guard.Guarded`): taken, taken back, tried, refined."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo import recipes
from octavo.conversion import disabled
from octavo.errors import OctavoError
from octavo.generators import generator_states, restore_generators, untouched_generators
from octavo.guard import Guard, Note, Observation
from octavo.guard.damage import damage
from octavo.guard.diagnosis import Probe
from octavo.guard.kept_scales import kept_scales, take_over
from octavo.guard.locate import locate
from octavo.monitor.measurements import AsyncScalars
from octavo.tensor import is_distributed
from octavo.train.events import Noted, RolledBack, TensorsChanged
from octavo.train.lane import Lane, Measured
from octavo.train.setup import convert_as
from octavo.train.state import SCALES, lane_tensors, restore_lane

if TYPE_CHECKING:
    from octavo.train.run import Trainer

SNAPSHOT = Path("snapshot in memory")


@dataclass(frozen=True)
class _Taken:
    """All that a step changes."""

    done: int
    lanes: Mapping[str, Mapping[str, Tensor]]
    scales: Mapping[str, Mapping[str, Tensor]]
    generators: Mapping[str, Tensor]
    loader: dict[str, int]


class GuardedRun:
    """The trainer's side of guardrails. Measurements of a step are read when the next one is queued, on a GPU."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._lane = trainer.setup.lanes[0]
        self._waiting: deque[tuple[float, AsyncScalars]] = deque()
        self._values: dict[int, NDArray[np.float32]] = {}
        self._lag = 1 if trainer.setup.device.type == "cuda" else 0
        config = trainer.config
        recipe = recipes.load(config.run.recipe) if trainer.setup.plan is not None else None
        self.guard = Guard(self, recipe, config.guard)

    # --- what the trainer calls -------------------------------------------------------------------------------------

    def measured(self, step: int, values: NDArray[np.float32]) -> None:
        """Take the telemetry of a step."""
        self._values[step] = values

    def after(self, lr: float, measured: Measured) -> bool:
        """Hand on what the newest step measured; return whether the run went back."""
        if self.guard.config.mode == "off":
            return False
        scalars = {"loss": measured.loss, "gradient_norm": measured.gradient_norm}
        self._waiting.append((lr, AsyncScalars(self.done, scalars)))
        return self._examine(self._lag)

    def settle(self) -> bool:
        """Examine all steps that were made, before something of them is kept; return whether the run went back."""
        return self._examine(0)

    def _examine(self, left: int) -> bool:
        while len(self._waiting) > left:
            lr, coming = self._waiting.popleft()
            numbers = coming.read()
            loss, norm = numbers["loss"], numbers["gradient_norm"]
            values = self._values_of(coming.step)
            if self._lane.loss_scale.skips and math.isfinite(loss) and not math.isfinite(norm):
                continue  # the loss scale was too high, and the step was skipped: that is what it is for
            if self.guard.after(Observation(coming.step, loss, norm, lr, values)):
                return True
        return False

    def _values_of(self, step: int) -> NDArray[np.float32] | None:
        """Return the telemetry of a step; waits until it is there, if the step was looked at."""
        every = self._trainer.config.run.telemetry_every
        if self._trainer.telemetry is None or step % every or self._trainer.is_bf16(step - 1):
            return None
        while step not in self._values:
            self._trainer.tell_of_tensors()
            if step not in self._values:
                time.sleep(1e-4)
        found = self._values.pop(step)
        self._values = {known: values for known, values in self._values.items() if known > step}
        return found

    # --- what guardrails ask ----------------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Steps made."""
        return self._trainer.done

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]:
        """What the rows of telemetry are about."""
        telemetry = self._trainer.telemetry
        return () if telemetry is None else telemetry.rows

    def take(self) -> _Taken:
        """Return a copy of all lanes, the generators and the position in the data; from a GPU into host memory."""
        lanes = {
            lane.name: {n: _kept(t) for n, t in lane_tensors(lane).items() if not n.startswith(SCALES)}
            for lane in self._trainer.setup.lanes
        }
        kept = {lane.name: kept_scales(lane.model) for lane in self._trainer.setup.lanes}
        return _Taken(self.done, lanes, kept, generator_states(), self._trainer.setup.loader.state_dict())

    def restore(self, taken: _Taken) -> None:
        """Go back to a snapshot, in all lanes, and tell of it."""
        trainer, since = self._trainer, self._trainer.done
        for lane in trainer.setup.lanes:
            # With the scales of the recipes that layers have now, which may not be those of then.
            restore_lane(lane, {**taken.lanes[lane.name], **_scales_of(lane)}, SNAPSHOT)
            take_over(lane.model, taken.scales[lane.name])
            lane.forget_faults()
        restore_generators(taken.generators)
        trainer.setup.loader.load_state_dict(taken.loader)
        self._waiting.clear()
        self._values.clear()
        trainer.go_back(taken.done)
        trainer.tell(RolledBack(step=since, to=taken.done))

    def probe(self, *, fp8: bool, earlier: _Taken | None = None, backward: bool = True) -> Probe:
        """Try the next batch, or the first one after a snapshot, without an update."""
        has_fp8 = self._trainer.setup.plan is not None  # a run in BF16 has no other precision
        inputs, targets = self._peek(earlier)
        with self._untouched(), nullcontext() if fp8 or not has_fp8 else disabled(self._lane.model):
            return self._lane.probe(inputs, targets, self._trainer.config.run.accumulate, backward=backward)

    def skip(self) -> None:
        """Pass over the next batch."""
        next(self._trainer.setup.loader)

    def refine(self, recipe: recipes.Recipe) -> str:
        """Convert the model anew; return why that is not possible, empty where it is done."""
        trainer, model = self._trainer, self._lane.model
        if trainer.ranks.count > 1:
            return "its weights are sharded over ranks, and gathered by the recipe that it had"
        if trainer.config.run.weights == "fp8":
            return "its weight is stored in FP8, as its recipe has it"
        try:
            _convert_anew(model, recipe, trainer)
        except OctavoError as error:
            return str(error)
        finally:
            trainer.watch_tensors()
        trainer.tell(TensorsChanged(step=self.done, rows=self.rows, plan=trainer.setup.plan))
        return ""

    def locate(self) -> str:
        """Say which layer, role and token of the next batch is not finite first; empty for none.

        Where layers are cut, what stands for gathered codes is NaN by design, and would be found; of layers in stages
        each rank would find another one: nothing is said.
        """
        if self._trainer.ranks.parallel.splits_model:
            return ""
        inputs, targets = self._peek()

        def run() -> None:
            self._lane.probe(inputs, targets)

        with self._untouched():
            found = locate(self._lane.model, run)
        return self._trainer.ranks.first_of("" if found is None else str(found))

    def damage(self, layer: str, taken: _Taken, reach: float) -> str:
        """Say what of a layer's weight changed by more than `reach` since a snapshot; empty for nothing."""
        name = f"{layer}.weight"
        before, now = taken.lanes[self._lane.name].get(f"model.{name}"), self._lane.parameters.get(name)
        if before is None or now is None or self._trainer.ranks.count > 1:
            return ""
        found = damage(before, now, reach)
        return "" if found is None else str(found)

    def note(self, note: Note) -> None:
        """Tell those who watch the run."""
        self._trainer.tell(Noted(note=note))

    def _peek(self, earlier: _Taken | None = None) -> tuple[Tensor, Tensor]:
        """Return the next batch, or the first one after a snapshot, on the device; it stays the next one."""
        loader = self._trainer.setup.loader
        here = loader.state_dict()
        if earlier is not None:
            loader.load_state_dict(earlier.loader)
        inputs, targets = next(loader)
        loader.load_state_dict(here)
        device = self._trainer.setup.device
        return inputs.to(device), targets.to(device)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Leave generators, kept scales and telemetry as they were before the block."""
        kept = kept_scales(self._lane.model)
        telemetry = self._trainer.telemetry
        if telemetry is not None:
            telemetry.wait()
            self._trainer.tell_of_tensors()
        try:
            with untouched_generators():
                yield
        finally:
            take_over(self._lane.model, kept)
            if telemetry is not None:
                telemetry.restart(self.done)


def _convert_anew(model: nn.Module, recipe: recipes.Recipe, trainer: Trainer) -> None:
    """Convert a model that trains to another recipe; scales that both keep go on."""
    kept = kept_scales(model)
    if trainer.telemetry is not None:
        trainer.telemetry.detach()
    trainer.setup.plan = convert_as(trainer.config, model, recipe, trainer.ranks)
    take_over(model, kept)


def _scales_of(lane: Lane) -> dict[str, Tensor]:
    """Return the kept scales of a lane as `lane_tensors` names them."""
    return {name: tensor for name, tensor in lane_tensors(lane).items() if name.startswith(SCALES)}


def _kept(tensor: Tensor) -> Tensor:
    """Return a copy, in host memory where it is on a GPU. What is sharded stays where it is."""
    plain = tensor.detach()
    if is_distributed(plain) or not plain.is_cuda:
        return plain.clone()
    host = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=True)
    return host.copy_(plain)
