"""The log of a run: events for its reporters, files on the first rank, totals that continue across resumes."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo._util import config_reader
from octavo._util.files import os_errors, remove
from octavo._util.terminal import quantity
from octavo.errors import RunError
from octavo.kernels.runtime.ledger import Ledger
from octavo.lab.data import TokenFiles
from octavo.lab.data.chat import TASKS
from octavo.lab.data.quality import judge
from octavo.lab.guard import GuardEvent
from octavo.lab.loop import Part
from octavo.lab.monitor import console, samples
from octavo.lab.train import checkpoint, events
from octavo.lab.train import device as devices
from octavo.lab.train.batches import BatchDrift, SourceLosses
from octavo.lab.train.evaluate import accuracy_by_task, answers_given
from octavo.lab.train.files import MetricsFile, SamplesFile, read_metrics, write_json
from octavo.lab.train.inputs import keep_inputs
from octavo.lab.train.memory import peaks
from octavo.lab.train.record import StoreReporter
from octavo.lab.train.schedule import warm_up_note
from octavo.lab.train.setup import Setup
from octavo.lab.train.summary import summarise
from octavo.lab.train.train_state import RunStep, TrainState

_WRITTEN = (
    *("summary.json", "heldout.json", "plan.json", "tensor.json", "sharding.json", "pipeline.json", "scales.json"),
    *("calibration.json", console.FILE, samples.FILE),
)
"""Files of a run, which one that replaces it is not to be read with."""


class RunLog(Part[RunStep]):
    """The events, files and totals of a run."""

    reads = "results"

    def __init__(self, setup: Setup, reporters: Sequence[events.Reporter]) -> None:
        self.setup, self.config, self.directory = setup, setup.config, setup.config.run.out
        self.ledger = Ledger()
        """GEMMs counted by this process."""
        self._earlier: Mapping[str, Any] = {"seconds": 0.0, "fp8_gemms": {}, "fallbacks": []}
        """Totals of the run before this process."""
        self._overflows: Mapping[str, int] = {}
        """Steps that loss scaling had skipped at the last line of the log, by model."""
        self._reporters = list(reporters)
        self._files: tuple[MetricsFile, StoreReporter] | None = None
        """Those that are cut to a checkpoint when a run resumes, on the first rank."""
        self._started = self._since = time.perf_counter()
        self._since_step = 0
        self._plan = setup.plan  # guardrails and the schedule change that of the setup
        self._refused: set[str] = set()
        self._drift = BatchDrift(setup.corpus.train, self.config.model.vocab, setup.end_of_document)
        self._sources = SourceLosses(setup.corpus.heldout_sources, self.config.data.sequence)

    def emit(self, event: events.Event) -> None:
        """Pass an event to all reporters."""
        for reporter in self._reporters:
            reporter.report(event)

    def warn(self, step: int, rule: str, text: str, value: float | None = None, limit: float | None = None) -> None:
        """Emit a warning."""
        self.emit(GuardEvent(step, "warning", rule, text, value=value, limit=limit))

    def close(self, error: BaseException | None = None) -> None:
        """Close all reporters, also if one of them fails. error: the one that ended the run."""
        with ExitStack() as stack:
            for reporter in reversed(self._reporters):
                stack.callback(reporter.close, error)

    def open(self, resumed: checkpoint.Checkpoint | None) -> None:
        """Open the files of the run, cut to the checkpoint that it resumes from; on the first rank."""
        if not self.setup.ranks.is_first:
            return
        done, kept = (0, {}) if resumed is None else (resumed.step, resumed.state.get("recorded", {}))
        until, recorded = done, kept
        if resumed is not None and resumed.rolled_back_to is not None:  # later records are of a retry that is lost
            until, recorded = resumed.rolled_back_to, {}
        with os_errors(self.directory, RunError):
            self.directory.mkdir(parents=True, exist_ok=True)
        if not done:
            checkpoint.discard(self.directory / "checkpoints")
        given = Path(self.config.run.scales).absolute()  # may be the calibration of the run that is replaced
        for path in (self.directory / name for name in (_WRITTEN if not done else ("summary.json",))):
            if path.absolute() != given:
                with os_errors(path, RunError, "cannot be removed"):
                    remove(path)
        self.write_config(self.directory)
        keep_inputs(self.config, self.directory, resumed=done > 0)
        first = self.setup.states[0]
        plans = {"plan": self._plan, "tensor": first.tensor_plan, "sharding": first.shard_plan}
        for name, plan in plans.items():
            if plan is not None:
                write_json(self.directory / f"{name}.json", json.loads(plan.to_json()))
        if first.pipeline is not None:
            write_json(self.directory / "pipeline.json", first.pipeline)
        metrics = MetricsFile(self.directory / "metrics.jsonl", keep_until=until, keep_lines=recorded.get("metrics"))
        for line in read_metrics(self.directory / "metrics.jsonl") if resumed is not None else ():
            self._recall(line)
        self._reporters.insert(0, metrics)
        store = StoreReporter(self.config, self.setup.device, done=until, events=recorded.get("events"))
        self._reporters.insert(1, store)
        path = self.directory / samples.FILE
        if self.config.sample.every or path.exists():  # cut, though the resumed run writes none
            self._reporters.insert(2, SamplesFile(path, keep_until=until))
        self._files = metrics, store
        if resumed is not None and kept:  # what an interrupted run recorded of it was cut
            store.report(events.Saved(step=done, path=resumed.path))
        if until < done:
            text = f"the run was rolled back to step {until}, and no checkpoint of its retry is left: it goes on from"
            lost = f"that of step {done}, which may have the fault, and the log lacks steps {until + 1} to {done}"
            self.warn(done, "rollback", f"{text} {lost}")

    def _recall(self, line: Mapping[str, Any]) -> None:
        """Take the batch and the held-out losses in a line of `metrics.jsonl` as seen before, for later warnings."""
        known = {key: value for key, value in line.items() if value is not None}
        if "batch_divergence" in known:
            self._drift.drifts(known["batch_divergence"])
        if (whole := known.get(f"heldout_loss_{self.setup.states[0].name}")) is not None:
            deque(self._sources.rises(whole, events.losses_by_source(known)), maxlen=0)

    def write_config(self, directory: Path) -> None:
        """Write `config.json` of the run in this directory."""
        write_json(directory / "config.json", config_reader.to_dict(self.config.with_run(out=directory)))

    def rescue(self, directory: Path) -> None:
        """Write configuration and logs of the run into another directory."""
        self.write_config(directory)
        self.emit(events.Moved(directory=directory))

    def start(self, done: int, tensors: Sequence[tuple[Any, ...]]) -> None:
        """Emit that the run starts after `done` steps with telemetry of `tensors`, and warnings of a new run."""
        config, setup = self.config, self.setup
        self._overflows = self.count_overflows()
        self.emit(
            events.Started(
                config=config,
                models=tuple(state.name for state in setup.states),
                device=self._devices(),
                parameters=setup.states[0].size,
                plan=setup.plan,
                corpus=self._corpus(),
                first_step=done,
                tensors=tensors,
            )
        )
        if done:
            self._say_what_differs(done)
            return
        if note := warm_up_note(config.optimizer):
            self.warn(0, "warm-up", note)
        if setup.plan is None and config.run.leaves_recipe:
            text = "has no layer in FP8: run.bf16_first_steps and run.last_share do nothing"
            self.warn(0, "schedule", f"recipe '{config.run.recipe}' {text}")
        for found in judge(self._corpus()):
            self.warn(0, "data", *found)

    def _say_what_differs(self, done: int) -> None:
        """Emit how a resumed run may differ from one that was not interrupted."""
        plan, guard = self.setup.plan, self.config.guard
        if plan is not None and plan.policy.filter is not None:
            text = "the run keeps the layers in FP8 that it began with; a new run on this device would have others"
            self.warn(done, "plan", text)
        if guard.mode == "act":
            text = (
                f"guardrails take a new snapshot after step {done}: until two more (guard.snapshot_every), an alarm may"
                " lead back to another step than without the interruption. Without one the run goes on bit for bit"
            )
            self.emit(GuardEvent(done, "info", "resume", text))

    def log_refusal(self, step: int, state: TrainState) -> None:
        """Emit, once per model, why its steps could not be captured as a CUDA graph."""
        if state.replay is not None and state.replay.refusal and state.name not in self._refused:
            self._refused.add(state.name)
            text = f"steps of the {state.name.upper()} model are launched kernel by kernel, not as a CUDA graph"
            self.warn(step, "graph", f"{text}: {state.replay.refusal}")

    def is_due(self, step: RunStep) -> bool:
        """Return True at the first and the last step, and every `run.log_every` steps."""
        run = self.config.run
        return step.number in (1, run.steps) or (run.log_every > 0 and step.number % run.log_every == 0)

    def after_step(self, step: RunStep) -> bool:
        """Emit a line of the log, and warnings of it."""
        batch, number = self._drift.measure(step.inputs_BT), step.number
        milliseconds = step.watch.milliseconds()
        per_step = self.config.run.batch * self.config.data.sequence
        elapsed = time.perf_counter() - self._since
        shares = {} if self.setup.plan is None else self.setup.plan.fp8_shares
        event = events.Logged(
            step=number,
            loss={name: float(m.loss) for name, m in step.metrics.items()},
            gradient_norm={name: float(m.gradient_norm) for name, m in step.metrics.items()},
            milliseconds=milliseconds,
            lr=step.lr,
            tokens=number * per_step,
            tokens_per_second=(number - self._since_step) * per_step / elapsed,
            loss_scale={state.name: float(state.loss_scale.scale) for state in self._scaled()},
            overflows=self.count_overflows(),
            fp8=dict.fromkeys(shares, 0.0) if self.config.run.is_bf16(number - 1) else shares,
            batch=batch,
        )
        self.restart_clock(number)
        self.emit(event)
        for name, overflows in event.overflows.items():
            if overflows > self._overflows.get(name, 0):
                text = f"{name.upper()} gradients overflowed, {quantity(overflows, 'step')} skipped so far"
                action = f"loss scale {event.loss_scale[name]:g}"
                self.emit(GuardEvent(number, "warning", "overflow", text, action, value=overflows))
        self._overflows = event.overflows
        if (found := self._drift.drifts(batch["batch_divergence"])) is not None:
            text = f"batches drift: their ids are distributed otherwise than before ({found[0]:.3g} nats per id)"
            self.warn(number, "batch drift", text, *found)
        return False

    def restart_clock(self, step: int) -> None:
        """Count tokens per second from here on, after `step` steps."""
        self._since, self._since_step = time.perf_counter(), step

    def count_overflows(self) -> dict[str, int]:
        """Return the steps that loss scaling has skipped, by model."""
        return {state.name: int(state.loss_scale.overflows) for state in self._scaled()}

    def _scaled(self) -> Iterator[TrainState]:
        return (state for state in self.setup.states if state.loss_scale.skips)

    def log_evaluation(self, step: int, loss: Mapping[str, float], losses_S: Tensor) -> None:
        """Emit an evaluation, and warnings of rising sources; `losses_S` are the first model's losses by sequence."""
        by_source = self._sources.by_source(losses_S)
        self.emit(events.Evaluated(step=step, loss=loss, by_source=by_source))
        for source, value, limit in self._sources.rises(next(iter(loss.values())), by_source):
            text = f"the held-out loss of source '{source}' rises, although that of the whole text does not"
            self.warn(step, "source", text, value, limit)

    def state_dict(self) -> dict[str, Any]:
        """Return the totals, and on the first rank the number of lines and events so far, as JSON values."""
        if self._files is None:
            return {"totals": self.totals()}
        metrics, store = self._files
        return {"totals": self.totals(), "recorded": {"metrics": metrics.lines, "events": store.flush()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the totals in the result of `state_dict`; `open` cuts the files to what was recorded."""
        self._earlier = {**state["totals"]}

    def totals(self) -> dict[str, Any]:
        """Return the totals since the first step, across resumes."""
        earlier = self._earlier
        return {
            "seconds": earlier["seconds"] + time.perf_counter() - self._started,
            "fp8_gemms": dict(Counter(earlier["fp8_gemms"]) + self.ledger.gemms),
            "fallbacks": [*dict.fromkeys([*earlier["fallbacks"], *self.ledger.fallbacks])],
        }

    def finish(self, heldout: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Write, emit and return the summary of the finished run; `heldout` has each model's losses by sequence."""
        state, ranks = self.setup.states[0], self.setup.ranks
        facts = {
            "device": self._devices(),
            "parameters": state.size,
            "weight_bytes_per_parameter": state.weight_bytes(),
            "optimizer_bytes_per_parameter": state.state_bytes(),
            **self.totals(),
            "skipped_steps": self.count_overflows(),
            "tasks": self._tasks(),
            "energy_kwh": self._energy(),
        }
        memory = peaks(self.config, self.setup.device, ranks=ranks.count)
        history = read_metrics(self.directory / "metrics.jsonl")
        summary = summarise(self.config, facts, heldout, _facts(self.setup.corpus), history, memory)
        if ranks.is_first:
            write_json(self.directory / "summary.json", summary)
        self.emit(events.Finished(summary=summary, history=history, directory=self.directory))
        return summary

    def _devices(self) -> str:
        device, count = devices.describe(self.setup.device), self.setup.ranks.count
        return device if count == 1 else f"{count} x {device}"

    def _corpus(self) -> dict[str, Any]:
        return {**_facts(self.setup.corpus), **config_reader.to_dict(self.setup.statistics)}

    def _tasks(self) -> dict[str, Any]:
        """Return the accuracy by task on held-out conversations; none for text."""
        if self.config.data.format != "chat":
            return {}
        right = {state.name: answers_given(state, self.setup.heldout) for state in self.setup.states}
        named = json.loads((self.setup.corpus.directory / TASKS).read_text(encoding="utf-8"))
        return accuracy_by_task(named[: len(next(iter(right.values())))], right)

    def _energy(self) -> float | None:
        """Return the kWh of all GPUs, estimated from the first rank's; None if NVML does not measure energy."""
        found = None if self._files is None else self._files[1].energy_kwh()
        return None if found is None else found * self.setup.ranks.count


def _facts(corpus: TokenFiles) -> dict[str, Any]:
    """Return the facts of the corpus without its path on this machine."""
    return {key: value for key, value in config_reader.to_dict(corpus).items() if key != "directory"}
