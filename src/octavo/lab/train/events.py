"""Events of a run, passed to reporters: plain values, no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.lab.guard.alarms import GuardEvent, percent_above
from octavo.lab.train.config import RunConfig

MODELS = {"fp8": "FP8", "bf16": "BF16"}
"""Titles of the models in training, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preparing:
    """The text is about to be read and the models built. A large corpus takes a while the first time."""

    config: RunConfig
    """Resolved: presets, file and flags applied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A run is about to make its first step."""

    config: RunConfig
    """Resolved: presets, file and flags applied."""
    models: tuple[str, ...]
    """Names of the models in training: `fp8`, `bf16` or both, in this order."""
    device: str
    """Name of the processor or GPU."""
    parameters: int
    """Number of parameters of one model."""
    plan: Any
    """Conversion plan of the FP8 model; None without one."""
    corpus: Mapping[str, Any]
    """Facts of the text: `unigram_entropy` in nats per token, token counts."""
    first_step: int
    """0, or the step of the checkpoint that the run resumed from."""
    tensors: Sequence[tuple[Any, ...]] = ()
    """The tensor of each row of `TensorsMeasured.values`: layer, role, operand; empty without telemetry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Logged:
    """A line of the log."""

    step: int
    """Number of steps made, this one included."""
    loss: Mapping[str, float]
    """By model: mean loss of this step's batch, in nats per token."""
    gradient_norm: Mapping[str, float]
    """By model: global norm before clipping."""
    milliseconds: Mapping[str, float]
    """By model: time of this step."""
    lr: float
    """Learning rate of this step."""
    tokens: int
    """Tokens trained on so far, per model."""
    tokens_per_second: float
    """Tokens per second since the last line; models run one after another."""
    loss_scale: Mapping[str, float] = field(default_factory=dict)
    """By model, with dynamic loss scaling: the scale of the next step."""
    overflows: Mapping[str, int] = field(default_factory=dict)
    """By model, with dynamic loss scaling: steps skipped so far."""
    fp8: Mapping[str, float] = field(default_factory=dict)
    """`Plan.fp8_shares` of the FP8 model in this step; zeros in a step in BF16."""
    batch: Mapping[str, float] = field(default_factory=dict)
    """Statistics of the step's batch, see `BatchDrift.measure`."""

    def record(self) -> dict[str, Any]:
        """Return the line of `metrics.jsonl`. A non-finite loss or norm of a skipped step is None."""
        named: dict[str, Mapping[str, float]] = {
            "loss": self.loss,
            "gradient_norm": self.gradient_norm,
            "milliseconds": self.milliseconds,
            "loss_scale": self.loss_scale,
            "overflows": self.overflows,
        }
        by_model = {
            f"{name}_{model}": _finite(value) for name, values in named.items() for model, value in values.items()
        }
        rest = {"gap_percent": _finite(gap_percent(self.loss)), "lr": self.lr, "tokens": self.tokens, **self.batch}
        return {"step": self.step, **by_model, **self.fp8, **rest, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorsMeasured:
    """Tensor statistics of the FP8 model have arrived, for this step or an earlier one."""

    step: int
    """The step that was measured."""
    values: NDArray[np.float32]
    """(tensors, statistics), columns as in `octavo.lab.monitor.store.STATS`."""
    histograms: NDArray[np.float32] | None = None
    """(tensors, bins), as in `octavo.nn.telemetry.Telemetry`, if the step was sampled for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsMeasured:
    """Statistics of the parameter groups of the first model."""

    step: int
    """The step that was measured."""
    values: Mapping[str, float]
    """As `GroupStatistics.scalars`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorsChanged:
    """The measured tensors change from here on: layers changed their recipe."""

    step: int
    """Steps made."""
    rows: Sequence[tuple[Any, ...]]
    """As `Started.tensors`."""
    plan: Any
    """The new conversion plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switched:
    """The schedule switches the FP8 model to another recipe."""

    step: int
    """The first step by that recipe."""
    recipe: str
    """Its name."""

    def record(self) -> dict[str, Any]:
        """Return the line of `metrics.jsonl`."""
        return {"step": self.step, "recipe_fp8": self.recipe}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """A model is about to be scored on held-out text, which takes a while."""

    step: int
    """Steps made."""
    computed: str
    """What is scored: `FP8`, `BF16`, or the FP8 model's weights without FP8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """An evaluation on held-out text."""

    step: int
    """Steps made."""
    loss: Mapping[str, float]
    """By model: mean held-out loss in nats per token."""
    by_source: Mapping[str, float] = field(default_factory=dict)
    """The first model's by source of the text; empty for a single source."""

    def record(self) -> dict[str, Any]:
        """Return the line of `metrics.jsonl`."""
        by_model = {f"heldout_loss_{model}": _finite(value) for model, value in self.loss.items()}
        by_model |= {f"{_OF_SOURCE}{source or '.'}": _finite(value) for source, value in self.by_source.items()}
        return {"step": self.step, **by_model, "heldout_gap_percent": _finite(gap_percent(self.loss))}


_OF_SOURCE = "heldout_loss/"


def losses_by_source(record: Mapping[str, Any]) -> dict[str, float]:
    """Return `Evaluated.by_source` from the line of `metrics.jsonl`."""
    named = {key.removeprefix(_OF_SOURCE): loss for key, loss in record.items() if key.startswith(_OF_SOURCE)}
    return {"" if source == "." else source: loss for source, loss in named.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """The models have continued a prompt."""

    step: int
    """Steps made."""
    prompt: str
    """The text that they continue."""
    text: Mapping[str, str]
    """By model: what it wrote."""

    def record(self) -> dict[str, Any]:
        """Return the line of `samples.jsonl`."""
        return {"step": self.step, "prompt": self.prompt, "text": dict(self.text)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint was written."""

    step: int
    """Steps made."""
    path: Path
    """Its directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """The directory of the run was removed or renamed; the run is saved in another one, and ends."""

    directory: Path
    """The other one, which reporters write their files to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A run has finished."""

    summary: Mapping[str, Any]
    """The content of `summary.json`."""
    history: Sequence[Mapping[str, Any]]
    """The lines of `metrics.jsonl`."""
    directory: Path
    """Directory of the run."""


Event = (
    Preparing
    | Started
    | Logged
    | TensorsMeasured
    | GroupsMeasured
    | TensorsChanged
    | Switched
    | GuardEvent
    | Scoring
    | Evaluated
    | Sampled
    | Saved
    | Moved
    | Finished
)


class Reporter(Protocol):
    """A consumer of events: terminal, metrics file, run store."""

    def report(self, event: Event) -> None:
        """Handle one event; called in the order in which they happen."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Release terminals and files; called once, with the error that ended the run, if one did."""
        ...


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def gap_percent(loss: Mapping[str, float]) -> float | None:
    """Return by how many percent the FP8 loss exceeds the BF16 loss; None if one is not known, or the latter is 0."""
    return percent_above(loss["fp8"], loss["bf16"]) if {"fp8", "bf16"} <= loss.keys() else None
