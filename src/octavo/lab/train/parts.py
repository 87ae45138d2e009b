"""The parts of a run's loop, besides its log and its guardrails; `octavo.lab.train.run` puts them together.

From the outermost to the innermost:

    Evaluation     scores held-out text
    Stop           ends the run at a signal, or because its directory is gone
    Checkpoints    writes them, and removes those that a rollback abandons
    Sampling       lets the models write text, in `octavo.lab.train.sampling`
    Groups         statistics of parameter groups
    RunLog         a line of the log
    Finite         ends a run whose losses are no longer finite
    Guard          guardrails
    Sensitivity    moves layers out of FP8 where it costs the loss most, and back
    Schedule       learning rate and recipe of the next step
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo._util.terminal import quantity
from octavo.conversion import disabled, enable
from octavo.errors import CheckpointError, ConfigError, DivergedError, Interrupted, RunError
from octavo.lab.guard import GuardEvent
from octavo.lab.loop import Loop, Part
from octavo.lab.monitor.groups import GroupStatistics
from octavo.lab.train import checkpoint, events
from octavo.lab.train.background import BackgroundWriter
from octavo.lab.train.directory import RunDirectory, rescue_path
from octavo.lab.train.evaluate import heldout_losses
from octavo.lab.train.files import write_json
from octavo.lab.train.guarding import GuardedRun
from octavo.lab.train.param_groups import group_names
from octavo.lab.train.resume import save_checkpoint
from octavo.lab.train.schedule import learning_rate
from octavo.lab.train.sensitivity import LayerCost, choose, layer_costs, times_the_mean
from octavo.lab.train.stopping import StopSignals
from octavo.lab.train.summary import HIGH
from octavo.lab.train.train_state import RunStep, TrainState
from octavo.nn.linear import LinearLayer
from octavo.recipes import Recipe
from octavo.tensor import is_distributed


class Schedule(Part[RunStep]):
    """Learning rate and recipe of the next step."""

    def __init__(self, run: GuardedRun) -> None:
        self._run = run
        self.heldout: dict[int, float] = {}
        """Step -> held-out loss of the first model, which a `plateau` is seen in."""

    def learning_rate(self) -> float:
        """Return the learning rate of the next step, before guardrails limit it."""
        config = self._run.config
        return learning_rate(config.optimizer, self._run.done, config.run.steps, [*self.heldout.values()])

    def before_step(self) -> bool:
        """Set the learning rate, and convert the FP8 model to the recipe of the next step; emit a change of recipe."""
        run = self._run
        run.lr = min(self.learning_rate(), run.lr_limit)
        if run.setup.plan is None:
            return False
        recipe, is_bf16 = run.config.run.recipe_of(run.done), run.config.run.is_bf16(run.done)
        before, after = run.precision, "bf16" if is_bf16 else recipe
        if recipe != run.recipe:
            if run.guard.check_all():
                return True
            run.switch_recipe(recipe)
        enable(run.setup.states[0].model, after == recipe)
        if after != before:
            run.log.emit(events.Switched(step=run.done + 1, recipe=after))
        return False

    def note(self, loss: float) -> None:
        """Note a held-out loss; emit an event if the learning rate is halved because of it."""
        before = self.learning_rate()
        self.heldout[self._run.done] = loss
        if self._run.config.optimizer.lr_schedule == "plateau" and (after := self.learning_rate()) != before:
            text = f"the held-out loss has stopped falling: the learning rate is {after:.3g} in place of {before:.3g}"
            event = GuardEvent(self._run.done, "info", "schedule", text, action="learning rate halved")
            self._run.log.emit(event)

    def roll_back(self, to: int) -> None:
        """Forget the held-out losses of later steps."""
        self.heldout = {step: loss for step, loss in self.heldout.items() if step <= to}

    def state_dict(self) -> dict[str, Any]:
        """Return the held-out losses by step."""
        return {"heldout": {str(step): loss for step, loss in self.heldout.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.heldout = {int(step): float(loss) for step, loss in state.get("heldout", {}).items()}
        if not all(map(math.isfinite, self.heldout.values())):
            raise ValueError("a held-out loss is not finite")


class Sensitivity(Part[RunStep]):
    """Measures what FP8 costs in each linear layer, and moves the worst layers to BF16 within a budget, and back.

    It measures on the next batch, before the step that trains on it. What it decides depends on weights and batch
    alone, and the layers in BF16 are part of the state of the run: a resumed run goes on bit for bit.
    """

    def __init__(self, run: GuardedRun) -> None:
        self._run, self._config = run, run.config.sensitivity

    def before_step(self) -> bool:
        """Measure if it is time, and convert the layers that move."""
        run, every = self._run, self._config.every
        if run.setup.plan is None or not (run.done and run.is_every(every)) or run.config.run.is_bf16(run.done):
            return False
        if run.guard.check_all():
            return True
        layers = self._layers()
        costs = layer_costs(layers, run.probe)
        if not all(math.isfinite(cost.loss) for cost in costs.values()):
            self._emit("the gradient of a layer is not finite: no layer is moved", level="warning")
            return False
        self._move(costs, {name: recipe.name for name, (_, recipe) in layers.items()})
        return False

    def _layers(self) -> dict[str, tuple[nn.Linear, Recipe]]:
        """Return the linear layers that are in FP8, or would be if none had moved, with their recipes in FP8."""
        run, modules = self._run, dict(self._run.models[0].named_modules())
        plan = run.setup.plan
        found = {}
        for row in () if plan is None else plan.layers:
            layer = modules.get(row.name)
            if isinstance(layer, nn.Linear) and (row.is_fp8 or row.name in run.in_bf16):
                recipe = layer.recipe if isinstance(layer, LinearLayer) else run.base_recipe.for_layer(row.name)
                found[row.name] = layer, recipe
        return found

    def _move(self, costs: Mapping[str, LayerCost], recipes: Mapping[str, str]) -> None:
        before, after = {*self._run.in_bf16}, choose(costs, self._run.in_bf16, self._config)
        share = sum(costs[name].flops for name in after) / (sum(cost.flops for cost in costs.values()) or 1.0)
        if before != {*after} and (reason := self._run.keep_in_bf16(after)):
            self._emit(f"layers cannot be moved: {reason}", level="error")
            return
        total = sum(cost.loss for cost in costs.values())
        where = f"{quantity(len(after), 'layer')} in BF16, {100 * share:.3g} % of their FLOPs"
        self._emit(f"FP8 costs {total:.3g} nats per token in {quantity(len(costs), 'linear layer')}; {where}", total)
        for name in costs:
            if (name in before) != (name in after):
                times = times_the_mean(costs, name)
                action = f"{name} computes by bf16" if name in after else f"{name}: back to {recipes[name]}"
                text = f"FP8 costs {times:.3g} times the mean per FLOP in {name}"
                self._emit(text, times, action=action, layer=name, limit=self._config.above)

    def _emit(self, text: str, value: float | None = None, *, level: str = "info", **details: Any) -> None:
        self._run.log.emit(GuardEvent(self._run.done, level, "sensitivity", text, value=value, **details))


class Finite(Part[RunStep]):
    """Ends a run whose loss or gradient norm was not finite, before that is logged or saved; a baseline ends alone."""

    def __init__(self, run: GuardedRun) -> None:
        self._run = run

    def after_step(self, step: RunStep) -> bool:
        """Check all steps made.

        Raises:
            DivergedError: see `TrainState.check`.
        """
        run = self._run
        # Reading a result waits for a GPU; on a CPU it costs nothing.
        if run.setup.device.type != "cpu" and not step.reads - {"nothing"}:
            return False
        first, *baselines = run.setup.states
        first.check(run.checkpoint_note())
        for baseline in baselines:
            try:
                baseline.check("")
            except RunError as error:
                baseline.drop_graph()
                run.setup.states = (first,)
                text = f"{error} The run goes on without its BF16 baseline."
                run.log.emit(GuardEvent(step.number, "error", "baseline", " ".join(text.split())))
        return False


class Groups(Part[RunStep]):
    """Statistics of the first model's parameter groups, every `run.groups_every` steps.

    Raises:
        ConfigError: ranks have parts of the parameters or of the optimizer.
    """

    reads = "results"

    def __init__(self, run: GuardedRun) -> None:
        self._run, every = run, run.config.run.groups_every
        self._statistics: GroupStatistics | None = None
        if not every:
            return
        state, optimizer = run.setup.states[0], run.setup.states[0].optimizer
        if run.ranks.is_greedy or any(map(is_distributed, state.parameters.values())) or state.pipeline is not None:
            raise ConfigError(
                "run.groups_every: statistics are of whole parameter groups, and ranks share those of this run. Leave"
                " it at 0."
            )
        self._statistics = GroupStatistics(optimizer, every, names=group_names(optimizer))

    def before_step(self) -> bool:
        """Number the steps as the run does: it may have resumed, gone back or skipped some."""
        if self._statistics is not None:
            self._statistics.done = self._run.done
        return False

    def is_due(self, step: RunStep) -> bool:
        """Return True every `run.groups_every` steps."""
        return self._run.is_every(self._run.config.run.groups_every)

    def after_step(self, step: RunStep) -> bool:
        """Emit what the optimizer's step has measured; nothing if it was skipped."""
        found = {} if self._statistics is None else self._statistics.scalars()
        if found:
            values = torch.stack([*found.values()]).tolist()  # one transfer
            self._run.log.emit(events.GroupsMeasured(step=step.number, values=dict(zip(found, values, strict=True))))
        return False


class Checkpoints(Part[RunStep]):
    """Writes checkpoints, in the background or not, and removes those that a rollback abandons.

    Args:
        run: the state of the run.
        loop: has the states of its parts.
        signals: a signal makes a checkpoint due.
        locked: the directory of the run, on the first rank.
    """

    reads = "weights"

    def __init__(
        self, run: GuardedRun, loop: Loop[RunStep], signals: StopSignals, locked: RunDirectory | None = None
    ) -> None:
        self._run, self._loop, self._signals, self._locked = run, loop, signals, locked
        self._owes = False
        """True if the run has gone back to before its only checkpoint, so that another is due."""
        in_background = run.config.run.checkpoint_write == "background"
        self._writer = BackgroundWriter(run.ranks) if in_background else None

    def before_step(self) -> bool:
        """Report a checkpoint that was written meanwhile; errors as of `end_write`."""
        self.end_write()
        return False

    def is_due(self, step: RunStep) -> bool:
        """Return True at the last step, every `run.checkpoint_every`, at a signal, and if a rollback left none."""
        run = self._run
        return run.is_last or run.is_every(run.config.run.checkpoint_every) or self._signals.agreed > 0 or self._owes

    def after_step(self, step: RunStep) -> bool:
        """Write a checkpoint."""
        run = self._run
        self.check_directory()
        self.end_write(wait=True)
        self._write(run.checkpoints, self._writer)
        self._owes = False
        run.log.restart_clock(run.done)
        return False

    def roll_back(self, to: int) -> None:
        """Remove later checkpoints, once one in flight is written: none may be of steps that the log loses."""
        self.end_write(wait=True)
        self._owes = self._run.ranks.on_first(lambda: checkpoint.roll_back(self._run.checkpoints, to))

    def end_write(self, *, wait: bool = False) -> None:
        """Emit that the checkpoint in the background is written, if it is; with `wait`, once it is.

        Raises:
            CheckpointError: it could not be written.
            RunError: the directory of the run was removed.
        """
        if self._writer is None:
            return
        try:
            written = self._writer.wait() if wait else self._writer.ended()
        except CheckpointError:
            self.check_directory()
            raise
        if written is not None:
            self._run.log.emit(events.Saved(step=written.step, path=written.path))

    def check_directory(self) -> None:
        """Check that the run's directory is still there.

        Raises:
            RunError: it is not; a checkpoint, the configuration and the log are saved beside it.
        """
        run, directory = self._run, self._run.config.run.out
        if not any(run.ranks.gather(self._locked is not None and not self._locked.is_there())):
            return
        out = run.ranks.broadcast(rescue_path(directory))
        self.abandon()  # its checkpoint went with the directory
        self._write(out / "checkpoints", writer=None)
        if run.ranks.is_first:
            run.log.rescue(out)
        raise RunError(
            f"{directory}: was removed or renamed; noticed at step {run.done}, and the run stops. A checkpoint"
            f" and the log are saved: go on with octavo train {out / 'config.json'} --resume"
        )

    def abandon(self) -> None:
        """End the write in the background, whether it succeeds or not."""
        if self._writer is not None:
            self._writer.close(self._run.config.parallel.timeout)

    def _write(self, checkpoints: Path, writer: BackgroundWriter | None) -> None:
        self._run.collect_telemetry(wait=True)  # what was measured before a checkpoint is recorded before it
        save_checkpoint(self._run, self._loop, checkpoints, writer)


class Stop(Part[RunStep]):
    """Ends the run after a signal, or if its directory is gone; a checkpoint has been saved then."""

    def __init__(self, run: GuardedRun, checkpoints: Checkpoints, signals: StopSignals) -> None:
        self._run, self._checkpoints, self._signals = run, checkpoints, signals

    def is_due(self, step: RunStep) -> bool:
        """Return True if a rank has got a signal. On several ranks they ask each other when a line is logged.

        Raises:
            RunError: see `Checkpoints.check_directory`.
        """
        run, self._signals.agreed = self._run, 0
        if not run.log.is_due(step) and run.ranks.count > 1:
            return False
        self._checkpoints.check_directory()
        self._signals.agreed = max(run.ranks.gather(self._signals.asked))
        return self._signals.agreed > 0

    def after_step(self, step: RunStep) -> bool:
        """Raise `Interrupted`, once the checkpoint is written."""
        self._checkpoints.end_write(wait=True)
        raise Interrupted(self._signals.agreed)


class Evaluation(Part[RunStep]):
    """Scores the models on held-out text."""

    reads = "weights"

    def __init__(self, run: GuardedRun, schedule: Schedule) -> None:
        self._run, self._schedule = run, schedule

    def is_due(self, step: RunStep) -> bool:
        """Return True every `run.eval_every` steps; the evaluation after the last step is not of the loop."""
        return self._run.is_every(self._run.config.run.eval_every) and not self._run.is_last

    def after_step(self, step: RunStep) -> bool:
        """Evaluate."""
        self.evaluate()
        self._run.log.restart_clock(self._run.done)
        return False

    def evaluate(self) -> dict[str, list[float]]:
        """Return the held-out loss of each sequence by model.

        Raises:
            DivergedError: the loss of a model is not finite.
        """
        run = self._run
        losses = {state.name: self._score(state, events.MODELS[state.name]) for state in run.setup.states}
        loss = {name: float(of_sequence.mean()) for name, of_sequence in losses.items()}
        first = run.setup.states[0].name
        run.log.log_evaluation(run.done, loss, losses[first])
        for name, value in loss.items():
            if not math.isfinite(value):
                raise DivergedError(
                    f"the held-out loss of the {name.upper()} model is {value} after step {run.done}."
                    f" {run.checkpoint_note()} Try a lower --lr, or --recipe bf16 to compare."
                )
        self._schedule.note(loss[first])
        by_model = {name: of_sequence.tolist() for name, of_sequence in losses.items()}
        if run.is_last:
            run.ranks.on_first(lambda: write_json(run.config.run.out / "heldout.json", by_model))
            by_model |= self._without_fp8()
        return by_model

    def _without_fp8(self) -> dict[str, list[float]]:
        """Return the held-out losses of the FP8 model's weights in high precision, beside a baseline on one rank."""
        first, *baselines = self._run.setup.states
        if not baselines or self._run.ranks.count > 1:
            return {}
        with disabled(first.model):
            return {HIGH: self._score(first, "the same weights without FP8").tolist()}

    def _score(self, state: TrainState, computed: str) -> Tensor:
        self._run.log.emit(events.Scoring(step=self._run.done, computed=computed))
        return heldout_losses(state, self._run.setup.heldout)
