"""Evaluation of a run of `octavo train`: its weights in FP8 and in high precision, and its BF16 baseline in both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from octavo._util import config_reader
from octavo._util.terminal import Report, silent
from octavo.conversion import disabled
from octavo.errors import ConfigError
from octavo.lab.data.loader import Batch
from octavo.lab.evaluation import result
from octavo.lab.evaluation.result import Evaluation, Score, Scoring
from octavo.lab.evaluation.text import EvalText, SequenceLayout, heldout_text, trained_on, whole_text
from octavo.lab.train import device as devices
from octavo.lab.train.evaluate import heldout_scores
from octavo.lab.train.opening import open_run
from octavo.lab.train.setup import separator, tokenizer_of
from octavo.nn import GroupedLinear, Linear


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
        self.settings = settings
        self.subject = open_run(run, step=settings.step, by="octavo eval", device=settings.device, baseline=True)
        self.checkpoint, self.config = self.subject.trained, self.subject.config
        devices.resolve(settings.device)  # fail before the text, which takes longer
        self.tokenizer = tokenizer_of(self.config.data)

    def text(self) -> tuple[EvalText, list[str]]:
        """Return the text to evaluate on, with notes."""
        if self.settings.data:
            return whole_text(self.settings.data, self.tokenizer, self._layout()), []
        text, now = heldout_text(self.config, self.tokenizer, self._layout())
        before = trained_on(self.checkpoint.run)
        changed = f"{text.source} has changed since training: its held-out part may include training text"
        return text, [changed] if before not in ("", now) else []

    def noise(self, text: EvalText) -> dict[str, Any]:
        """Return what the finished run knows of the noise of its gap; empty for an earlier step or another text."""
        file = self.checkpoint.run / "summary.json"
        if not text.is_heldout or self.checkpoint.step != self.config.run.steps or not file.is_file():
            return {}
        return {key: value for key, value in config_reader.read_file(file).items() if key.startswith("gap_")}

    def _layout(self) -> SequenceLayout:
        """Return sequences as in training, in batches as on one rank of the run."""
        parallel, longest = self.config.parallel, self.config.model.sequence
        sequence = self.settings.sequence or self.config.data.sequence
        if sequence > longest:
            raise ConfigError(f"--sequence {sequence}: the model's maximum is {longest} tokens (model.sequence).")
        shared = parallel.tensor * parallel.pipeline * parallel.context
        parts = max(1, self.checkpoint.state.get("ranks", 1) // shared)
        rows = max(1, self.config.tokens_per_pass(parts) // sequence)
        return SequenceLayout(
            sequence=sequence,
            rows=rows,
            limit=self.settings.tokens,
            separate=separator(self.config, self.tokenizer),
        )

    def measure(self, text: EvalText, report: Report) -> list[Score]:
        """Return the scores in FP8 and in high precision, or in BF16; and of the BF16 baseline, in BF16 and in FP8.

        A model whose forward pass multiplies INT8 is scored in INT8 too. In FP8 the baseline has the stored scales of
        the FP8 model, and the storage of its weights. That score is left out if the recipe's forward pass is in BF16.
        """
        first, *baselines = self.subject.states()
        score: Scoring = partial(heldout_scores, first)

        def score_high(batches: Iterable[Batch]) -> Tensor:
            with disabled(first.model):
                return score(batches)

        def score_fp8(batches: Iterable[Batch]) -> Tensor:
            with fprop_in_fp8(first.model):
                return score(batches)

        ways: list[tuple[str, Scoring]] = [(result.FP8, score), (result.HIGH, score_high)]
        if integer_layers(first.model):
            ways = [(result.INT8, score), (result.FP8, score_fp8), (result.HIGH, score_high)]
        if first.name != "fp8":
            ways = [(result.BF16, score)]
        ways += [(result.BASELINE, partial(heldout_scores, baseline)) for baseline in baselines]
        found = [result.measure(computed, how, text, report) for computed, how in ways]
        for baseline in baselines if found[0].fp8_gemms else ():
            first.model.load_state_dict(baseline.model.state_dict())
            found.append(result.measure(result.QUANTISED, score, text, report))
        return found


def integer_layers(model: nn.Module) -> list[Linear | GroupedLinear]:
    """Return the layers whose fprop multiplies INT8 or rotated codes, and can be computed in FP8."""
    layers = (module for module in model.modules() if isinstance(module, Linear | GroupedLinear))
    return [each for each in layers if each.recipe.has_integer_fprop and each.recipe.with_fprop_in_fp8()]


@contextmanager
def fprop_in_fp8(model: nn.Module) -> Iterator[None]:
    """Compute fprop by the second set of codes inside the block, in layers that multiply INT8."""
    layers = integer_layers(model)
    before = [layer.recipe for layer in layers]
    changed = {id(recipe): recipe.with_fprop_in_fp8() or recipe for recipe in before}
    try:
        for layer, recipe in zip(layers, before, strict=True):
            layer.recipe = changed[id(recipe)]
        yield
    finally:
        for layer, recipe in zip(layers, before, strict=True):
            layer.recipe = recipe


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
    text, notes = loaded.text()
    found = loaded.measure(text, report)
    loop = loaded.config.run
    recipe = loaded.checkpoint.state["config"]["run"]["recipe"]  # as the run was given it
    model = {"directory": str(run), "step": loaded.checkpoint.step, "recipe": recipe, "weights": loop.weights}
    device = devices.describe(devices.resolve(settings.device))
    return result.evaluation(model, text, device, found, notes, loaded.noise(text))
