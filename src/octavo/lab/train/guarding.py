"""`GuardedRun`: the state of a run of `octavo train`, which makes its steps and guardrails roll back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo import recipes
from octavo.errors import RunError
from octavo.kernels.runtime.transfers import upload
from octavo.lab.data.loader import Batch
from octavo.lab.guard import Guard, Guarded, GuardEvent
from octavo.lab.guard.diagnosis import Probe
from octavo.lab.guard.locate import NonFinite
from octavo.lab.guard.parameters import ParameterCheck
from octavo.lab.monitor.measurements import telemetry_of
from octavo.lab.train import checkpoint, events
from octavo.lab.train.calibrate import calibration_of, recalibration_events, recalibration_of, restore_calibration
from octavo.lab.train.inputs import present_name
from octavo.lab.train.log import RunLog
from octavo.lab.train.setup import Setup, convert_as, with_bf16
from octavo.lab.train.sharding import send_tokens
from octavo.lab.train.state_tensors import restore_tensors, state_tensors
from octavo.lab.train.timing import Stopwatch
from octavo.lab.train.train_state import RunStep
from octavo.nn.scaling_state import scales
from octavo.nn.telemetry import Telemetry
from octavo.tensor import is_distributed

SNAPSHOT = Path("snapshot in memory")


class _State(NamedTuple):
    recipe: str
    in_bf16: tuple[str, ...]
    calibration: Any
    """Content of the calibration file that the run writes."""
    tensors: Mapping[str, Mapping[str, Tensor]]
    """By model, as `state_tensors`, without stored scales."""


class GuardedRun(Guarded):
    """The state of a run: models, recipe, data, telemetry. Its measurements are events of the log.

    On a GPU a step is checked when the next one is queued.
    """

    def __init__(self, setup: Setup, log: RunLog, on_event: Callable[[GuardEvent], None]) -> None:
        super().__init__(on_event)
        self.lag = 1 if setup.device.type == "cuda" else 0
        self.setup, self.config, self.ranks = setup, setup.config, setup.ranks
        self.checkpoints = self.config.run.out / "checkpoints"
        self.log = log
        self.lr = 0.0
        """Learning rate of the next step."""
        self.recipe = self.config.run.recipe
        """The recipe of the schedule that the FP8 model is converted to."""
        self.in_bf16: tuple[str, ...] = ()
        """Layers that measurements of sensitivity have moved to BF16, whatever the recipe is."""
        self._recipes = {name: recipes.load(name) for name in (self.config.run.recipe, self.config.run.last_recipe)}
        """As they are when the run begins: their files may change before the schedule switches."""
        self._newest: NDArray[np.float32] | None = None
        """The newest telemetry values that have arrived."""
        self._state = state = setup.states[0]
        config, ranks = setup.config, setup.ranks
        self._start_telemetry()
        check = None
        if ranks.parallel.pipeline == 1:  # stages hold different parameters
            has_replicas = ranks.count > 1 and not any(map(is_distributed, state.parameters.values()))
            group = dist.group.WORLD if ranks.count > 1 else None
            every = config.guard.parameters_every
            check = ParameterCheck(state.model, state.optimizer, every, group, has_replicas)
        if ranks.count > 1:
            self.cannot_refine = "its weights are sharded over ranks, which refine no layers"
        elif config.run.weights == "fp8":
            self.cannot_refine = "its weight is stored in FP8, in the format of its recipe"
        recipe = self._recipes[config.run.recipe] if setup.plan is not None else None
        self.guard = Guard(self, recipe, config.guard, check)
        self._recalibration = recalibration_of(config, state.model)

    @property
    def is_last(self) -> bool:
        """True once the last step is made."""
        return self.done == self.config.run.steps

    def is_every(self, steps: int) -> bool:
        """Return True every so many steps; 0 is never."""
        return steps > 0 and self.done % steps == 0

    @property
    def precision(self) -> str:
        """Precision of the FP8 model's last step: `recipe`, or `bf16`."""
        return "bf16" if self.config.run.is_bf16(self.done - 1) else self.recipe

    def make_step(self) -> RunStep:
        """Step all models on the next batch, and emit what has been measured meanwhile."""
        setup, parts, (inputs_BT, targets_BT) = self.setup, self.config.run.accumulate, next(self.setup.loader)
        batch = send_tokens(self.ranks, inputs_BT, setup.device, self.models, parts), upload(targets_BT, setup.device)
        self.done += 1
        self.ranks.begin_step(self.done)
        metrics, watch = {}, Stopwatch(setup.device)
        for state in setup.states:
            metrics[state.name] = state.step(*batch, step=self.done, lr=self.lr, accumulate=parts)
            watch.mark(state.name)
            self.log.log_refusal(self.done, state)
        if self.telemetry is not None and self.telemetry.done < self.done:
            self.telemetry.step()  # the optimizer skipped the step, and did not close it
        self._recalibrate()
        self.collect_telemetry()
        first, *baseline = metrics.values()
        seen = first.loss, first.gradient_norm, baseline[0].loss if baseline else None
        return RunStep(self.done, self.lr, *seen, metrics=metrics, watch=watch, inputs_BT=inputs_BT)

    def _recalibrate(self) -> None:
        """Recalibrate static scales if due; reading saturation waits for the device."""
        if self._recalibration is None:
            return
        self._recalibration.done = self.done - 1  # a rollback may have changed it
        if self._recalibration.updates.looks(self.done) and self.telemetry is not None:
            self.collect_telemetry(wait=True)
            self._recalibration.rows = self.telemetry.rows
        for event in recalibration_events(self.done, self._recalibration.step(self._newest)):
            self.log.emit(event)

    def switch_recipe(self, recipe: str) -> None:
        """Convert the FP8 model to another recipe of the schedule. Stored scales end here, and are written."""
        if self.done:
            self.save_scales()
        loaded = self._recipes.get(recipe) or recipes.load(recipe)
        if reason := self.guard.change_recipe(loaded):
            raise RunError(f"run.last_recipe: the model cannot go on by '{recipe}': {reason}.")
        needs_scales = loaded.needs_calibration
        self._recalibration = recalibration_of(self.config, self._state.model) if needs_scales else None
        self.recipe = recipe

    def keep_in_bf16(self, layers: Sequence[str]) -> str:
        """Convert the FP8 model so that these layers leave FP8, and others come back; return why not, or nothing."""
        before, self.in_bf16 = self.in_bf16, tuple(layers)
        if reason := self.guard.change_recipe(self.base_recipe):
            self.in_bf16 = before
        return reason

    @property
    def base_recipe(self) -> recipes.Recipe:
        """The recipe of the schedule, before layers are refined or moved."""
        return self._recipes.get(self.recipe) or recipes.load(self.recipe)

    def save_scales(self) -> None:
        """Write the stored scales of the FP8 model as a calibration file, on the first rank."""
        scaling_state = scales(self._state.model)

        def save() -> None:
            if scaling_state is not None and scaling_state.is_known:
                scaling_state.save(self.config.run.out / "scales.json")

        self.ranks.on_first(save)

    def state_dict(self) -> dict[str, Any]:
        """Return recipe, position in the data and calibration, as JSON values."""
        return {
            "recipe": self.recipe,
            "in_bf16": [*self.in_bf16],
            "loader": self.setup.loader.state_dict(),
            "calibration": calibration_of(self.config) if self.ranks.is_first else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, and convert the FP8 model to the recipe that it had."""
        saved = state.get("config", {}).get("run", {})
        recipe = present_name(state.get("recipe", self.recipe), saved, self.config)
        self._convert_back(recipe, tuple(state.get("in_bf16", ())))
        self.setup.loader.load_state_dict(state["loader"])
        if "calibration" in state:
            self.ranks.on_first(lambda: restore_calibration(self.config, state["calibration"]))

    def _convert_back(self, recipe: str, in_bf16: tuple[str, ...]) -> None:
        """Convert the FP8 model to a recipe, and to layers in BF16, that it had before."""
        if recipe != self.recipe:
            self.in_bf16 = in_bf16
            self.switch_recipe(recipe)
        elif in_bf16 != self.in_bf16 and (reason := self.keep_in_bf16(in_bf16)):
            raise ValueError(f"layers cannot go back to their recipes: {reason}")

    def checkpoint_note(self) -> str:
        """Return a sentence that names the newest checkpoint."""
        last = checkpoint.latest(self.checkpoints)
        return f"The last good checkpoint is {last}." if last else "There is no checkpoint yet."

    def was_skipped(self, loss: float, gradient_norm: float) -> bool:
        """Return True if dynamic loss scaling skipped a step with these measurements."""
        return self._state.loss_scale.skips and math.isfinite(loss) and not math.isfinite(gradient_norm)

    # --- defined by `octavo.lab.guard.Guarded` ----------------------------------------------------------------------

    @property
    def models(self) -> Sequence[nn.Module]:
        """The models in training."""
        return [state.model for state in self.setup.states]

    @property
    def position(self) -> int:
        """Number of samples drawn so far, by all ranks."""
        return int(self.setup.loader.state_dict()["samples"])

    def _seek(self, position: int) -> None:
        loader = self.setup.loader
        loader.load_state_dict({**loader.state_dict(), "samples": position})

    def _next_batch(self) -> Batch:
        inputs_BT, targets_BT = next(self.setup.loader)
        return inputs_BT.to(self.setup.device), targets_BT.to(self.setup.device)

    def _copy_state(self) -> _State:
        tensors = {
            state.name: {name: _copy(tensor) for name, tensor in state_tensors(state, stored_scales=False).items()}
            for state in self.setup.states
        }
        return _State(self.recipe, self.in_bf16, self.ranks.on_first(lambda: calibration_of(self.config)), tensors)

    def _load_state(self, state: _State) -> None:
        for own in self.setup.states:
            restore_tensors(own, state.tensors[own.name], SNAPSHOT, stored_scales=False)
            own.clear_failure()
        self.ranks.on_first(lambda: restore_calibration(self.config, state.calibration))
        self.log.restart_clock(self.done)
        self._convert_back(state.recipe, state.in_bf16)  # the stored scales, restored next, are those of this recipe

    def _saved_weight(self, state: _State, name: str) -> Tensor | None:
        is_plain = name in self._state.parameters and self.ranks.count == 1
        return state.tensors[self._state.name].get(f"model.{name}") if is_plain else None

    def _compute(self, batch: Batch, *, backward: bool = True, whole: bool = False) -> Probe:
        return self._state.probe(*batch, 1 if whole else self.config.run.accumulate, backward=backward)

    def _convert(self, recipe: recipes.Recipe) -> None:
        plan = self.setup.plan
        policy, tokens = (None, None) if plan is None else (plan.policy, plan.tokens)
        recipe = with_bf16(recipe, self.in_bf16)
        self.setup.plan = convert_as(self.config, self._state.model, recipe, self.ranks, policy, tokens)

    def _make_telemetry(self) -> Telemetry | None:
        run, plan = self.config.run, self.setup.plan
        if plan is None or not run.telemetry_every:
            return None
        order, together = [layer.name for layer in plan.layers], self.ranks.count > 1
        every, histograms = run.telemetry_every, run.histograms_every
        return telemetry_of(self._state.model, every, histograms, together=together, order=order)

    def _measured(self, step: int, values: NDArray[np.float32]) -> None:
        run, is_checked = self.config.run, self.config.guard.mode != "off"
        if is_checked and step % run.telemetry_every == 0 and not run.is_bf16(step - 1):  # not of histograms alone
            super()._measured(step, values)
        self._newest = values
        histograms = None if self.telemetry is None else self.telemetry.histograms
        self.log.emit(events.TensorsMeasured(step=step, values=values, histograms=histograms))

    def change_recipe(self, recipe: recipes.Recipe) -> str:
        """Convert the FP8 model to another recipe and emit the change; return why that is impossible, if it is."""
        reason = super().change_recipe(recipe)
        if not reason:
            self.log.emit(events.TensorsChanged(step=self.done, rows=self.rows, plan=self.setup.plan))
        return reason

    def locate(self) -> NonFinite | None:
        """Return the first non-finite tensor for the next batch; None if there is none, or layers are split.

        With tensor parallelism placeholders of gathered codes are NaN by design; in a pipeline each rank would find
        another tensor.
        """
        if self.ranks.parallel.splits_model:
            return None
        found = super().locate()
        if found is not None and self.ranks.count > 1:
            found = found._replace(rank=self.ranks.rank)
        return next(filter(None, self.ranks.gather(found)), None)


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy: in pinned host memory for a CUDA tensor, in place for a DTensor."""
    plain = tensor.detach()
    if is_distributed(plain) or not plain.is_cuda:
        return plain.clone()
    host = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=True)
    return host.copy_(plain)
