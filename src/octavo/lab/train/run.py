"""The training loop: one or two models on the same batches, with guardrails, evaluation and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo import kernels
from octavo.conversion import disabled, enable
from octavo.errors import CheckpointError, DivergedError, Interrupted, RunError
from octavo.kernels.runtime.transfers import upload
from octavo.lab.guard import GuardEvent
from octavo.lab.loop import Step
from octavo.lab.train import checkpoint, events
from octavo.lab.train.background import BackgroundWriter
from octavo.lab.train.calibrate import recalibration_events
from octavo.lab.train.config import RunConfig
from octavo.lab.train.device import gc_frozen
from octavo.lab.train.directory import RunDirectory, check_directory, rescue_path
from octavo.lab.train.evaluate import heldout_losses
from octavo.lab.train.files import write_json
from octavo.lab.train.guarding import GuardedRun
from octavo.lab.train.inputs import with_files
from octavo.lab.train.parallel import ranks_of
from octavo.lab.train.resume import load_checkpoint, save_checkpoint
from octavo.lab.train.schedule import learning_rate
from octavo.lab.train.setup import Setup, set_up
from octavo.lab.train.sharding import send_tokens
from octavo.lab.train.stopping import StopSignals
from octavo.lab.train.summary import HIGH
from octavo.lab.train.timing import Stopwatch
from octavo.lab.train.train_state import StepMetrics, TrainState


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
            config = with_files(config) if resume else config
            for reporter in own:
                reporter.report(events.Preparing(config=config))
            began = config.run.out if resume else None
            trainer = Trainer(set_up(config, ranks, resume=resume, began=began), own, directory)
            if resume:
                trainer.resume()
            return ranks.broadcast(trainer.run())


class Trainer(GuardedRun):
    """A run in progress."""

    def __init__(self, setup: Setup, reporters: Sequence[events.Reporter], locked: RunDirectory | None = None) -> None:
        super().__init__(setup, reporters)
        self.directory = self.config.run.out
        self._locked = locked
        self._signals = StopSignals(prints=self.ranks.is_first, heartbeat=self.ranks.heartbeat)
        self._resumed: checkpoint.Checkpoint | None = None
        in_background = self.config.run.checkpoint_write == "background"
        self._writer = BackgroundWriter(self.ranks) if in_background else None

    def resume(self) -> None:
        """Load the newest checkpoint; errors as `load_checkpoint`."""
        self._resumed = load_checkpoint(self)
        self.done = self._resumed.step
        self.log.restart_clock(self.done)
        if self.setup.plan is not None:
            enable(self._state.model, self.precision == self.recipe)
        if self.telemetry is not None:
            self.telemetry.restart(self.done)

    def run(self) -> dict[str, Any]:
        """Train to the last step, evaluate, and return the summary."""
        with self._signals, self._closing():
            self.log.open(self._resumed)
            self.log.start(self.done, self.rows)
            with kernels.record() as self.log.ledger, gc_frozen(self.setup.device) as after_step:
                self._finish_resumed_step()
                with self._signals.deferred():
                    while self.done < self.config.run.steps:
                        self._step()
                        after_step()
                for state in self.setup.states:
                    state.drop_graph()
                heldout = self._evaluate()
            self._end_write(wait=True)
            self._save_scales()
            return self.log.finish(heldout)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Record what was measured and close the log after the block; an error of the block is the one that is raised.

        A full disk, for example, fails again when files are closed. A checkpoint that is being written is completed.
        """
        try:
            yield
        except BaseException:
            if self._writer is not None:
                self._writer.close(self.config.parallel.timeout)
            with suppress(Exception):
                self._close()
            raise
        self._close()

    def _close(self) -> None:
        try:
            self._collect_telemetry(wait=True)  # statistics in flight may explain a failure
            if self.telemetry is not None:
                self.telemetry.detach()
        finally:
            self.log.close()

    def _finish_resumed_step(self) -> None:
        """Repeat the evaluation that follows the checkpoint in its step, whose records were cut."""
        if self._resumed is None or "recorded" not in self._resumed.state:
            return
        if self._due(self.config.run.eval_every) and self.done < self.config.run.steps:
            self._evaluate()
        self.log.restart_clock(self.done)

    def _step(self) -> None:
        """Make a step, then check, log, save and evaluate as far as each is due."""
        run = self.config.run
        self._end_write()
        self.guard.before_step()
        lr = min(self._learning_rate(), self.lr_limit)
        if not self._apply_schedule():
            return  # rolled back
        batch_BT, targets_BT = next(self.setup.loader)
        metrics, watch = self._update(batch_BT, targets_BT, lr)
        last = self.done == run.steps
        log = last or self.done == 1 or self._due(run.log_every)
        stop = 0
        if log or self.ranks.count == 1:  # on several ranks only at steps in which all of them ask
            self._check_directory()
            stop = max(self.ranks.gather(self._signals.asked))
        save = last or self._due(run.checkpoint_every) or stop > 0 or self._owes_checkpoint
        evaluate = self._due(run.eval_every) and not last
        first, *baseline = (metrics[state.name] for state in self.setup.states)
        made = Step(
            number=self.done,
            lr=lr,
            loss=first.loss,
            gradient_norm=first.gradient_norm,
            baseline_loss=baseline[0].loss if baseline else None,
            reads={"weights"} if save or evaluate else set(),
        )
        if self.guard.after_step(made):
            return  # rolled back
        # Reading a result waits for a GPU; on a CPU it costs nothing.
        if log or save or self.setup.device.type == "cpu":
            self._check_finite()
        if log:
            self.log.log_step(self.done, metrics, watch, lr, batch_BT)
        if save:
            self._check_directory()
            self._save(self.checkpoints, self._writer)
            self._owes_checkpoint = False
        if stop:
            self._end_write(wait=True)
            raise Interrupted(stop)
        if evaluate:
            self._evaluate()
        if save or evaluate:
            self.log.restart_clock(self.done)

    def _update(self, inputs_BT: Tensor, targets_BT: Tensor, lr: float) -> tuple[dict[str, StepMetrics], Stopwatch]:
        """Step all models on a batch; return what was measured of each, and the time of each."""
        device, parts = self.setup.device, self.config.run.accumulate
        inputs_BT = send_tokens(self.ranks, inputs_BT, device, self.models, parts)
        targets_BT = upload(targets_BT, device)
        self.done += 1
        self.ranks.begin_step(self.done)
        metrics, watch = {}, Stopwatch(device)
        for state in self.setup.states:
            metrics[state.name] = state.step(inputs_BT, targets_BT, step=self.done, lr=lr, accumulate=parts)
            watch.mark(state.name)
            self.log.log_refusal(self.done, state)
        if self.telemetry is not None and self.telemetry.done < self.done:
            self.telemetry.step()  # the optimizer skipped the step, and did not close it
        self._recalibrate()
        self._collect_telemetry()
        return metrics, watch

    def _recalibrate(self) -> None:
        """Recalibrate static scales if due; reading saturation waits for the device."""
        if self._recalibration is None:
            return
        self._recalibration.done = self.done - 1  # a rollback may have changed it
        if self._recalibration.updates.looks(self.done) and self.telemetry is not None:
            self._collect_telemetry(wait=True)
            self._recalibration.rows = self.telemetry.rows
        for event in recalibration_events(self.done, self._recalibration.step(self._newest)):
            self.log.emit(event)

    def _learning_rate(self) -> float:
        return learning_rate(self.config.optimizer, self.done, self.config.run.steps, [*self.heldout.values()])

    def _apply_schedule(self) -> bool:
        """Convert the FP8 model to the recipe of the next step and emit a change; return False after a rollback."""
        if self.setup.plan is None:
            return True
        recipe, is_bf16 = self.config.run.recipe_of(self.done), self.config.run.is_bf16(self.done)
        before, after = self.precision, "bf16" if is_bf16 else recipe
        if recipe != self.recipe:
            if self.guard.check_all():
                return False
            self.switch_recipe(recipe)
        enable(self._state.model, after == recipe)
        if after != before:
            self.log.emit(events.Switched(step=self.done + 1, recipe=after))
        return True

    def _due(self, every: int) -> bool:
        return every > 0 and self.done % every == 0

    def _check_finite(self) -> None:
        self._state.check(self.checkpoint_note())
        for baseline in self.setup.states[1:]:
            try:
                baseline.check("")
            except RunError as error:
                baseline.drop_graph()
                self.setup.states = self.setup.states[:1]
                text = f"{error} The run goes on without its BF16 baseline."
                self.log.emit(GuardEvent(self.done, "error", "baseline", " ".join(text.split())))

    def _check_directory(self) -> None:
        """Check that the run's directory is still there.

        Raises:
            RunError: it is not; a checkpoint, the configuration and the log are saved beside it.
        """
        if not any(self.ranks.gather(self._locked is not None and not self._locked.is_there())):
            return
        out = self.ranks.broadcast(rescue_path(self.directory))
        if self._writer is not None:
            self._writer.close(self.config.parallel.timeout)  # its checkpoint went with the directory
        self._save(out / "checkpoints", writer=None)
        if self.ranks.is_first:
            self.log.rescue(out)
        raise RunError(
            f"{self.directory}: was removed or renamed; noticed at step {self.done}, and the run stops. A checkpoint"
            f" and the log are saved: go on with octavo train {out / 'config.json'} --resume"
        )

    def _evaluate(self) -> dict[str, list[float]]:
        """Return the held-out loss of each sequence by model."""
        losses = {state.name: self._score(state, events.MODELS[state.name]) for state in self.setup.states}
        loss = {name: float(of_sequence.mean()) for name, of_sequence in losses.items()}
        first = self._state.name
        self.log.log_evaluation(self.done, loss, losses[first])
        for name, value in loss.items():
            if not math.isfinite(value):
                raise DivergedError(
                    f"the held-out loss of the {name.upper()} model is {value} after step {self.done}."
                    f" {self.checkpoint_note()} Try a lower --lr, or --recipe bf16 to compare."
                )
        self._watch_plateau(loss[first])
        by_model = {name: of_sequence.tolist() for name, of_sequence in losses.items()}
        if self.done == self.config.run.steps:
            self.ranks.on_first(lambda: write_json(self.directory / "heldout.json", by_model))
            by_model |= self._without_fp8()
        return by_model

    def _without_fp8(self) -> dict[str, list[float]]:
        """Return the held-out losses of the FP8 model's weights in high precision, beside a baseline on one rank."""
        if len(self.setup.states) < 2 or self.ranks.count > 1:
            return {}
        with disabled(self._state.model):
            return {HIGH: self._score(self._state, "the same weights without FP8").tolist()}

    def _score(self, state: TrainState, computed: str) -> Tensor:
        self.log.emit(events.Scoring(step=self.done, computed=computed))
        return heldout_losses(state, self.setup.heldout)

    def _watch_plateau(self, loss: float) -> None:
        """Note a held-out loss; emit an event if the schedule halves the learning rate because of it."""
        before = self._learning_rate()
        self.heldout[self.done] = loss
        if self.config.optimizer.lr_schedule == "plateau" and (after := self._learning_rate()) != before:
            text = f"the held-out loss has stopped falling: the learning rate is {after:.3g} in place of {before:.3g}"
            self.log.emit(GuardEvent(self.done, "info", "schedule", text, action="learning rate halved"))

    def _save(self, checkpoints: Path, writer: BackgroundWriter | None) -> None:
        if writer is not None:
            self._end_write(wait=True)
        self._collect_telemetry(wait=True)  # what was measured before a checkpoint is recorded before it
        save_checkpoint(self, checkpoints, writer)

    def _end_write(self, *, wait: bool = False) -> None:
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
            self._check_directory()
            raise
        if written is not None:
            self.log.emit(events.Saved(step=written.step, path=written.path))

    def _emit(self, event: GuardEvent) -> None:
        """Emit an event; before a rollback, which removes checkpoints, one that is being written is completed."""
        if event.back_to is not None:
            self._end_write(wait=True)
        super()._emit(event)
