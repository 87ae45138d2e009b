"""`GuardedRun`: a run of `octavo train` under guardrails (`octavo.guard.Guarded`)."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo import recipes
from octavo.guard import Guard, Guarded, GuardEvent, Observation
from octavo.guard.diagnosis import Probe
from octavo.monitor.measurements import AsyncScalars
from octavo.tensor import is_distributed
from octavo.train.events import RolledBack, TensorsChanged
from octavo.train.setup import Batch, convert_as
from octavo.train.state_tensors import SCALES, restore_tensors, state_tensors
from octavo.train.train_state import StepMetrics

if TYPE_CHECKING:
    from octavo.train.run import Trainer

SNAPSHOT = Path("snapshot in memory")


class _State(NamedTuple):
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By model, as `state_tensors`, without stored scales."""
    loader: dict[str, int]


class GuardedRun(Guarded):
    """Connects a `Trainer` to guardrails. On a GPU a step is checked when the next one has been queued."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._state = trainer.setup.states[0]
        self._pending: deque[tuple[float, AsyncScalars]] = deque()
        self._values: dict[int, NDArray[np.float32]] = {}
        self._lag = 1 if trainer.setup.device.type == "cuda" else 0
        config = trainer.config
        recipe = recipes.load(config.run.recipe) if trainer.setup.plan is not None else None
        self.guard = Guard(self, recipe, config.guard)

    # --- called by the trainer --------------------------------------------------------------------------------------

    def measured(self, step: int, values: NDArray[np.float32]) -> None:
        """Accept the telemetry of a step."""
        self._values[step] = values

    def after(self, lr: float, metrics: StepMetrics) -> bool:
        """Queue the newest step and check the earlier ones; return True if the run was rolled back."""
        if self.guard.config.mode == "off":
            return False
        scalars = {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm}
        self._pending.append((lr, AsyncScalars(self.done, scalars)))
        return self._check(self._lag)

    def check_all(self) -> bool:
        """Check all steps, before a result of theirs is kept; return True if the run was rolled back."""
        return self._check(0)

    def _check(self, remaining: int) -> bool:
        while len(self._pending) > remaining:
            lr, scalars = self._pending.popleft()
            numbers = scalars.read()
            loss, norm = numbers["loss"], numbers["gradient_norm"]
            values = self._values_of(scalars.step)
            if self._state.loss_scale.skips and math.isfinite(loss) and not math.isfinite(norm):
                continue  # overflow: dynamic loss scaling skipped the step
            if self.guard.after(Observation(scalars.step, loss, norm, lr, values)):
                return True
        return False

    def _values_of(self, step: int) -> NDArray[np.float32] | None:
        """Return the telemetry of a step, once it has arrived; None if the step was not sampled."""
        every = self._trainer.config.run.telemetry_every
        if self.telemetry is None or step % every or self._trainer.is_bf16(step - 1):
            return None
        while step not in self._values:
            self._trainer.emit_tensors()
            if step not in self._values:
                time.sleep(1e-4)
        found = self._values.pop(step)
        self._values = {known: values for known, values in self._values.items() if known > step}
        return found

    # --- called by guardrails (`octavo.guard.Guarded`) --------------------------------------------------------------

    @property
    def done(self) -> int:
        """Number of steps made."""
        return self._trainer.done

    @property
    def models(self) -> Sequence[nn.Module]:
        """The models in training."""
        return [state.model for state in self._trainer.setup.states]

    @property
    def telemetry(self) -> Any:
        """Telemetry of the FP8 model."""
        return self._trainer.telemetry

    def _copy_state(self) -> _State:
        tensors = {
            state.name: {n: _copy(t) for n, t in state_tensors(state).items() if not n.startswith(SCALES)}
            for state in self._trainer.setup.states
        }
        return _State(tensors, self._trainer.setup.loader.state_dict())

    def _load_state(self, step: int, state: _State) -> None:
        trainer, since = self._trainer, self.done
        for own in trainer.setup.states:
            # Stored scales of the recipes that layers have now, which may differ from those in the snapshot.
            stored = {name: tensor for name, tensor in state_tensors(own).items() if name.startswith(SCALES)}
            restore_tensors(own, {**state.tensors[own.name], **stored}, SNAPSHOT)
            own.clear_failure()
        trainer.setup.loader.load_state_dict(state.loader)
        self._pending.clear()
        self._values.clear()
        trainer.go_back(step)
        trainer.emit(RolledBack(step=since, to=step))

    def _saved_weight(self, state: _State, name: str) -> Tensor | None:
        is_plain = name in self._state.parameters and self._trainer.ranks.count == 1
        return state.tensors[self._state.name].get(f"model.{name}") if is_plain else None

    def _peek(self, state: _State | None = None) -> Batch:
        loader, device = self._trainer.setup.loader, self._trainer.setup.device
        position = loader.state_dict()
        if state is not None:
            loader.load_state_dict(state.loader)
        inputs_BT, targets_BT = next(loader)
        loader.load_state_dict(position)
        return inputs_BT.to(device), targets_BT.to(device)

    def _compute(self, batch: Batch, *, backward: bool = True, whole: bool = False) -> Probe:
        parts = 1 if whole else self._trainer.config.run.accumulate
        return self._state.probe(*batch, parts, backward=backward)

    def _convert(self, recipe: recipes.Recipe) -> None:
        trainer = self._trainer
        trainer.setup.plan = convert_as(trainer.config, self._state.model, recipe, trainer.ranks)

    def _start_telemetry(self) -> None:
        self._trainer.start_telemetry()

    def _collect_telemetry(self) -> None:
        if self.telemetry is not None:
            self.telemetry.wait()
            self._trainer.emit_tensors()

    def refine(self, recipe: recipes.Recipe) -> str:
        """Convert the FP8 model to another recipe and emit the change; return why that is impossible, if it is."""
        if self._trainer.ranks.count > 1:
            return "its weights are sharded over ranks and gathered in the format of its recipe"
        if self._trainer.config.run.weights == "fp8":
            return "its weight is stored in FP8, in the format of its recipe"
        reason = super().refine(recipe)
        if not reason:
            plan = self._trainer.setup.plan
            self._trainer.emit(TensorsChanged(step=self.done, rows=self.rows, plan=plan))
        return reason

    def locate(self) -> str:
        """Return layer, role and token of the first non-finite tensor; empty if there is none or layers are split.

        With tensor parallelism placeholders of gathered codes are NaN by design; in a pipeline each rank would find
        another tensor.
        """
        ranks = self._trainer.ranks
        return "" if ranks.parallel.splits_model else ranks.first_text(super().locate())

    def skip(self) -> None:
        """Skip the next batch."""
        next(self._trainer.setup.loader)

    def emit(self, event: GuardEvent) -> None:
        """Emit an event of the run."""
        self._trainer.emit(event)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy: in pinned host memory for a CUDA tensor, in place for a DTensor."""
    plain = tensor.detach()
    if is_distributed(plain) or not plain.is_cuda:
        return plain.clone()
    host = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=True)
    return host.copy_(plain)
