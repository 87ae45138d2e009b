"""Evaluation of a run of `octavo train`: its weights in FP8 and in high precision, and its BF16 baseline in both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from octavo._util.terminal import Report, silent
from octavo.conversion import disabled
from octavo.data.loader import Batch
from octavo.errors import ConfigError
from octavo.evaluation import result
from octavo.evaluation.result import Evaluation, Score
from octavo.evaluation.text import EvalText, SequenceLayout, heldout_text, trained_on, whole_text
from octavo.train import checkpoint
from octavo.train import device as devices
from octavo.train.config import RunConfig
from octavo.train.evaluate import heldout_scores
from octavo.train.load_run import find, settings_of, states_of
from octavo.train.setup import tokenizer_of
from octavo.train.train_state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """Settings of `octavo eval`."""

    data: str = ""
    """Text to evaluate on; empty for the run's held-out text."""
    tokens: int | None = None
    """Number of tokens; None for all."""
    sequence: int = 0
    """Tokens per sequence; 0 for the run's."""
    step: int | None = None
    """Step of the checkpoint; None for the newest."""
    device: str = "auto"


class LoadedRun:
    """A run loaded from one of its checkpoints."""

    def __init__(self, run: Path, settings: EvalSettings) -> None:
        """Read the checkpoint; see `evaluate_run` for errors."""
        self.checkpoint = find(run, settings.step)
        has_twin = {"fp8", "bf16"} <= self.checkpoint.tensors.keys()
        self.config = settings_of(self.checkpoint, "octavo eval", {"device": settings.device, "twin": has_twin})
        devices.resolve(settings.device)  # fail before the text, which takes longer
        self.tokenizer = tokenizer_of(self.config.data)

    def text(self, settings: EvalSettings) -> tuple[EvalText, list[str]]:
        """Return the text to evaluate on, with notes."""
        layout = _layout(self.checkpoint, self.config, settings)
        if settings.data:
            return whole_text(settings.data, self.tokenizer, layout), []
        text, now = heldout_text(self.config.data, self.tokenizer, layout)
        before = trained_on(self.checkpoint.path.parent.parent)
        changed = f"{text.source} has changed since training: its held-out part may include training text"
        return text, [changed] if before not in ("", now) else []

    def measure(self, text: EvalText, report: Report) -> list[Score]:
        """Return the scores in FP8 and in high precision, or in BF16; and of the BF16 baseline, as it is and in FP8.

        In FP8 the baseline has what the run keeps beside its weights: kept scales, and the storage of other weights.
        Where the recipe's forward pass is in BF16 that is left out.
        """
        lanes = states_of(self.checkpoint, self.config)
        found = [
            result.measure(computed, partial(_within, how, lane), text, report)
            for lane in lanes
            for computed, how in _precisions(lane, is_twin=lane is not lanes[0])
        ]
        for twin in lanes[1:] if found[0].fp8_gemms else ():
            lanes[0].model.load_state_dict(twin.model.state_dict())
            found.append(result.measure(result.QUANTISED, partial(heldout_scores, lanes[0]), text, report))
        return found


def evaluate_run(run: Path, settings: EvalSettings, report: Report = silent) -> Evaluation:
    """Evaluate a run on its held-out text, or on another text.

    Args:
        run: directory of a run or of one of its checkpoints, with any number of ranks.
        report: called before each batch.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: an unavailable device, or a sequence longer than the model's maximum.
        DataError: the text or the run's tokenizer is missing, or the text is shorter than a sequence.
    """
    loaded = LoadedRun(run, settings)
    text, notes = loaded.text(settings)
    found = loaded.measure(text, report)
    loop = loaded.config.run
    model = {"directory": str(run), "step": loaded.checkpoint.step, "recipe": loop.recipe, "weights": loop.weights}
    return result.evaluation(model, text, devices.describe(devices.resolve(settings.device)), found, notes)


def _layout(found: checkpoint.Checkpoint, config: RunConfig, settings: EvalSettings) -> SequenceLayout:
    """Return sequences as in training, in batches as on one rank of the run."""
    run, parallel, longest = config.run, config.parallel, config.model.sequence
    sequence = settings.sequence or config.data.sequence
    if sequence > longest:
        raise ConfigError(f"--sequence {sequence}: the model's maximum is {longest} tokens (model.sequence).")
    parts = max(1, found.state.get("ranks", 1) // (parallel.tensor * parallel.pipeline))
    tokens = run.batch // (run.accumulate * parts) * config.data.sequence
    return SequenceLayout(sequence=sequence, rows=max(1, tokens // sequence), limit=settings.tokens)


def _precisions(lane: TrainState, *, is_twin: bool) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    if lane.name == "fp8":
        yield result.FP8, nullcontext()
        yield result.HIGH, disabled(lane.model)
    else:
        yield result.TWIN if is_twin else result.BF16, nullcontext()


def _within(how: AbstractContextManager[None], lane: TrainState, batches: Iterable[Batch]) -> Tensor:
    with how:
        return heldout_scores(lane, batches)
