"""The training loop: one or two models on the same batches, with guardrails, evaluation and checkpoints."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo import kernels, recipes
from octavo._util import config_reader
from octavo._util.config_reader import blaming
from octavo._util.files import os_errors
from octavo._util.rng import generator_states, restore_generators
from octavo._util.terminal import quantity
from octavo.conversion import enable
from octavo.data import TokenFiles
from octavo.data.chat import TASKS
from octavo.data.quality import judge
from octavo.errors import CheckpointError, DivergedError, Interrupted, RunError
from octavo.guard import GuardEvent
from octavo.kernels.transfers import upload
from octavo.monitor.measurements import arrived, telemetry_of
from octavo.nn.scaling_state import scales
from octavo.nn.telemetry import Telemetry
from octavo.train import checkpoint, events
from octavo.train import device as devices
from octavo.train.batches import BatchDrift, SourceLosses
from octavo.train.calibrate import recalibration_of
from octavo.train.config import RunConfig
from octavo.train.device import gc_frozen
from octavo.train.directory import RunDirectory, check_directory, rescue_path
from octavo.train.evaluate import accuracy_by_task, answers_given, heldout_losses
from octavo.train.files import MetricsFile, read_metrics, write_json
from octavo.train.guarding import GuardedRun
from octavo.train.memory import peaks
from octavo.train.parallel import Ranks, ranks_of
from octavo.train.record import StoreReporter
from octavo.train.resume import check_same_run
from octavo.train.schedule import learning_rate, warm_up_note
from octavo.train.setup import Setup, set_up
from octavo.train.state_tensors import place, restore_tensors, state_tensors
from octavo.train.stopping import StopSignals
from octavo.train.summary import summarise
from octavo.train.timing import Stopwatch
from octavo.train.train_state import StepMetrics, TrainState


def train(
    config: RunConfig, *, reporters: Sequence[events.Reporter] = (), resume: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Carry out a run and return its summary, which is also written to `summary.json` in the run's directory.

    Under torchrun all ranks call it; only rank 0 writes and reports. After a restart by torchrun the run resumes from
    the newest checkpoint.

    Raises:
        ConfigError: invalid configuration, or the directory already contains a run or something else.
        DataError: the source has no text, or too little.
        CheckpointError: no checkpoint, one of another run, or one that cannot be read or written.
        DivergedError: loss, weights or optimizer states are no longer finite.
        RunError: another process writes to the directory, it has been removed, or a file cannot be written.
        Interrupted: SIGINT or SIGTERM; in the training loop a checkpoint has been saved first.
    """
    with ranks_of(config) as ranks:
        if ranks.launch.restarts:
            resume = checkpoint.latest(config.run.out / "checkpoints") is not None
            overwrite = not resume
        own = reporters if ranks.is_first else ()
        with RunDirectory(config.run.out) if ranks.is_first else nullcontext() as directory:
            check_directory(config.run.out, resume=resume, overwrite=overwrite)
            for reporter in own:
                reporter.report(events.Preparing(config=config))
            trainer = Trainer(set_up(config, ranks), own, directory)
            if resume:
                trainer.resume()
            return ranks.broadcast(trainer.run())


class Trainer:
    """A run in progress."""

    def __init__(self, setup: Setup, reporters: Sequence[events.Reporter], locked: RunDirectory | None = None) -> None:
        self.setup = setup
        self.config = setup.config
        self.ranks: Ranks = setup.ranks
        self.directory = setup.config.run.out
        self.checkpoints = self.directory / "checkpoints"
        self.done = 0
        """Number of steps made."""
        self._reporters = list(reporters)
        self._locked = locked
        self._signals = StopSignals(says=self.ranks.is_first)
        self._earlier: Mapping[str, Any] = {"seconds": 0.0, "fp8_gemms": {}, "fallbacks": []}
        self._started = self._since = time.perf_counter()
        self._since_step = 0
        self.telemetry: Telemetry | None = None
        self._measured: NDArray[np.float32] | None = None
        """The newest telemetry values that have arrived."""
        self._heldout: dict[int, float] = {}
        """Step -> held-out loss of the first model."""
        self._refused: set[str] = set()
        self._overflows: Mapping[str, int] = {}
        """Steps that loss scaling had skipped at the last line of the log, by model."""
        self._records: tuple[MetricsFile, StoreReporter] | None = None
        """The files that are cut to a checkpoint when a run resumes, on the first rank."""
        self._resumed: checkpoint.Checkpoint | None = None
        self._drift = BatchDrift(setup.corpus.train, setup.config.model.vocab, setup.end_of_document)
        self._sources = SourceLosses(setup.corpus.heldout_sources, setup.config.data.sequence)
        self.start_telemetry()
        self._recalibration = recalibration_of(self.config, self.setup.states[0].model)
        self._guarded = GuardedRun(self)
        self._recipe = self._shown = self.config.run.recipe
        """The recipe of the schedule that the FP8 model has, and what it computes by: that, or `bf16`."""
        self._first_plan = setup.plan

    def start_telemetry(self) -> None:
        """Start telemetry of the FP8 layers as they are now, from the next step on."""
        run, plan, together = self.config.run, self.setup.plan, self.ranks.count > 1
        every, histograms = run.telemetry_every, run.histograms_every
        self.telemetry = None
        if plan is not None and every:
            model, order = self.setup.states[0].model, [layer.name for layer in plan.layers]
            self.telemetry = telemetry_of(model, every, histograms, together=together, order=order)
        if self.telemetry is not None:
            self.telemetry.restart(self.done)

    def go_back(self, step: int) -> None:
        """Continue counting from an earlier step, after a rollback."""
        self.done = step
        self._shown = "bf16" if self.is_bf16(step - 1) else self.config.run.recipe_of(step - 1)
        self._heldout = {at: loss for at, loss in self._heldout.items() if at <= step}
        self._restart_clock()

    def resume(self) -> None:
        """Load the newest checkpoint.

        Raises:
            CheckpointError: it cannot be read, or is of another run.
            NonFiniteError: it contains a NaN or infinite weight or optimizer state.
        """
        newest = checkpoint.find(self.checkpoints)[-1]
        found = checkpoint.load(newest, ranks=self.ranks, place=None if self.ranks.count == 1 else self._place)
        check_same_run(found.state["config"], self.config, found.path)
        if self.ranks.is_greedy and found.state.get("ranks") != self.ranks.count:
            raise CheckpointError(
                f"{found.path}: with parallel.zero = 'greedy' each rank saved the states of its own tensors:"
                f" resume with {found.state.get('ranks')} ranks, not {self.ranks.count}."
            )
        if found.step > self.config.run.steps:
            raise CheckpointError(f"{found.path}: is past the end of this run of {self.config.run.steps} steps.")
        if (recipe := found.state.get("recipe", self._recipe)) != self._recipe:
            self._change_recipe(recipe)  # before what the checkpoint holds of it
        if "guard" in found.state:
            with blaming(found.path / "state.json", CheckpointError):  # first: it converts layers to their recipes
                self._guarded.guard.load_state_dict(found.state["guard"])
        # A twin that is not in the checkpoint had ended before.
        self.setup.states = tuple(state for state in self.setup.states if state.name in found.tensors)
        for state in self.setup.states:
            with blaming(found.path, CheckpointError):
                own = {name: tensor for name, tensor in found.tensors[state.name].items() if state.holds(name)}
                restore_tensors(state, own, found.path)
        with blaming(found.path, CheckpointError):
            restore_generators(found.tensors["random"])
        with blaming(found.path / "state.json", CheckpointError):
            self.setup.loader.load_state_dict(found.state["loader"])
            self._earlier = {**found.state["totals"]}
            self._heldout = {int(step): float(loss) for step, loss in found.state.get("heldout", {}).items()}
        self._overflows = {state.name: int(state.loss_scale.overflows) for state in self._scaled()}
        self._resumed, self.done, self._since_step = found, found.step, found.step
        if self.setup.plan is not None:
            self._shown = "bf16" if self.is_bf16(self.done - 1) else self._recipe
            enable(self.setup.states[0].model, self._shown == self._recipe)
        if self.telemetry is not None:
            self.telemetry.restart(found.step)

    def _place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return memory for the checkpoint tensor `<model>.<name>`; None if this rank has no part of it."""
        model, _, own = name.partition(".")
        state = next(known for known in self.setup.states if known.name == model)
        return place(state, own, shape, dtype) if state.holds(own) else None

    def run(self) -> dict[str, Any]:
        """Train to the last step, evaluate, and return the summary."""
        with self._signals:
            return self._run()

    def _run(self) -> dict[str, Any]:
        try:
            self._open_directory()
            self.emit(self._start_event())
            if not self.done and (note := warm_up_note(self.config.optimizer)):
                self.emit(GuardEvent(0, "warning", "warm-up", note))
            run = self.config.run
            if not self.done and self.setup.plan is None and run.leaves_recipe:
                text = f"recipe '{run.recipe}' has no layer in FP8: run.bf16_first_steps and run.last_share do nothing"
                self.emit(GuardEvent(0, "warning", "schedule", text))
            self._judge_text()
            with kernels.record() as self._ledger, gc_frozen(self.setup.device) as after_step:
                self._finish_resumed_step()
                with self._stoppable():
                    while self.done < self.config.run.steps or self._guarded.check_all():
                        self._step()
                        after_step()
                for state in self.setup.states:
                    state.drop_graph()
                heldout = self._evaluate()
            summary = self._summarise(heldout)
            if self.ranks.is_first:
                write_json(self.directory / "summary.json", summary)
                self._save_scales()
            history, kind = self._history(), self.config.model.architecture
            self.emit(events.Finished(summary=summary, history=history, directory=self.directory, architecture=kind))
        finally:
            try:
                self._emit_last_tensors()
            finally:
                for reporter in self._reporters:
                    reporter.close()
        return summary

    def _finish_resumed_step(self) -> None:
        """Do what follows a checkpoint in its step: records that an interrupted run made of it were cut."""
        if self._resumed is None or "recorded" not in self._resumed.state:
            return
        if self._records is not None:
            self._records[1].report(events.Saved(step=self.done, path=self._resumed.path))
        if self._due(self.config.run.eval_every) and self.done < self.config.run.steps:
            self._evaluate()
        self._restart_clock()

    def _step(self) -> None:
        run, device = self.config.run, self.setup.device
        self._guarded.guard.before()
        lr = self._guarded.guard.lr(self._learning_rate())
        if not self._apply_schedule():
            return
        inputs_BT, targets_BT = next(self.setup.loader)
        batch_BT = inputs_BT
        models = [state.model for state in self.setup.states]
        inputs_BT = self.ranks.send_tokens(inputs_BT, device, models, run.accumulate)
        targets_BT = upload(targets_BT, device)
        self.done += 1
        self.ranks.begin_step(self.done)
        metrics, watch = {}, Stopwatch(device)
        for state in self.setup.states:
            metrics[state.name] = state.step(inputs_BT, targets_BT, step=self.done, lr=lr, accumulate=run.accumulate)
            watch.mark(state.name)
            self._report_graph_refusal(state)
        if self.telemetry is not None and self.telemetry.done < self.done:
            self.telemetry.step()  # the optimizer skipped the step, and did not close it
        self._recalibrate()
        self.emit_tensors()
        last = self.done == run.steps
        log = last or self.done == 1 or self._due(run.log_every)
        stop = self._asked_to_stop() if log or self.ranks.count == 1 else 0  # ranks agree on the step
        save = last or self._due(run.checkpoint_every) or stop > 0
        evaluate = self._due(run.eval_every) and not last
        first, *twin = (metrics[state.name] for state in self.setup.states)
        if self._guarded.after(lr, first.loss, first.gradient_norm, twin[0].loss if twin else None) or (
            (save or evaluate) and self._guarded.check_all()
        ):
            return  # rolled back
        # Reading a result waits for a GPU; on a CPU it costs nothing.
        if log or save or device.type == "cpu":
            self._check()
        if log:
            self._log(metrics, watch, lr, self._drift.measure(batch_BT))
        if save:
            self._check_directory()
            self._save(self.checkpoints)
        if stop:
            raise Interrupted(stop)
        if evaluate:
            self._evaluate()
        if save or evaluate:
            self._restart_clock()

    def _report_graph_refusal(self, state: TrainState) -> None:
        """Emit, once per model, why its steps could not be captured as a CUDA graph."""
        if state.replay is not None and state.replay.refusal and state.name not in self._refused:
            self._refused.add(state.name)
            text = f"steps of the {state.name.upper()} model are launched kernel by kernel, not as a CUDA graph"
            self.emit(GuardEvent(self.done, "warning", "graph", f"{text}: {state.replay.refusal}"))

    def _recalibrate(self) -> None:
        """Recalibrate static scales if due; reading saturation waits for the device."""
        if self._recalibration is None:
            return
        self._recalibration.done = self.done - 1  # a rollback may have changed it
        if self._recalibration.updates.looks(self.done) and self.telemetry is not None:
            self._await_tensors()
            self._recalibration.rows = self.telemetry.rows
        if made := self._recalibration.step(self._measured):
            origin = next(iter(made.values())).origin
            how = f": {origin.how}" if origin else ""
            text = f"static scales of {quantity(len(made), 'tensor')} were recalibrated{how}"
            self.emit(GuardEvent(self.done, "info", "recalibration", text, action="scales recalibrated"))
            for name, new in made.items():
                old, (layer, _, role) = new.previous[0].scale if new.previous else None, name.rpartition(".")
                text = f"static scale {new.scale:.4g}, before {'unknown' if old is None else f'{old:.4g}'}"
                self.emit(GuardEvent(self.done, "info", "scale", text, "", layer, role, new.scale, old))

    def emit_tensors(self) -> None:
        """Emit the tensor statistics of all steps that have arrived."""
        for step, values, histograms in arrived(self.telemetry):
            self._measured = values
            self._guarded.measured(step, values)
            self.emit(events.TensorsMeasured(step=step, values=values, histograms=histograms))

    def _await_tensors(self) -> None:
        """Emit the tensor statistics of all steps; waits for the device."""
        if self.telemetry is not None:
            self.telemetry.wait()
            self.emit_tensors()

    def _emit_last_tensors(self) -> None:
        """Emit statistics still in flight, also after a failure, which they may explain."""
        self._await_tensors()
        if self.telemetry is not None:
            self.telemetry.detach()

    def _learning_rate(self) -> float:
        return learning_rate(self.config.optimizer, self.done, self.config.run.steps, [*self._heldout.values()])

    def _apply_schedule(self) -> bool:
        """Convert the FP8 model to the recipe of the next step and emit a change; return False after a rollback."""
        if self.setup.plan is None:
            return True
        recipe = self.config.run.recipe_of(self.done)
        if recipe != self._recipe:
            if self._guarded.check_all():
                return False
            self._change_recipe(recipe)
        before, self._shown = self._shown, "bf16" if self.is_bf16(self.done) else recipe
        enable(self.setup.states[0].model, self._shown == recipe)
        if self._shown != before:
            self.emit(events.Switched(step=self.done + 1, recipe=self._shown))
        return True

    def _change_recipe(self, recipe: str) -> None:
        """Convert the FP8 model to another recipe of the schedule. Stored scales end here, and are written."""
        if self.done and self.ranks.is_first:
            self._save_scales()
        if reason := self._guarded.guard.change_recipe(recipes.load(recipe)):
            raise RunError(f"run.last_recipe: the model cannot go on by '{recipe}': {reason}.")
        needs_scales = recipes.load(recipe).needs_calibration
        self._recalibration = recalibration_of(self.config, self.setup.states[0].model) if needs_scales else None
        self._recipe = recipe

    def is_bf16(self, step: int) -> bool:
        """Return True if the FP8 model makes `step`, counted from 0, in BF16; False before the first step."""
        return step >= 0 and self.setup.plan is not None and self.config.run.is_bf16(step)

    def _due(self, every: int) -> bool:
        return every > 0 and self.done % every == 0

    def _check(self) -> None:
        self.setup.states[0].check(self._way_back())
        for twin in self.setup.states[1:]:
            try:
                twin.check("")
            except RunError as error:
                self.setup.states = self.setup.states[:1]
                text = f"{error} The run goes on without its BF16 baseline."
                self.emit(GuardEvent(self.done, "error", "twin", " ".join(text.split())))

    def _way_back(self) -> str:
        last = checkpoint.latest(self.checkpoints)
        return f"The last good checkpoint is {last}." if last else "There is no checkpoint yet."

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Let signals stop the run after a step."""
        heartbeat = self.ranks.heartbeat
        self._signals.waits = True
        if heartbeat is not None:
            heartbeat.saves_on_signal = True
        yield
        self._signals.waits = False
        if heartbeat is not None:
            heartbeat.saves_on_signal = False

    def _asked_to_stop(self) -> int:
        """Return the signal that asks the run to stop after this step, 0 if there is none."""
        self._check_directory()
        return max(self.ranks.gather(self._signals.asked))

    def _check_directory(self) -> None:
        """Check that the run's directory is still there.

        Raises:
            RunError: it is not; a checkpoint, the configuration and the log are saved beside it.
        """
        if not any(self.ranks.gather(self._locked is not None and not self._locked.is_there())):
            return
        out = self.ranks.broadcast(rescue_path(self.directory))
        self._save(out / "checkpoints")
        if self.ranks.is_first:
            write_json(out / "config.json", config_reader.to_dict(self.config.with_run(out=out)))
            if self._records is not None:
                self._records[0].copy_to(out / "metrics.jsonl")
        raise RunError(
            f"{self.directory}: was removed or renamed; noticed at step {self.done}, and the run stops. A checkpoint"
            f" and the log are saved: go on with octavo train {out / 'config.json'} --resume"
        )

    def _judge_text(self) -> None:
        """Emit what is wrong with the text, once per run."""
        for text, value, limit in judge(self._corpus()) if not self.done else ():
            self.emit(GuardEvent(0, "warning", "data", text, value=value, limit=limit))

    def _log(self, metrics: Mapping[str, StepMetrics], watch: Stopwatch, lr: float, batch: Mapping[str, float]) -> None:
        milliseconds = watch.milliseconds()
        per_step = self.config.run.batch * self.config.data.sequence
        elapsed = time.perf_counter() - self._since
        event = events.Logged(
            step=self.done,
            loss={name: float(m.loss) for name, m in metrics.items()},
            gradient_norm={name: float(m.gradient_norm) for name, m in metrics.items()},
            milliseconds=milliseconds,
            lr=lr,
            tokens=self.done * per_step,
            tokens_per_second=(self.done - self._since_step) * per_step / elapsed,
            loss_scale={state.name: float(state.loss_scale.scale) for state in self._scaled()},
            overflows={state.name: int(state.loss_scale.overflows) for state in self._scaled()},
            fp8=self._fp8_shares(),
            batch=batch,
        )
        self._restart_clock()
        self.emit(event)
        for name, overflows in event.overflows.items():
            if overflows > self._overflows.get(name, 0):
                text = f"{name.upper()} gradients overflowed, {quantity(overflows, 'step')} skipped so far"
                action = f"loss scale {event.loss_scale[name]:g}"
                self.emit(GuardEvent(self.done, "warning", "overflow", text, action, value=overflows))
        self._overflows = event.overflows
        if (found := self._drift.drifts(batch["batch_divergence"])) is not None:
            text = f"batches drift: their ids are distributed otherwise than before ({found[0]:.3g} nats per id)"
            self.emit(GuardEvent(self.done, "warning", "batch drift", text, value=found[0], limit=found[1]))

    def _fp8_shares(self) -> dict[str, float]:
        """Return the shares of products in FP8 in the step that was just made."""
        shares = {} if self.setup.plan is None else self.setup.plan.fp8_shares
        return dict.fromkeys(shares, 0.0) if self.is_bf16(self.done - 1) else shares

    def _scaled(self) -> list[TrainState]:
        return [state for state in self.setup.states if state.loss_scale.skips]

    def _restart_clock(self) -> None:
        self._since, self._since_step = time.perf_counter(), self.done

    def _evaluate(self) -> dict[str, list[float]]:
        """Return the held-out loss of each sequence by model."""
        losses = {state.name: heldout_losses(state, self.setup.heldout) for state in self.setup.states}
        loss = {name: float(of_sequence.mean()) for name, of_sequence in losses.items()}
        first = self.setup.states[0].name
        by_source = self._sources.by_source(losses[first])
        self.emit(events.Evaluated(step=self.done, loss=loss, by_source=by_source))
        for source, value, limit in self._sources.rises(loss[first], by_source):
            text = f"the held-out loss of source '{source}' rises, although that of the whole text does not"
            self.emit(GuardEvent(self.done, "warning", "source", text, value=value, limit=limit))
        for name, value in loss.items():
            if not math.isfinite(value):
                raise DivergedError(
                    f"the held-out loss of the {name.upper()} model is {value} after step {self.done}."
                    f" {self._way_back()} Try a lower --lr, or --recipe bf16 to compare."
                )
        self._watch_plateau(next(iter(loss.values())))
        by_model = {name: of_sequence.tolist() for name, of_sequence in losses.items()}
        if self.done == self.config.run.steps and self.ranks.is_first:
            write_json(self.directory / "heldout.json", by_model)
        return by_model

    def _watch_plateau(self, loss: float) -> None:
        """Note a held-out loss; emit an event if the schedule halves the learning rate because of it."""
        before = self._learning_rate()
        self._heldout[self.done] = loss
        if self.config.optimizer.lr_schedule == "plateau" and (after := self._learning_rate()) != before:
            text = f"the held-out loss has stopped falling: the learning rate is {after:.3g} in place of {before:.3g}"
            self.emit(GuardEvent(self.done, "info", "schedule", text, action="learning rate halved"))

    def _save(self, checkpoints: Path) -> None:
        """Write a checkpoint.

        Raises:
            DivergedError: a weight or an optimizer state is not finite; nothing is written.
        """
        self._await_tensors()  # what was measured before a checkpoint is recorded before it
        tensors = {state.name: state_tensors(state) for state in self.setup.states}
        faults = ((name, checkpoint.first_non_finite(named)) for name, named in tensors.items())
        fault = next((f"in the {name.upper()} model {text}" for name, text in faults if text), "")
        if fault := self.ranks.first_text(fault):
            raise DivergedError(
                f"after step {self.done}, {fault}: no checkpoint is written. {self._way_back()} Try a lower --lr, or"
                " --recipe bf16 to compare."
            )
        plain = {
            "config": config_reader.to_dict(self.config),
            "loader": self.setup.loader.state_dict(),
            "totals": self._totals(),
            "heldout": {str(step): loss for step, loss in self._heldout.items()},
            "versions": devices.versions(),
            "guard": self._guarded.guard.state_dict(),
            "recipe": self._recipe,
        }
        if self._records is not None:
            metrics, store = self._records
            plain["recorded"] = {"metrics": metrics.lines, "events": store.flush()}
        path = checkpoint.save(
            checkpoints,
            self.done,
            {**tensors, "random": generator_states()},
            plain,
            keep=self.config.run.keep,
            ranks=self.ranks,
        )
        self.emit(events.Saved(step=self.done, path=path))

    def _save_scales(self) -> None:
        """Write the stored scales of the FP8 model as a calibration file."""
        scaling_state = scales(self.setup.states[0].model)
        if scaling_state is not None and scaling_state.is_known:
            scaling_state.save(self.directory / "scales.json")

    def _totals(self) -> dict[str, Any]:
        """Return the totals since the first step, across resumes."""
        earlier = self._earlier
        return {
            "seconds": earlier["seconds"] + time.perf_counter() - self._started,
            "fp8_gemms": dict(Counter(earlier["fp8_gemms"]) + self._ledger.gemms),
            "fallbacks": [*dict.fromkeys([*earlier["fallbacks"], *self._ledger.fallbacks])],
        }

    def _open_directory(self) -> None:
        if not self.ranks.is_first:
            return
        with os_errors(self.directory, RunError):
            self.directory.mkdir(parents=True, exist_ok=True)
        if not self.done:
            checkpoint.discard(self.checkpoints)
        (self.directory / "summary.json").unlink(missing_ok=True)
        write_json(self.directory / "config.json", config_reader.to_dict(self.config))
        first = self.setup.states[0]
        plans = {"plan": self._first_plan, "tensor": first.tensor_plan, "sharding": first.shard_plan}
        for name, plan in plans.items():
            if plan is not None:
                write_json(self.directory / f"{name}.json", json.loads(plan.to_json()))
        if first.pipeline is not None:
            write_json(self.directory / "pipeline.json", first.pipeline)
        kept = {} if self._resumed is None else self._resumed.state.get("recorded", {})
        file = self.directory / "metrics.jsonl"
        metrics = MetricsFile(file, keep_until=self.done, keep_lines=kept.get("metrics"))
        self._reporters.insert(0, metrics)
        store = StoreReporter(self.config, self.setup.device, done=self.done, events=kept.get("events"))
        self._reporters.insert(1, store)
        self._records = metrics, store

    def _start_event(self) -> events.Started:
        return events.Started(
            config=self.config,
            models=tuple(state.name for state in self.setup.states),
            device=self._devices(),
            parameters=self.setup.states[0].size,
            plan=self.setup.plan,
            corpus=self._corpus(),
            first_step=self.done,
            tensors=self._guarded.rows,
        )

    def _summarise(self, heldout: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        totals, state = self._totals(), self.setup.states[0]
        facts = {
            "device": self._devices(),
            "parameters": state.size,
            "weight_bytes_per_parameter": state.weight_bytes(),
            "optimizer_bytes_per_parameter": state.state_bytes(),
            "fp8_gemms": totals["fp8_gemms"],
            "fallbacks": totals["fallbacks"],
            "skipped_steps": {state.name: int(state.loss_scale.overflows) for state in self._scaled()},
            "seconds": totals["seconds"],
            "tasks": self._tasks(),
            "energy_kwh": self._energy(),
        }
        memory = peaks(self.config, self.setup.device, ranks=self.ranks.count)
        return summarise(self.config, facts, heldout, _facts(self.setup.corpus), self._history(), memory)

    def _energy(self) -> float | None:
        """Return the kWh of all GPUs, those of the first rank's by the ranks; None where NVML counts none."""
        found = None if self._records is None else self._records[1].energy_kwh()
        return None if found is None else found * self.ranks.count

    def _corpus(self) -> dict[str, Any]:
        return {**_facts(self.setup.corpus), **config_reader.to_dict(self.setup.statistics)}

    def _tasks(self) -> dict[str, Any]:
        """Return the accuracy by task on held-out conversations; none for text."""
        if self.config.data.format != "chat":
            return {}
        right = {state.name: answers_given(state, self.setup.heldout) for state in self.setup.states}
        named = json.loads((self.setup.corpus.directory / TASKS).read_text(encoding="utf-8"))
        return accuracy_by_task(named[: len(next(iter(right.values())))], right)

    def _devices(self) -> str:
        device, count = devices.describe(self.setup.device), self.ranks.count
        return device if count == 1 else f"{count} x {device}"

    def _history(self) -> list[dict[str, Any]]:
        return read_metrics(self.directory / "metrics.jsonl")

    def emit(self, event: events.Event) -> None:
        """Pass an event to all reporters."""
        for reporter in self._reporters:
            reporter.report(event)


def _facts(corpus: TokenFiles) -> dict[str, Any]:
    """Return the facts of the corpus without its path on this machine."""
    facts = config_reader.to_dict(corpus)
    return {key: value for key, value in facts.items() if key != "directory"}
