"""Fault injection: a run that something strikes, with guardrails, against the same run undisturbed.

Each fault strikes one real training run (`octavo.train`, guardrails in mode `act`) and has a layer and a cause that the
events of the run must name. `final_loss_change` is of the held-out loss, in percent of that of the undisturbed run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.cli.flags import positive
from octavo.errors import OctavoError
from octavo.guard import GuardEvent
from octavo.train.config import RunConfig, assemble
from octavo.train.events import Event
from octavo.train.parallel import ranks_of
from octavo.train.run import Trainer
from octavo.train.setup import set_up
from octavo_bench.cli import TO_STDOUT, Names, Output, command_line, device_named, known

ROW, COLUMN = 3, 5
"""The weight element that is struck."""
EXPONENT_BIT = 30
"""Highest exponent bit of an FP32 element: flipping it multiplies a value below 2 by 2^128."""
SPIKE = 2000.0
"""Size of a SwiGLU spike, times the largest element."""
TOKEN = 7
"""Token of the first sequence of a batch whose activation is struck."""
WITHIN = 1.0
"""Percent of the undisturbed run's loss: less is recovered."""


class Struck(Trainer):
    """A trainer that a fault may strike."""

    struck_at: int
    """The step that is struck."""
    times_lr: float = 1.0
    """Factor of the learning rate while it is struck."""
    lr_steps: int = 6
    """Steps that it is struck for."""
    fault: Callable[[Struck], None] = staticmethod(lambda _: None)
    """Called before the step, whenever it is made."""
    has_struck: bool = False
    """True once a fault that strikes once has."""

    def _step(self) -> None:
        if self.done + 1 == self.struck_at:
            self.fault(self)
            self.has_struck = True
        super()._step()

    def _learning_rate(self) -> float:
        is_struck = 0 <= self.done + 1 - self.struck_at < self.lr_steps
        return super()._learning_rate() * (self.times_lr if is_struck else 1.0)

    @property
    def model(self) -> nn.Module:
        """The FP8 model."""
        return self.setup.states[0].model

    def weight(self, layer: str) -> Tensor:
        """Return the weight of a layer, to be written to."""
        return self.model.get_parameter(f"{layer}.weight").data


@dataclass(frozen=True)
class Fault:
    """Something that strikes a run."""

    name: str
    about: str
    cause: str
    """Cause that must be found, one of `octavo.guard.diagnosis.Cause`."""
    layer: str = ""
    """Layer that must be found; empty if it is no layer's fault."""
    recipe: str = "folded"
    once: Callable[[Struck], None] | None = None
    """Changes the run once, before the step that is struck."""
    prepare: Callable[[Struck], None] | None = None
    """Changes the run in the beginning."""


def _row_times_1000(run: Struck) -> None:
    run.weight("layers.1.attention.wo")[ROW] *= 1000


def _bit_flip(run: Struck) -> None:
    bits = run.weight("layers.2.feed_forward.w1").view(torch.int32)
    bits[ROW, COLUMN] ^= 1 << EXPONENT_BIT


class _Batches:
    """The loader of a run, one of whose batches is struck, whenever it is read."""

    def __init__(self, run: Struck, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None) -> None:
        self._loader, self._change = run.setup.loader, change
        self._bad = (run.struck_at - 1) * run.config.run.batch
        self.is_bad = False
        """True if the batch that was read last is the one."""

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.is_bad = self._loader.state_dict()["samples"] == self._bad
        inputs, targets = next(self._loader)
        return self._change(inputs, targets) if self.is_bad and self._change else (inputs, targets)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _poisoned(run: Struck) -> None:
    """Make all tokens of a batch random: text that is none."""
    draw = torch.Generator().manual_seed(0)
    vocab = run.config.model.vocab

    def poison(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.randint(vocab, each.shape, generator=draw.manual_seed(0)) for each in (inputs, targets))  # type: ignore[return-value]

    run.setup.loader = _Batches(run, poison)  # type: ignore[assignment]


def _inf_in_a_token(run: Struck) -> None:
    """Put an infinity into one token of a layer's input, whenever it reads the batch that is struck."""
    batches = _Batches(run)
    run.setup.loader = batches  # type: ignore[assignment]

    def strike(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not batches.is_bad:
            return args
        x = args[0].clone()
        x.view(-1, x.shape[-1])[TOKEN, COLUMN] = torch.inf
        return (x, *args[1:])

    run.model.get_submodule("layers.1.feed_forward.w1").register_forward_pre_hook(strike)


def _swiglu_spike(run: Struck) -> None:
    """Let one token's hidden activation spike from a step on, without an effect in high precision.

    The output of that token stays the same: the spike only shares a tensor with the others.
    """
    layer = run.model.get_submodule("layers.1.feed_forward.w2")
    plain: list[Tensor] = []

    def spike(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        plain.clear()
        if run.done + 1 < run.struck_at:
            return args
        x = args[0].clone()
        rows = x.view(-1, x.shape[-1])
        plain.append(rows[TOKEN].clone())
        rows[TOKEN] = rows[TOKEN] * 0 + SPIKE * rows.detach().abs().amax()
        return (x, *args[1:])

    def without(module: nn.Module, _: Any, y: Tensor) -> Tensor | None:
        if not plain:
            return None
        made = y.clone()
        made.view(-1, y.shape[-1])[TOKEN] = nn.functional.linear(plain[0].to(y.dtype), module.weight.to(y.dtype))  # type: ignore[arg-type]
        return made

    layer.register_forward_pre_hook(spike)
    layer.register_forward_hook(without)


def _lr_times_30(run: Struck) -> None:
    run.times_lr = 30.0


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "weight row x 1000", "a row of a weight is multiplied by 1000, once",
            "transient", "layers.1.attention.wo", once=_row_times_1000,
        ),
        Fault(
            "inf in a token", "an infinity in one token of a layer's input, in one batch",
            "data", "layers.1.feed_forward.w1", prepare=_inf_in_a_token,
        ),
        Fault(
            "SwiGLU spike", f"one token's hidden activation is {SPIKE:.0f} times the largest, from a step on",
            "precision", "layers.1.feed_forward.w2", recipe="tensorwise", prepare=_swiglu_spike,
        ),
        Fault(
            "bit flip", "the highest bit of an element's exponent is flipped, once",
            "transient", "layers.2.feed_forward.w1", once=_bit_flip,
        ),
        Fault("poisoned batch", "a batch of random tokens", "data", prepare=_poisoned),
        Fault(
            "learning rate x 30", "the learning rate is 30 times too high for 6 steps",
            "optimizer", prepare=_lr_times_30,
        ),
    )
}  # fmt: skip
"""By name."""


@dataclass
class _Notes:
    """Collects the notes of guardrails."""

    notes: list[GuardEvent] = field(default_factory=list)

    def report(self, event: Event) -> None:
        if isinstance(event, GuardEvent):
            self.notes.append(event)

    def close(self) -> None:
        pass


def configuration(
    out: Path, recipe: str, *, steps: int, device: str, source: str | Path = "python", cache: str | Path | None = None
) -> RunConfig:
    """Return the run that is struck: a Llama of 3 layers, FP8 alone; by default on the Python standard library."""
    data: dict[str, Any] = {"source": str(source), "sequence": 64, **({"cache": str(cache)} if cache else {})}
    return assemble(
        (
            "faults",
            {
                "model": {"dim": 64, "layers": 3, "heads": 2},
                "data": data,
                "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]},
                "run": {
                    "steps": steps, "batch": 8, "recipe": recipe, "twin": False, "min_gain": 0.0, "device": device,
                    "eval_tokens": 16384, "log_every": 1, "out": str(out),
                },
                "guard": {"mode": "act", "snapshot_every": 20, "shadow_every": 0},
            },
        )
    )  # fmt: skip


def bench_faults(
    faults: Sequence[Fault],
    out: Path,
    *,
    steps: int = 160,
    device: str = "cpu",
    report: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Strike a run with each fault, and return a row for each: the diagnosis and the cost.

    Args:
        faults: some of `FAULTS`.
        out: directory for the runs.
        steps: of each run; the fault strikes at two fifths of them.
        device: where they train.
        report: is told each row.
    """
    undisturbed: dict[str, float] = {}
    rows = []
    for fault in faults:
        if fault.recipe not in undisturbed:
            config = configuration(out / f"undisturbed-{fault.recipe}", fault.recipe, steps=steps, device=device)
            undisturbed[fault.recipe] = _train(config, None)[0]
        name = fault.name.replace(" ", "-").lower()
        config = configuration(out / name, fault.recipe, steps=steps, device=device)
        rows.append(_row(fault, config, undisturbed[fault.recipe]))
        report(rows[-1])
    return rows


def _row(fault: Fault, config: RunConfig, undisturbed: float) -> dict[str, Any]:
    struck = _struck_at(config)
    facts = {"fault": fault.name, "recipe": fault.recipe, "steps": config.run.steps, "struck_step": struck}
    try:
        loss, notes = _train(config, fault)
    except OctavoError as error:
        return {**facts, "layer": "", "cause": "", "error": str(error)}
    change = 100 * (loss - undisturbed) / undisturbed
    caught = [note for note in notes if note.step >= struck and note.level != "info"]
    if not caught:
        return {**facts, "layer": "", "cause": "", "error": f"not noticed; held-out loss {change:+z.2f} %"}
    told = next((note for note in caught if note.cause), caught[0])
    is_attributed = told.cause == fault.cause and (not fault.layer or told.layer == fault.layer)
    return {
        **facts,
        "detected_step": caught[0].step,
        "layer": told.layer,
        "cause": told.cause,
        "action": told.action,
        "text": told.text,
        "is_attributed": is_attributed,
        "recovered": is_attributed and abs(change) < WITHIN,
        "final_loss": loss,
        "final_loss_change": change,
    }


def _train(config: RunConfig, fault: Fault | None) -> tuple[float, list[GuardEvent]]:
    """Return the held-out loss of a run and the events of guardrails."""
    notes = _Notes()
    shutil.rmtree(config.run.out, ignore_errors=True)  # of a run before
    with ranks_of(config) as ranks:
        run = Struck(set_up(config, ranks), [notes])
        run.struck_at = _struck_at(config) if fault is not None else config.run.steps + 1
        if fault is not None and fault.prepare is not None:
            fault.prepare(run)
        if fault is not None and (once := fault.once) is not None:
            run.fault = lambda run: None if run.has_struck else once(run)
        summary = run.run()
    return float(summary["heldout_loss_fp8"]), notes.notes


def _struck_at(config: RunConfig) -> int:
    return 2 * config.run.steps // 5


def command(
    *,
    fault: Names = (),
    steps: int = 160,
    device: str = "auto",
    out: Path | None = None,
    output: Output = TO_STDOUT,
) -> int:
    """Strike a small run with faults, one run each, and compare with the same run undisturbed.

    Exits with 1 if a fault was not found, was attributed wrongly, or cost 1 % of the loss.

    Examples:

        octavo bench faults
        octavo bench faults --fault "bit flip" --steps 60

    Parameters
    ----------
    fault
        Faults to strike with; all by default.
    steps
        Steps of each run; the fault strikes after two fifths of them.
    device
        cuda or cpu; auto takes the GPU if there is one.
    out
        Directory for the runs, to be looked at with `octavo dashboard`; by default they are not kept.
    """
    chosen = [FAULTS[known("--fault", name, list(FAULTS), "fault")] for name in fault or FAULTS]
    device, steps = device_named(device), positive("--steps", steps)
    with tempfile.TemporaryDirectory() as passing:
        where = out or Path(passing)
        rows = bench_faults(chosen, where, steps=steps, device=device, report=lambda row: output.say(_line(row)))
    line = command_line("octavo bench faults", fault=fault, steps=steps, device=device)
    return output.finish("faults", rows, line, device=device) or int(not all(row["recovered"] for row in rows))


def _line(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{row['fault']}: {row['error']}"
    verdict = "recovered" if row["recovered"] else "NOT recovered"
    found = f"{row['cause'] or 'nothing found'}{', ' + row['layer'] if row['layer'] else ''}"
    return (
        f"{row['fault']}: struck at {row['struck_step']}, detected at {row['detected_step']}, {found};"
        f" {row['action'] or 'no action'}; {verdict}, held-out loss {row['final_loss_change']:+z.2f} %"
    )
