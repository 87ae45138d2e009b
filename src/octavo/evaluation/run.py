"""The evaluation of a run of `octavo train`: its weights as they were trained, in high precision, and its BF16 twin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from octavo.conversion import disabled
from octavo.data.loader import Batch
from octavo.data.tokenizer import Tokenizer, load_tokenizer
from octavo.errors import ConfigError
from octavo.evaluation.measure import Measured, Watch, measure, unwatched
from octavo.evaluation.result import BF16, FP8, HIGH, TWIN, Evaluation, evaluation
from octavo.evaluation.text import Cut, Text, heldout_text, trained_on, whole_text
from octavo.train import checkpoint
from octavo.train import device as devices
from octavo.train.config import RunConfig
from octavo.train.evaluate import heldout_scores
from octavo.train.load_run import find, settings_of, states_of
from octavo.train.train_state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What `octavo eval` was asked for."""

    data: str = ""
    """Text to evaluate on; empty: what the run holds out."""
    tokens: int | None = None
    """How many of it; None: all."""
    sequence: int = 0
    """Tokens in a sequence; 0: those of training."""
    step: int | None = None
    """Which checkpoint; None: the newest."""
    device: str = "auto"


class Reopened:
    """A run opened at one of its checkpoints."""

    def __init__(self, run: Path, settings: Settings) -> None:
        """Read the checkpoint; see `evaluate_run` for errors."""
        self.checkpoint = find(run, settings.step)
        has_twin = {"fp8", "bf16"} <= self.checkpoint.tensors.keys()
        self.config = settings_of(self.checkpoint, "octavo eval", {"device": settings.device, "twin": has_twin})
        devices.resolve(settings.device)  # what is refused, before the text, which takes longer
        self.tokenizer = tokenizer_of(self.config)

    def text(self, settings: Settings) -> tuple[Text, list[str]]:
        """Return the text to evaluate on, and what to know of it."""
        cut = _cut(self.checkpoint, self.config, settings)
        if settings.data:
            return whole_text(settings.data, self.tokenizer, cut), []
        text, now = heldout_text(self.config.data, self.tokenizer, cut)
        before = trained_on(self.checkpoint.path.parent.parent)
        changed = f"{text.source} has changed since the run read it: what is held out now may have been trained on"
        return text, [changed] if before not in ("", now) else []

    def measure(self, text: Text, watch: Watch) -> list[Measured]:
        """Return what each sequence costs: in FP8 and in high precision, or in BF16; and the BF16 twin."""
        lanes = states_of(self.checkpoint, self.config)
        return [
            measure(computed, partial(_within, how, lane), text, watch)
            for lane in lanes
            for computed, how in _ways(lane, is_twin=lane is not lanes[0])
        ]


def evaluate_run(run: Path, settings: Settings, watch: Watch = unwatched) -> Evaluation:
    """Evaluate a run on what it holds out of its text, or on any other.

    Args:
        run: directory of a run, or of one of its checkpoints; of any number of ranks.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: a device that is not there, or a longer sequence than the model knows.
        DataError: the text, or the run's tokenizer, is not there; or the text is shorter than a sequence.
    """
    reopened = Reopened(run, settings)
    text, notes = reopened.text(settings)
    found = reopened.measure(text, watch)
    loop = reopened.config.run
    model = {"directory": str(run), "step": reopened.checkpoint.step, "recipe": loop.recipe, "weights": loop.weights}
    return evaluation(model, text, devices.describe(devices.resolve(settings.device)), found, notes)


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """Return the tokenizer of a run.

    Raises:
        DataError: it is not there any more.
    """
    data = config.data
    return load_tokenizer(data.tokenizer, source=data.source, cache_dir=data.cache.expanduser())


def _cut(found: checkpoint.Checkpoint, config: RunConfig, settings: Settings) -> Cut:
    """Return sequences as in training, and as many at once as a rank of the run had."""
    run, parallel, longest = config.run, config.parallel, config.model.sequence
    sequence = settings.sequence or config.data.sequence
    if sequence > longest:
        raise ConfigError(f"--sequence {sequence}: the model knows no more than {longest} tokens (model.sequence).")
    parts = max(1, found.state.get("ranks", 1) // (parallel.tensor * parallel.pipeline))
    tokens = run.batch // (run.accumulate * parts) * config.data.sequence
    return Cut(sequence=sequence, rows=max(1, tokens // sequence), limit=settings.tokens)


def _ways(lane: TrainState, *, is_twin: bool) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    if lane.name == "fp8":
        yield FP8, nullcontext()
        yield HIGH, disabled(lane.model)
    else:
        yield TWIN if is_twin else BF16, nullcontext()


def _within(how: AbstractContextManager[None], lane: TrainState, batches: Iterable[Batch]) -> Tensor:
    with how:
        return heldout_scores(lane, batches)
