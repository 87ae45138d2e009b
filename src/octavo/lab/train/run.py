"""The training loop: one or two models on the same batches, with guardrails, evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from octavo import kernels
from octavo.conversion import enable
from octavo.lab.guard import GuardEvent
from octavo.lab.loop import Loop
from octavo.lab.train import checkpoint, events
from octavo.lab.train.config import RunConfig
from octavo.lab.train.device import gc_frozen
from octavo.lab.train.directory import RunDirectory, check_directory
from octavo.lab.train.guarding import GuardedRun
from octavo.lab.train.inputs import with_files
from octavo.lab.train.log import RunLog
from octavo.lab.train.parallel import ranks_of
from octavo.lab.train.parts import Checkpoints, Evaluation, Finite, Groups, Schedule, Sensitivity, Stop
from octavo.lab.train.resume import load_checkpoint
from octavo.lab.train.sampling import Sampling
from octavo.lab.train.setup import Setup, set_up
from octavo.lab.train.stopping import StopSignals
from octavo.lab.train.train_state import RunStep


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


class Trainer:
    """A run in progress: its state, and the loop over it."""

    def __init__(self, setup: Setup, reporters: Sequence[events.Reporter], locked: RunDirectory | None = None) -> None:
        self.setup, self.config = setup, setup.config
        self.log = RunLog(setup, reporters)
        self.state = GuardedRun(setup, self.log, self._emit)
        self.guard, self.schedule = self.state.guard, Schedule(self.state)
        self.loop = Loop[RunStep](self.state)
        self._signals = StopSignals(prints=setup.ranks.is_first, heartbeat=setup.ranks.heartbeat)
        self._checkpoints = Checkpoints(self.state, self.loop, self._signals, locked)
        self._evaluation = Evaluation(self.state, self.schedule)
        self._resumed: checkpoint.Checkpoint | None = None
        self.loop.parts = [
            self._evaluation,
            Stop(self.state, self._checkpoints, self._signals),
            self._checkpoints,
            Sampling(self.state),
            Groups(self.state),
            self.log,
            Finite(self.state),
            self.guard,
            Sensitivity(self.state),
            self.schedule,
        ]

    def _emit(self, event: GuardEvent) -> None:
        """Emit an event of guardrails; the parts of the loop roll back first."""
        if event.back_to is not None:
            self.loop.roll_back(event.back_to)
        self.log.emit(event)

    def resume(self) -> None:
        """Load the newest checkpoint; errors as `load_checkpoint`."""
        state = self.state
        self._resumed = load_checkpoint(state, self.loop)
        state.done = self._resumed.step
        self.log.restart_clock(state.done)
        if self.setup.plan is not None:
            enable(self.setup.states[0].model, state.precision == state.recipe)
        if state.telemetry is not None:
            state.telemetry.restart(state.done)

    def run(self) -> dict[str, Any]:
        """Train to the last step, evaluate, and return the summary."""
        state = self.state
        with self._signals, self._closing():
            self.log.open(self._resumed)
            self.log.start(state.done, state.rows)
            with kernels.record() as self.log.ledger, gc_frozen(self.setup.device) as after_step:
                self._finish_resumed_step()
                with self._signals.deferred():
                    while not state.is_last:
                        self.loop.step()
                        after_step()
                for model in self.setup.states:
                    model.drop_graph()
                heldout = self._evaluation.evaluate()
            self._checkpoints.end_write(wait=True)
            state.save_scales()
            return self.log.finish(heldout)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Record what was measured and close the log after the block; an error of the block is the one that is raised.

        A full disk, for example, fails again when files are closed. A checkpoint that is being written is completed.
        """
        try:
            yield
        except BaseException as error:
            self._checkpoints.abandon()
            with suppress(Exception):
                self._close(error)
            raise
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        try:
            self.state.collect_telemetry(wait=True)  # statistics in flight may explain a failure
            if self.state.telemetry is not None:
                self.state.telemetry.detach()
        finally:
            self.log.close(error)

    def _finish_resumed_step(self) -> None:
        """Repeat the evaluation that follows the checkpoint in its step, whose records were cut."""
        if self._resumed is None or "recorded" not in self._resumed.state:
            return
        if self.state.is_every(self.config.run.eval_every) and not self.state.is_last:
            self._evaluation.evaluate()
        self.log.restart_clock(self.state.done)
