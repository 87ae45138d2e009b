"""`GuardedRun`: a run of `octavo train` under guardrails (`octavo.guard.Guarded`)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo import recipes
from octavo.data.loader import Batch
from octavo.guard import Guard, Guarded, GuardEvent
from octavo.guard.diagnosis import Probe
from octavo.guard.parameters import ParameterCheck
from octavo.tensor import is_distributed
from octavo.train.events import TensorsChanged
from octavo.train.setup import convert_as
from octavo.train.state_tensors import SCALES, restore_tensors, state_tensors

if TYPE_CHECKING:
    from octavo.train.run import Trainer

SNAPSHOT = Path("snapshot in memory")
_State = Mapping[str, Mapping[str, Tensor]]
"""By model, as `state_tensors`, without stored scales."""


class GuardedRun(Guarded):
    """Connects a `Trainer` to guardrails. On a GPU a step is checked when the next one has been queued."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(lag=1 if trainer.setup.device.type == "cuda" else 0)
        self._trainer = trainer
        self._state = state = trainer.setup.states[0]
        config, ranks = trainer.config, trainer.ranks
        if config.guard.mode != "off" and ranks.parallel.pipeline == 1:  # stages hold different parameters
            has_replicas = ranks.count > 1 and not any(map(is_distributed, state.parameters.values()))
            group = dist.group.WORLD if ranks.count > 1 else None
            every = config.guard.parameters_every
            self.parameters = ParameterCheck(state.model, state.optimizer, every, group, has_replicas)
        recipe = recipes.load(config.run.recipe) if trainer.setup.plan is not None else None
        self.guard = Guard(self, recipe, config.guard)

    def _is_overflow(self, loss: float, gradient_norm: float) -> bool:
        return self._state.loss_scale.skips and math.isfinite(loss) and not math.isfinite(gradient_norm)

    def _values_of(self, step: int) -> NDArray[np.float32] | None:
        """Return the telemetry of a step, once it has arrived; None if the step was not sampled."""
        run = self._trainer.config.run
        if self.telemetry is None or step % run.telemetry_every or run.is_bf16(step - 1):
            return None
        while step not in self._values:
            self._trainer.emit_tensors()
            if step not in self._values:
                time.sleep(1e-4)
        return super()._values_of(step)

    # --- defined by `octavo.guard.Guarded` --------------------------------------------------------------------------

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

    @property
    def position(self) -> int:
        """Number of samples drawn so far, by all ranks."""
        return self._trainer.setup.loader.state_dict()["samples"]

    def _seek(self, position: int) -> None:
        loader = self._trainer.setup.loader
        loader.load_state_dict({**loader.state_dict(), "samples": position})

    def _next_batch(self) -> Batch:
        inputs_BT, targets_BT = next(self._trainer.setup.loader)
        device = self._trainer.setup.device
        return inputs_BT.to(device), targets_BT.to(device)

    def _copy_state(self) -> _State:
        return {
            state.name: {n: _copy(t) for n, t in state_tensors(state).items() if not n.startswith(SCALES)}
            for state in self._trainer.setup.states
        }

    def _load_state(self, step: int, state: _State) -> None:
        trainer = self._trainer
        for own in trainer.setup.states:
            # Stored scales of the recipes that layers have now, which may differ from those in the snapshot.
            stored = {name: tensor for name, tensor in state_tensors(own).items() if name.startswith(SCALES)}
            restore_tensors(own, {**state[own.name], **stored}, SNAPSHOT)
            own.clear_failure()
        trainer.go_back(step)

    def _saved_weight(self, state: _State, name: str) -> Tensor | None:
        is_plain = name in self._state.parameters and self._trainer.ranks.count == 1
        return state[self._state.name].get(f"model.{name}") if is_plain else None

    def _compute(self, batch: Batch, *, backward: bool = True, whole: bool = False) -> Probe:
        parts = 1 if whole else self._trainer.config.run.accumulate
        return self._state.probe(*batch, parts, backward=backward)

    def _convert(self, recipe: recipes.Recipe) -> None:
        trainer = self._trainer
        trainer.setup.plan = convert_as(trainer.config, self._state.model, recipe, trainer.ranks)

    def _start_telemetry(self) -> None:
        self._trainer.start_telemetry()

    def _collect_telemetry(self) -> None:
        self._trainer.emit_tensors()

    def refine(self, recipe: recipes.Recipe) -> str:
        """Convert layers to finer recipes, as guardrails ask; return why that is impossible, if it is."""
        if self._trainer.ranks.count > 1:
            return "its weights are sharded over ranks, which refine no layers"
        if self._trainer.config.run.weights == "fp8":
            return "its weight is stored in FP8, in the format of its recipe"
        return self.change_recipe(recipe)

    def change_recipe(self, recipe: recipes.Recipe) -> str:
        """Convert the FP8 model to another recipe and emit the change; return why that is impossible, if it is."""
        reason = super().change_recipe(recipe)
        if not reason:
            plan = self._trainer.setup.plan
            self._trainer.log.emit(TensorsChanged(step=self.done, rows=self.rows, plan=plan))
        return reason

    def locate(self) -> str:
        """Return layer, role and token of the first non-finite tensor; empty if there is none or layers are split.

        With tensor parallelism placeholders of gathered codes are NaN by design; in a pipeline each rank would find
        another tensor.
        """
        ranks = self._trainer.ranks
        return "" if ranks.parallel.splits_model else ranks.first_text(super().locate())

    def emit(self, event: GuardEvent) -> None:
        """Emit an event of the run."""
        self._trainer.log.emit(event)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy: in pinned host memory for a CUDA tensor, in place for a DTensor."""
    plain = tensor.detach()
    if is_distributed(plain) or not plain.is_cuda:
        return plain.clone()
    host = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=True)
    return host.copy_(plain)
