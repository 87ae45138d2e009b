"""The training loop: lanes in lockstep on the same batches, watched, evaluated and kept."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo import kernels, strict
from octavo.conversion import enable
from octavo.data import TokenFiles
from octavo.errors import CheckpointError, ConfigError
from octavo.generators import generator_states, restore_generators
from octavo.guard import Note
from octavo.kernels.uploads import upload
from octavo.monitor.measurements import TelemetrySource, arrived, histograms_of, telemetry_of
from octavo.nn.scales import scales
from octavo.train import checkpoint
from octavo.train import device as devices
from octavo.train.calibrate import recalibration_of
from octavo.train.config import RunConfig
from octavo.train.evaluate import heldout_losses
from octavo.train.events import (
    Evaluated,
    Event,
    Finished,
    Logged,
    Noted,
    Preparing,
    Reporter,
    Saved,
    Started,
    Switched,
    TensorsMeasured,
)
from octavo.train.files import MetricsFile, guarded, read_metrics, write_json
from octavo.train.garbage import spared
from octavo.train.guarding import GuardedRun
from octavo.train.lane import Lane, Measured
from octavo.train.memory import peaks
from octavo.train.parallel import Ranks, ranks_of
from octavo.train.record import StoreReporter
from octavo.train.resume import check_same_run
from octavo.train.schedule import is_bf16, learning_rate
from octavo.train.setup import Setup, set_up
from octavo.train.state import lane_tensors, place, restore_lane
from octavo.train.stopwatch import Stopwatch
from octavo.train.summary import summarise


def train(
    config: RunConfig, *, reporters: Sequence[Reporter] = (), resume: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Carry out a run and return its summary, which `summary.json` in the directory of the run holds too.

    Under torchrun all ranks call it; rank 0 alone writes and reports. Where torchrun has started the ranks again after
    a failure, the run goes on from the newest checkpoint.

    Raises:
        ConfigError: the configuration asks for what does not exist, or the directory already holds a run.
        DataError: the source has no text, or too little.
        CheckpointError: no checkpoint, one of another run, or one that cannot be read or written.
        RunError: the loss is no longer finite, or a file of the run cannot be written.
    """
    with ranks_of(config) as ranks:
        if ranks.launch.restarts:
            resume = checkpoint.latest(config.run.out / "checkpoints") is not None
            overwrite = not resume
        _check_directory(config.run.out, resume=resume, overwrite=overwrite)
        watching = reporters if ranks.is_first else ()
        for reporter in watching:
            reporter.report(Preparing(config=config))
        trainer = Trainer(set_up(config, ranks), watching)
        if resume:
            trainer.resume()
        return ranks.same(trainer.run())


class Trainer:
    """A run in progress."""

    def __init__(self, setup: Setup, reporters: Sequence[Reporter]) -> None:
        self.setup = setup
        self.config = setup.config
        self.ranks: Ranks = setup.ranks
        self.directory = setup.config.run.out
        self.checkpoints = self.directory / "checkpoints"
        self.done = 0
        """Steps made."""
        self._watching = list(reporters)
        self._earlier: Mapping[str, Any] = {"seconds": 0.0, "fp8_gemms": {}, "fallbacks": []}
        self._started = self._since = time.perf_counter()
        self._since_step = 0
        self.telemetry: TelemetrySource | None = None
        self._measured: NDArray[np.float32] | None = None
        """The newest values of telemetry that have arrived."""
        self._refused: set[str] = set()
        self.watch_tensors()
        self._recalibration = recalibration_of(self.config, self.setup.lanes[0].model)
        self._guarded = GuardedRun(self)

    def watch_tensors(self) -> None:
        """Look at the FP8 layers as they are now from the next step on."""
        run, plan, together = self.config.run, self.setup.plan, self.ranks.count > 1
        every, histograms = run.telemetry_every, run.histograms_every
        self.telemetry = None
        if plan is not None and every:
            model, order = self.setup.lanes[0].model, [layer.name for layer in plan.layers]
            self.telemetry = telemetry_of(model, every, histograms, together=together, order=order)
        if self.telemetry is not None:
            self.telemetry.restart(self.done)

    def go_back(self, step: int) -> None:
        """Count from an earlier step on, to which all else was taken back."""
        self.done = step
        self._restart_clock()
        if self.telemetry is not None:
            self.telemetry.restart(step)

    def resume(self) -> None:
        """Take over the state of the newest checkpoint.

        Raises:
            CheckpointError: it cannot be read, or is of another run.
            NonFiniteError: it holds a NaN or an infinite weight.
        """
        newest = checkpoint.find(self.checkpoints)[-1]
        found = checkpoint.load(newest, rank=self.ranks.rank, place=None if self.ranks.count == 1 else self._place)
        check_same_run(found.state["config"], self.config, found.path)
        if found.step > self.config.run.steps:
            raise CheckpointError(f"{found.path}: is past the end of this run of {self.config.run.steps} steps.")
        if "guard" in found.state:
            self._guarded.guard.load_state_dict(found.state["guard"])  # first: layers take the recipes that they had
        for lane in self.setup.lanes:
            own = {name: tensor for name, tensor in found.tensors[lane.name].items() if lane.holds(name)}
            restore_lane(lane, own, found.path)
        restore_generators(found.tensors["random"])
        self.setup.loader.load_state_dict(found.state["loader"])
        self._earlier = found.state["totals"]
        self.done = self._since_step = found.step
        if self.telemetry is not None:
            self.telemetry.restart(found.step)

    def _place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return memory for a tensor of a checkpoint, whose name begins with its lane's; None where it is others'."""
        lane_name, _, own = name.partition(".")
        lane = next(known for known in self.setup.lanes if known.name == lane_name)
        return place(lane, own, shape, dtype) if lane.holds(own) else None

    def run(self) -> dict[str, Any]:
        """Train to the last step, evaluate, and return the summary."""
        try:
            self._open_directory()
            self.tell(self._start_event())
            self._compute_as(self.done - 1)
            with kernels.record() as self._ledger, spared(self.setup.device) as after_step:
                while self.done < self.config.run.steps or self._guarded.settle():
                    self._step()
                    after_step()
                heldout = self._evaluate()
            summary = self._summarise(heldout)
            if self.ranks.is_first:
                write_json(self.directory / "summary.json", summary)
                self._save_scales()
            kind = self.config.model.architecture
            self.tell(Finished(summary=summary, history=self._history(), directory=self.directory, architecture=kind))
        finally:
            try:
                self._tell_of_last_tensors()
            finally:
                for reporter in self._watching:
                    reporter.close()
        return summary

    def _step(self) -> None:
        run, device = self.config.run, self.setup.device
        self._guarded.guard.before()
        lr = self._guarded.guard.lr(self._learning_rate())
        self._switch()
        inputs_BT, targets_BT = next(self.setup.loader)
        models = [lane.model for lane in self.setup.lanes]
        inputs_BT = self.ranks.send_tokens(inputs_BT, device, models, run.accumulate)
        targets_BT = upload(targets_BT, device)
        self.done += 1
        self.ranks.at(self.done)
        measured, watches = {}, {}
        for lane in self.setup.lanes:
            with Stopwatch(device) as watches[lane.name]:
                measured[lane.name] = lane.step(inputs_BT, targets_BT, step=self.done, lr=lr, accumulate=run.accumulate)
            self._tell_of_refusal(lane)
        if self.telemetry is not None and self.telemetry.done < self.done:
            self.telemetry.step()  # the step was skipped: the optimizer did not close it
        self._recalibrate()
        self.tell_of_tensors()
        last = self.done == run.steps
        log = last or self.done == 1 or self._due(run.log_every)
        save = last or self._due(run.checkpoint_every)
        evaluate = self._due(run.eval_every) and not last
        if self._guarded.after(lr, measured[self.setup.lanes[0].name]) or (
            (save or evaluate) and self._guarded.settle()
        ):
            return  # the run went back
        # Reading a result makes a GPU wait for it; a CPU has it anyway.
        if log or save or device.type == "cpu":
            self._check()
        if log:
            self._log(measured, watches, lr)
        if save:
            self._save()
        if evaluate:
            self._evaluate()
        if save or evaluate:
            self._restart_clock()

    def _tell_of_refusal(self, lane: Lane) -> None:
        """Tell, once, that steps could not be captured as a CUDA graph."""
        if lane.replay is not None and lane.replay.refusal and lane.name not in self._refused:
            self._refused.add(lane.name)
            text = f"steps of the {lane.name.upper()} model are launched kernel by kernel, not as a CUDA graph"
            self.tell(Noted(note=Note(self.done, "warning", "graph", f"{text}: {lane.replay.refusal}")))

    def _recalibrate(self) -> None:
        """Make static scales anew where that is due; a look at what saturates waits for the device."""
        if self._recalibration is None:
            return
        self._recalibration.done = self.done - 1  # a run may have gone back
        if self._recalibration.updates.looks(self.done) and self.telemetry is not None:
            self.telemetry.wait()
            self.tell_of_tensors()
            self._recalibration.rows = self.telemetry.rows
        self._recalibration.step(self._measured)

    def tell_of_tensors(self) -> None:
        """Tell of the tensors of all steps that have arrived."""
        for step, values in arrived(self.telemetry):
            self._measured = values
            self._guarded.measured(step, values)
            self.tell(TensorsMeasured(step=step, values=values, histograms=histograms_of(self.telemetry)))

    def _tell_of_last_tensors(self) -> None:
        """Tell of those still on their way, also where the run failed: the last ones are then the telling ones."""
        if self.telemetry is not None:
            self.telemetry.wait()
            self.tell_of_tensors()
            self.telemetry.detach()

    def _learning_rate(self) -> float:
        o = self.config.optimizer
        return learning_rate(self.done, steps=self.config.run.steps, peak=o.lr, warmup=o.warmup, floor=o.min_lr)

    def _switch(self) -> None:
        """Compute the next step in the precision that the schedule has for it, and tell of a change."""
        self._compute_as(self.done)
        now, before = self.is_bf16(self.done), self.is_bf16(self.done - 1)
        if now != before:
            self.tell(Switched(step=self.done + 1, precision="bf16" if now else "fp8"))

    def _compute_as(self, step: int) -> None:
        for lane in self.setup.lanes:
            if lane.name == "fp8":
                enable(lane.model, not self.is_bf16(step))

    def is_bf16(self, step: int) -> bool:
        """Return whether the FP8 model makes `step`, counted from 0, in BF16; before the first step it does not."""
        run = self.config.run
        if step < 0 or self.setup.plan is None:
            return False
        return is_bf16(step, steps=run.steps, first=run.bf16_first_steps, last_share=run.bf16_last_share)

    def _due(self, every: int) -> bool:
        return every > 0 and self.done % every == 0

    def _check(self) -> None:
        last = checkpoint.latest(self.checkpoints)
        way_back = f"The last good checkpoint is {last}." if last else "There is no checkpoint yet."
        for lane in self.setup.lanes:
            lane.check(way_back)

    def _log(self, measured: Mapping[str, Measured], watches: Mapping[str, Stopwatch], lr: float) -> None:
        milliseconds = {name: watch.milliseconds() for name, watch in watches.items()}
        per_step = self.config.run.batch * self.config.data.sequence
        elapsed = time.perf_counter() - self._since
        event = Logged(
            step=self.done,
            loss={name: float(m.loss) for name, m in measured.items()},
            gradient_norm={name: float(m.gradient_norm) for name, m in measured.items()},
            milliseconds=milliseconds,
            lr=lr,
            tokens=self.done * per_step,
            tokens_per_second=(self.done - self._since_step) * per_step / elapsed,
            loss_scale={lane.name: float(lane.loss_scale.scale) for lane in self._scaled()},
            overflows={lane.name: int(lane.loss_scale.overflows) for lane in self._scaled()},
        )
        self._restart_clock()
        self.tell(event)

    def _scaled(self) -> list[Lane]:
        return [lane for lane in self.setup.lanes if lane.loss_scale.skips]

    def _restart_clock(self) -> None:
        self._since, self._since_step = time.perf_counter(), self.done

    def _evaluate(self) -> dict[str, float]:
        losses = {lane.name: heldout_losses(lane, self.setup.heldout) for lane in self.setup.lanes}
        loss = {name: float(of_sequence.mean()) for name, of_sequence in losses.items()}
        self.tell(Evaluated(step=self.done, loss=loss))
        if self.done == self.config.run.steps and self.ranks.is_first:
            by_lane = {name: of_sequence.tolist() for name, of_sequence in losses.items()}
            write_json(self.directory / "heldout.json", by_lane)
        return loss

    def _save(self) -> None:
        tensors = {lane.name: lane_tensors(lane) for lane in self.setup.lanes}
        state = {
            "config": strict.to_dict(self.config),
            "loader": self.setup.loader.state_dict(),
            "totals": self._totals(),
            "versions": devices.versions(),
            "guard": self._guarded.guard.state_dict(),
        }
        path = checkpoint.save(
            self.checkpoints,
            self.done,
            {**tensors, "random": generator_states()},
            state,
            keep=self.config.run.keep,
            ranks=self.ranks,
        )
        self.tell(Saved(step=self.done, path=path))

    def _save_scales(self) -> None:
        """Leave the scales that the FP8 model kept from step to step as a calibration file."""
        book = scales(self.setup.lanes[0].model)
        if book is not None and book.is_known:
            book.save(self.directory / "scales.json")

    def _totals(self) -> dict[str, Any]:
        """Return what has added up since the first step, also across resumes."""
        earlier = self._earlier
        return {
            "seconds": earlier["seconds"] + time.perf_counter() - self._started,
            "fp8_gemms": dict(Counter(earlier["fp8_gemms"]) + self._ledger.gemms),
            "fallbacks": [*dict.fromkeys([*earlier["fallbacks"], *self._ledger.fallbacks])],
        }

    def _open_directory(self) -> None:
        if not self.ranks.is_first:
            return
        guarded(self.directory, lambda: self.directory.mkdir(parents=True, exist_ok=True))
        if not self.done:
            checkpoint.discard(self.checkpoints)
        (self.directory / "summary.json").unlink(missing_ok=True)
        write_json(self.directory / "config.json", strict.to_dict(self.config))
        if self.setup.plan is not None:
            write_json(self.directory / "plan.json", json.loads(self.setup.plan.to_json()))
        if (cut := self.setup.lanes[0].cut) is not None:
            write_json(self.directory / "tensor.json", json.loads(cut.to_json()))
        if (pipeline := self.setup.lanes[0].pipeline) is not None:
            write_json(self.directory / "pipeline.json", pipeline)
        if (sharding := self.setup.lanes[0].sharding) is not None:
            write_json(self.directory / "sharding.json", json.loads(sharding.to_json()))
        self._watching.insert(0, MetricsFile(self.directory / "metrics.jsonl", keep_until=self.done))
        self._watching.insert(1, StoreReporter(self.config, self.setup.device, done=self.done))

    def _start_event(self) -> Started:
        return Started(
            config=self.config,
            lanes=tuple(lane.name for lane in self.setup.lanes),
            device=self._devices(),
            parameters=self.setup.lanes[0].size,
            plan=self.setup.plan,
            corpus={**_facts(self.setup.corpus), **strict.to_dict(self.setup.statistics)},
            first_step=self.done,
            tensors=self._guarded.rows,
        )

    def _summarise(self, heldout: Mapping[str, float]) -> dict[str, Any]:
        totals = self._totals()
        return summarise(
            self.config,
            device=self._devices(),
            parameters=self.setup.lanes[0].size,
            weight_bytes=self.setup.lanes[0].weight_bytes(),
            state_bytes=self.setup.lanes[0].state_bytes(),
            heldout=heldout,
            corpus=_facts(self.setup.corpus),
            gemms=totals["fp8_gemms"],
            fallbacks=totals["fallbacks"],
            skipped={lane.name: int(lane.loss_scale.overflows) for lane in self._scaled()},
            history=self._history(),
            seconds=totals["seconds"],
            memory=peaks(self.config, self.setup.device, ranks=self.ranks.count),
        )

    def _devices(self) -> str:
        device, count = devices.describe(self.setup.device), self.ranks.count
        return device if count == 1 else f"{count} x {device}"

    def _history(self) -> list[dict[str, Any]]:
        return read_metrics(self.directory / "metrics.jsonl")

    def tell(self, event: Event) -> None:
        """Tell those who watch the run."""
        for reporter in self._watching:
            reporter.report(event)


def _facts(corpus: TokenFiles) -> dict[str, Any]:
    """Return what is known of the text but where it lies on this machine."""
    facts = strict.to_dict(corpus)
    return {key: value for key, value in facts.items() if key != "directory"}


def _check_directory(out: Path, *, resume: bool, overwrite: bool) -> None:
    """See to it, before any work, that nobody loses a run and that there is something to resume."""
    last = checkpoint.latest(out / "checkpoints")
    if resume and overwrite:
        raise ConfigError("--resume continues a run and --overwrite starts it over: choose one.")
    if resume and last is None:
        raise CheckpointError(f"{out / 'checkpoints'}: there is no checkpoint to resume from. Start without --resume.")
    if last is not None and not (resume or overwrite):
        raise ConfigError(
            f"{out}: holds a run already ({last.name}). --resume continues it, --overwrite starts over,"
            " --out names another directory."
        )
