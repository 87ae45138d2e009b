"""What a run tells those who watch it: plain values, no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.guard.guarded import Note
from octavo.train.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparing:
    """The text is about to be read and the models built. The first time, a large corpus takes a while."""

    config: RunConfig
    """As resolved: presets, file and flags applied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A run is about to make its first step."""

    config: RunConfig
    """As resolved: presets, file and flags applied."""
    lanes: tuple[str, ...]
    """Names of the models in training: `fp8`, `bf16` or both, in this order."""
    device: str
    """For people: the name of the processor or GPU."""
    parameters: int
    """Parameters of one model."""
    plan: Any
    """The conversion carried out on the FP8 model; None without one."""
    corpus: Mapping[str, Any]
    """Facts of the text: `unigram_entropy` in nats a token, token counts."""
    first_step: int
    """0, or the number of steps that the checkpoint resumed from had made."""
    tensors: Sequence[tuple[Any, ...]] = ()
    """What the rows of `TensorsMeasured.values` are about: layer, role, operand; empty where none are measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """A line of the log."""

    step: int
    """Steps made, this one included."""
    loss: Mapping[str, float]
    """By lane: mean loss of this step's batch, in nats a token."""
    gradient_norm: Mapping[str, float]
    """By lane: global norm before clipping."""
    milliseconds: Mapping[str, float]
    """By lane: time of this step."""
    lr: float
    """Learning rate of this step."""
    tokens: int
    """Tokens trained on so far, by each lane."""
    tokens_per_second: float
    """Tokens a second since the last line, all lanes running one after another."""
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    """By lane, with dynamic loss scaling: the scale of the next step."""
    overflows: Mapping[str, int] = field(default_factory=dict)
    """By lane, with dynamic loss scaling: steps skipped so far."""

    def record(self) -> dict[str, Any]:
        """Return the line as `metrics.jsonl` holds it. A loss or norm of a skipped step that is not finite is None."""
        named: dict[str, Mapping[str, float]] = {
            "loss": self.loss,
            "gradient_norm": self.gradient_norm,
            "milliseconds": self.milliseconds,
            "loss_scale": self.loss_scale,
            "overflows": self.overflows,
        }
        by_lane = {f"{name}_{lane}": _finite(value) for name, values in named.items() for lane, value in values.items()}
        rest = {"gap_percent": _finite(gap_percent(self.loss)), "lr": self.lr, "tokens": self.tokens}
        return {"step": self.step, **by_lane, **rest, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorsMeasured:
    """Statistics of the tensors of the FP8 model have arrived, of this step or of an earlier one."""

    step: int
    """The step that they were measured in."""
    values: NDArray[np.float32]
    """(tensors, statistics), the columns those of `octavo.monitor.store.STATS`."""
    histograms: NDArray[np.float32] | None = None
    """(tensors, bins), as `octavo.nn.telemetry.Telemetry` has them, of a step that has any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorsChanged:
    """The tensors that are measured are others from here on: layers changed their recipe."""

    step: int
    """Steps made."""
    rows: Sequence[tuple[Any, ...]]
    """As `Started.tensors`."""
    plan: Any
    """The conversion carried out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switched:
    """The FP8 model computes in another precision from this step on."""

    step: int
    """The first step in that precision."""
    precision: str
    """`bf16` or `fp8`."""

    def record(self) -> dict[str, Any]:
        """Return the change as `metrics.jsonl` holds it."""
        return {"step": self.step, "precision_fp8": self.precision}


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    """Guardrails saw, decided or did something."""

    note: Note
    """What, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBack:
    """The run went back: steps that were made do not count, and are made again."""

    step: int
    """Steps that had been made."""
    to: int
    """Steps that still count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """An evaluation on held-out text."""

    step: int
    """Steps made."""
    loss: Mapping[str, float]
    """By lane: mean held-out loss in nats a token."""

    def record(self) -> dict[str, Any]:
        """Return the evaluation as `metrics.jsonl` holds it."""
        by_lane = {f"heldout_loss_{lane}": value for lane, value in self.loss.items()}
        return {"step": self.step, **by_lane, "heldout_gap_percent": gap_percent(self.loss)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint was written."""

    step: int
    """Steps made."""
    path: Path
    """Its directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A run has ended as planned."""

    summary: Mapping[str, Any]
    """The content of `summary.json`."""
    history: Sequence[Mapping[str, Any]]
    """The lines of `metrics.jsonl`."""
    directory: Path
    """Where the run is stored."""
    architecture: str = "llama"
    """Of the model."""


Event = (
    Preparing
    | Started
    | Logged
    | TensorsMeasured
    | TensorsChanged
    | Switched
    | Noted
    | RolledBack
    | Evaluated
    | Saved
    | Finished
)


class Reporter(Protocol):
    """Someone who watches a run."""

    def report(self, event: Event) -> None:
        """Take in one event; called in the order in which things happen."""
        ...

    def close(self) -> None:
        """Let go of terminals and files; called once, also when the run failed."""
        ...


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def gap_percent(loss: Mapping[str, float]) -> float | None:
    """Return by how many percent the FP8 loss lies above the BF16 loss; None unless both are there."""
    if "fp8" not in loss or "bf16" not in loss:
        return None
    return 100 * (loss["fp8"] - loss["bf16"]) / loss["bf16"]
