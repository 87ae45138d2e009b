"""Fault injection: runs with a fault and guardrails, compared with the same run undisturbed; and clean runs.

A small Llama is trained once and kept in the data cache. Each fault of `octavo_bench.fault_cases` strikes two runs that
continue it: with watching and with acting guardrails. `final_loss_change` (acting) and `watched_change` are changes of
the held-out loss, in percent of that of the undisturbed run. Clean runs must raise no alarm.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import OctavoError
from octavo.lab.data.corpus import open_corpus
from octavo.lab.guard import GuardEvent
from octavo.lab.loop import Part, Step
from octavo.lab.train import checkpoint
from octavo.lab.train.config import RunConfig, assemble
from octavo.lab.train.events import Event
from octavo.lab.train.parallel import ranks_of
from octavo.lab.train.run import Trainer, train
from octavo.lab.train.setup import set_up
from octavo.lab.train.state_tensors import restore_tensors
from octavo_bench.fault_cases import FAULTS, Fault
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, by_result, device_named, known, positive
from octavo_bench.render import figures, has_failed
from octavo_bench.results import Row

TRAINED = 3000
"""Training steps of the model before any fault."""
STRIKE, STEPS = 33, 60
"""Struck step, and number of steps of a run, both after `TRAINED`."""
CLEAN = 1000
"""Steps of each clean run."""
WITHIN = 20
"""Steps within which a fault must be noted."""


def _derived(row: Row) -> Row:
    if not row["fault"]:
        return {}
    found = {"after": row["detected_step"] - row["struck_step"]} if "detected_step" in row else {"rule": "not noted"}
    ended = " and ".join(mode for mode in ("watching", "acting") if row.get(f"ended_{mode}"))
    return {**found, "ended": ended, "right": "yes" if row["is_attributed"] else f"no: {row.get('expected', '')}"}


def in_words(rows: Sequence[Row]) -> str:
    """Return a summary in words: faults noted and attributed, cost of acting, faults not seen."""
    struck = [row for row in _struck(rows) if "costs" in row]
    if not struck:
        return "*Not measured yet on a trained model.*"
    noted = [row for row in struck if row.get("costs") and row["is_noted"]]
    expected = [(row, *row["expected"].partition(" ")[::2]) for row in noted]
    in_layer = [(row, layer) for row, _, layer in expected if layer]
    both = [row for row in struck if row.get("watched_change") is not None and row["final_loss_change"] is not None]
    worse = max((row["final_loss_change"] - row["watched_change"] for row in both), default=0.0)
    ended = sum(bool(row.get("ended_acting")) and not row["ended_watching"] for row in struck)
    unseen = [row["fault"] for row in struck if "detected_step" not in row]
    clean = [row for row in rows if "alarms" in row]
    costly = sum(row.get("costs", False) for row in struck)
    return (
        f"Of {len(struck)} faults {costly} cost more than 1 % of the held-out loss,"
        f" or ended the run. {len(noted)} of these were noted within 20 steps; the cause was right in"
        f" {sum(row['cause'] == cause for row, cause, _ in expected)}, the layer in"
        f" {sum(row['layer'] == layer for row, layer in in_layer)} of the {len(in_layer)} that have one. Acting ended"
        f" {ended} runs that watching did not, and was at most {worse:.2f} % worse. Not seen:"
        f" {', '.join(unseen) or 'none'}. Clean: {sum(row['alarms'] for row in clean)} alarms in"
        f" {sum(row['steps'] for row in clean):,} steps over {len(clean)} configurations."
    )


def _struck(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["fault"] and not has_failed(row)]


KIND: Kind = Kind(
    name="faults",
    keys={"fault": str, "struck_step": int, "layer": str, "cause": str, "recovered": bool},
    columns=(
        ("class", "{class}"),
        ("fault", "{fault}"),
        ("pace", "{pace}"),
        ("held-out loss, watched", "{watched_change:+.2f} %"),
        ("acted on", "{final_loss_change:+.2f} %"),
        ("noted after", "{after} steps"),
        ("rule", "{rule}"),
        ("cause found", "{cause}"),
        ("layer found", "{layer}"),
        ("right", "{right}"),
    ),
    names=3,
    told=(
        ("action", "{action}"),
        ("ended when", "{ended}"),
        ("clean", "{configuration}"),
        ("steps", "{steps}"),
        ("alarms", "{alarms}"),
        ("text", "{text}"),
    ),
    derived=_derived,
    show=lambda rows: figures(KIND.columns, KIND.with_derived(_struck(rows)), KIND.names),
    tables={"faults-summary": by_result("faults", in_words)},
    session=("fault", "configuration"),
)


class Struck(Trainer, Part[Step]):
    """A trainer with an optional fault, which strikes before a step: the outermost part of its own loop."""

    struck_at: int
    """Step struck by the fault."""
    times_lr: float = 1.0
    """Factor of the learning rate."""
    fault: Fault | None = None
    is_stepping = False
    """True during forward, backward and update, false while guardrails probe."""
    after_update: Callable[[int], None] = staticmethod(lambda n: None)
    """Called after each update."""

    def prepare(self, fault: Fault, struck_at: int) -> None:
        """Install a fault that strikes at a step."""
        self.fault, self.struck_at = fault, struck_at
        self.originals: dict[tuple[int, str], Any] = {}
        self._struck: set[int] = set()
        state = self.setup.states[0]
        step = state.step

        def stepped(*args: Any, **options: Any) -> Any:
            self.is_stepping = True
            try:
                return step(*args, **options)
            finally:
                self.is_stepping = False
                self.after_update(self.state.done - self.struck_at)

        state.step = stepped  # type: ignore[method-assign]
        scheduled = self.schedule.learning_rate
        self.schedule.learning_rate = lambda: scheduled() * self.times_lr  # type: ignore[method-assign]
        self.loop.parts.insert(0, self)
        if fault.prepare is not None:
            fault.prepare(self)

    def before_step(self) -> bool:
        """Strike, if the fault is due."""
        fault = self.fault
        if fault is not None and fault.strike is not None:
            n = self.state.done + 1 - self.struck_at
            if fault.at is None or (n in fault.at and n not in self._struck):
                self._struck.add(n)
                with torch.no_grad():
                    fault.strike(self, n)
        return False

    @property
    def model(self) -> nn.Module:
        """The FP8 model."""
        return self.setup.states[0].model

    def weight(self, layer: str) -> Tensor:
        """Return the weight of a layer, for writing."""
        return self.model.get_parameter(f"{layer}.weight").data

    def moments(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield name and optimizer state of each parameter."""
        state = self.setup.states[0]
        return ((name, state.optimizer.state[parameter]) for name, parameter in state.parameters.items())

    def go_on_from(self, path: Path) -> None:
        """Load a checkpoint, even of a run by another recipe or with a baseline.

        Guardrails keep their history unless the batch size differs: `octavo train` refuses that, as the noise differs.
        """
        found = checkpoint.load(path)
        for state in self.setup.states:
            restore_tensors(state, found.tensors[state.name], path, stored_scales=False)
        self.setup.loader.load_state_dict(found.state["loader"])
        telemetry = self.state.telemetry
        if telemetry is not None and found.state["config"]["run"]["batch"] == self.config.run.batch:
            self.guard.load_state_dict({**found.state["guard"], "ladder": {}})
        if telemetry is not None:
            telemetry.restart(found.step)
        self.state.done = found.step
        self.log.restart_clock(found.step)


@dataclass
class _Notes:
    """Collects the events of guardrails."""

    notes: list[GuardEvent] = field(default_factory=list)

    def report(self, event: Event) -> None:
        if isinstance(event, GuardEvent):
            self.notes.append(event)

    def close(self, error: BaseException | None = None) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Settings of the runs."""

    out: Path
    """Directory of the runs."""
    device: str = "cpu"
    trained: int = TRAINED
    source: str = "python"
    cache: str = ""
    """Directory of the text and of the trained model; empty: that of `octavo train`."""

    def config(self, name: str, *, mode: str = "act", steps: int = STEPS, **sections: Mapping[str, Any]) -> RunConfig:
        """Return a run that continues the trained model: a Llama of 3 layers on the Python standard library."""
        data = {"source": self.source, "sequence": 64, **({"cache": self.cache} if self.cache else {})}
        base: dict[str, dict[str, Any]] = {
            "model": {"dim": 64, "layers": 3, "heads": 2},
            "data": data,
            "optimizer": {"lr": 1e-3, "min_lr": 0.2, "betas": [0.9, 0.99]},
            "run": {
                "steps": self.trained + steps, "batch": 8, "recipe": "folded", "baseline": False, "min_gain": 0.0,
                "device": self.device, "eval_tokens": 8192, "log_every": 10, "out": str(self.out / name),
            },
            "guard": {"mode": mode, "snapshot_every": 20, "shadow_every": 10},
        }  # fmt: skip
        for section, values in sections.items():
            base[section] |= values
        return assemble(("faults", base))

    def checkpoint(self) -> Path:
        """Return the checkpoint of the model trained on this text; train it if missing."""
        config = self.config("trained", mode="watch", steps=0, run={"baseline": True, "checkpoint_every": 0})
        text = open_corpus(self.source).listing_sha256()
        key = hashlib.sha256(json.dumps([self.trained, self.device, text]).encode()).hexdigest()[:12]
        out = config.data.cache.expanduser() / f"faults-{key}"
        if not (found := checkpoint.latest(out / "checkpoints")):
            run = {"baseline": True, "checkpoint_every": self.trained, "out": str(out)}
            train(self.config("trained", mode="watch", steps=0, run=run), overwrite=True)
            found = checkpoint.latest(out / "checkpoints")
        assert found is not None
        return found


def bench_faults(faults: Sequence[Fault], bench: Bench, *, jobs: int = 1) -> Iterator[Row]:
    """Inject each fault into runs with watching and acting guardrails; yield a row per fault."""
    start = bench.checkpoint()
    recipes = [*dict.fromkeys(fault.recipe for fault in faults)]
    with _mapper(jobs) as run:
        plain = dict(zip(recipes, run(partial(_undisturbed, bench, start), recipes), strict=True))
        yield from run(partial(_row, bench, start), [(fault.name, plain[fault.recipe]) for fault in faults])


def bench_clean(bench: Bench, *, steps: int = CLEAN, jobs: int = 1) -> Iterator[Row]:
    """Make a clean run per configuration; yield a row each, with the alarms raised."""
    start = bench.checkpoint()
    with _mapper(jobs) as run:
        yield from run(partial(_clean_row, bench, start, steps), list(CONFIGURATIONS))


@contextmanager
def _mapper(jobs: int) -> Iterator[Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]]:
    """Map a function over arguments, in this process or several."""
    if jobs == 1:
        yield map
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield pool.map


def _undisturbed(bench: Bench, start: Path, recipe: str) -> float:
    return _run(bench.config(f"undisturbed-{recipe}", mode="watch", run={"recipe": recipe}), start)[0]


def _row(bench: Bench, start: Path, case: tuple[str, float]) -> dict[str, Any]:
    fault, plain = FAULTS[case[0]], case[1]
    name = "".join(c if c.isalnum() else "-" for c in fault.name.lower())
    ended, change, notes = {}, {}, {}
    for mode in ("watch", "act"):
        config = bench.config(f"{name}-{mode}", mode=mode, run={"recipe": fault.recipe, "baseline": fault.baseline})
        loss, notes[mode], ended[mode] = _run(config, start, fault)
        change[mode] = 100 * (loss - plain) / plain if math.isfinite(loss) else math.inf
    struck = bench.trained + STRIKE
    row: dict[str, Any] = {
        "fault": fault.name, "class": fault.kind, "pace": fault.pace, "recipe": fault.recipe, "struck_step": struck,
        "expected": f"{fault.cause} {fault.layer}".strip(), "cause": "", "layer": "",
        "watched_change": _finite(change["watch"]), "final_loss_change": _finite(change["act"]),
        "ended_watching": ended["watch"], "ended_acting": ended["act"],
    }  # fmt: skip
    seen = [note for note in notes["act"] if note.step >= struck and note.level != "info"]
    watched = [note for note in notes["watch"] if note.step >= struck and note.level != "info"]
    if seen and watched:
        told = next((note for note in seen if note.cause), seen[0])
        row |= {
            "detected_step": max(seen[0].step, watched[0].step), "rule": seen[0].rule, "cause": told.cause,
            "layer": told.layer, "action": told.action, "text": told.text,
        }  # fmt: skip
    cost = max(change["watch"], change["act"])
    after = row.get("detected_step", math.inf) - struck
    row["is_noted"] = after <= WITHIN
    row["is_attributed"] = row["cause"] == fault.cause and (not fault.layer or row["layer"] == fault.layer)
    row["recovered"] = not ended["act"] and change["act"] < 1.0
    row["costs"] = cost > 1.0 or bool(ended["watch"])
    return row


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _run(
    config: RunConfig, start: Path | None, fault: Fault | None = None, noise: Callable[[], float] | None = None
) -> tuple[float, list[GuardEvent], str]:
    """Return the held-out loss of a run, the events of guardrails, and the reason for an early end, or ''."""
    notes = _Notes()
    shutil.rmtree(config.run.out, ignore_errors=True)
    with ranks_of(config) as ranks:
        run = Struck(set_up(config, ranks), [notes])
        if start is not None:
            run.go_on_from(start)
        if fault is not None:
            run.prepare(fault, run.state.done + STRIKE)
        if noise is not None:
            _make_noisy(run, noise)
        try:
            summary = run.run()
        except OctavoError as error:
            return math.inf, notes.notes, str(error)
    loss = summary["heldout_loss_fp8"] or summary["heldout_loss_bf16"]
    return float(loss), notes.notes, ""


# --- clean runs ------------------------------------------------------------------------------------------------------


def _lognormal() -> float:
    return float(torch.exp(0.5 * torch.randn(())))


def _student() -> float:
    return max(1 + 0.05 * float(torch.distributions.StudentT(2.5).sample()), 0.1)


def _make_noisy(run: Struck, noise: Callable[[], float]) -> None:
    """Multiply the loss seen by guardrails."""
    after = run.guard.after_step

    def noisy(step: Step) -> bool:
        return after(replace(step, loss=step.loss * noise()))

    run.guard.after_step = noisy  # type: ignore[method-assign]


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "folded": {},
    "folded, losses x lognormal(0.5)": {"noise": _lognormal},
    "folded, losses with Student-t(2.5) noise": {"noise": _student},
    "folded, 1 sequence per batch": {"run": {"batch": 1}},
    "folded, learning rate restarted at its peak": {"optimizer": {"min_lr": 1.0}},
    "folded, with a BF16 baseline": {"run": {"baseline": True}},
    "tensorwise": {"run": {"recipe": "tensorwise"}},
    "delayed": {"run": {"recipe": "delayed"}},
    "BF16, from new weights": {"run": {"recipe": "bf16"}, "is_new": True},
    "Muon, BF16 weights, from new weights": {
        "run": {"recipe": "bf16", "weights": "bf16"}, "optimizer": {"name": "muon"}, "is_new": True,
    },
}  # fmt: skip
"""Clean runs by name."""


def _clean_row(bench: Bench, start: Path, steps: int, name: str) -> dict[str, Any]:
    case = dict(CONFIGURATIONS[name])
    is_new, noise = case.pop("is_new", False), case.pop("noise", None)
    run = dict(case.pop("run", {})) | ({"steps": steps} if is_new else {})
    torch.manual_seed(0)
    config = bench.config(f"clean-{list(CONFIGURATIONS).index(name)}", mode="act", steps=steps, run=run, **case)
    loss, notes, ended = _run(config, None if is_new else start, noise=noise)
    raised = [note.text for note in notes if note.level != "info" and note.step > 0]  # step 0: of the text
    return {
        "fault": "", "configuration": name, "steps": steps, "alarms": len(raised), "text": "; ".join(raised[:3]),
        "struck_step": 0, "cause": "", "layer": "", "recovered": not ended, "final_loss_change": 0.0,
        "loss": _finite(loss),
    }  # fmt: skip


def command(
    *,
    fault: Names = (),
    clean: int = CLEAN,
    jobs: int = 1,
    device: str = "auto",
    out: Path | None = None,
    output: Output = TO_STDOUT,
) -> int:
    """Inject faults into a small trained model, with watching and with acting guardrails, and make clean runs.

    The model is trained once and kept. Exits with 1 if a fault that costs 1 % of the loss was not noted, or an alarm
    was false.

    Examples:

        octavo bench faults
        octavo bench faults --fault "exponent bit flip" --clean 0

    Parameters
    ----------
    fault
        Faults to inject; all by default.
    clean
        Steps of each of ten clean runs; 0 for none.
    jobs
        Processes for the runs.
    device
        cuda or cpu; auto takes the GPU if there is one.
    out
        Directory for the runs, to view with `octavo dashboard`; by default they are not kept.
    """
    chosen = [FAULTS[known("--fault", name, list(FAULTS), "fault")] for name in fault or FAULTS]
    device, jobs = device_named(device), positive("--jobs", jobs)
    with tempfile.TemporaryDirectory() as passing:
        bench = Bench(out=out or Path(passing), device=device)
        undisturbed = bench_clean(bench, steps=clean, jobs=jobs) if clean else ()
        made = chain(bench_faults(chosen, bench, jobs=jobs), undisturbed)
        rows = output.keep(KIND, made, f"--device {device}", device=device, fault=fault, clean=clean, jobs=jobs)
    return int(any(row.get("alarms") or (row.get("costs") and not row["is_noted"]) for row in rows))
