"""Localise a run of `octavo train` (`octavo localize`): the weights of a checkpoint, on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo._util.terminal import Report
from octavo.conversion import revert
from octavo.lab.data.loader import Batch
from octavo.lab.sensitivity.localisation import localize, parse_budget
from octavo.lab.sensitivity.result import Localisation
from octavo.lab.train.files import read_metrics
from octavo.lab.train.opening import open_run
from octavo.lab.train.setup import Setup
from octavo.recipes import load

TOKENS = 131_072
FEW_TOKENS = 16_384
"""Tokens on which layers are switched one by one."""
BATCH_TOKENS = 8192
"""Tokens per backward pass in FP32."""
MANY_LOGGED = 8
"""Smallest number of log lines from which the slope of the loss is estimated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The options of `octavo localize`."""

    recipe: str = ""
    """Recipe; empty: that of the run."""
    budget: str = "0.1%"
    tokens: int = TOKENS
    """Number of held-out tokens to localise on."""
    device: str = "auto"
    measure: bool | None = None


def localize_run(run: Path, settings: Settings, report: Report) -> Localisation:
    """Return the localisation of the weights of a run's checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        DataError: the run's text no longer exists.
    """
    parse_budget(settings.budget)  # wrong settings are found before the run is loaded
    if settings.recipe:
        load(settings.recipe)
    opened = open_run(run, by="octavo localize", device=settings.device, eval_tokens=settings.tokens)
    setup = opened.setup()
    config, model = setup.config, setup.states[0].model
    revert(model)
    model.float()
    batches = list(_pieces(setup, min(BATCH_TOKENS, settings.tokens)))
    batches = batches[: count_batches(batches, settings.tokens)]
    return localize(
        model,
        batches,
        settings.recipe or config.run.recipe,
        budget=settings.budget,
        loss=by_sequence,
        few=min(len(batches), max(1, FEW_TOKENS // batches[0][1].numel())),
        tokens=config.tokens_per_pass(),
        measure=settings.measure,
        progress=progress_of(read_metrics(opened.directory / "metrics.jsonl")),
        scales=config.run.scales or None,
        report=report,
    )


def count_batches(batches: Sequence[Batch], tokens: int) -> int:
    """Return how many of the first batches have that many tokens; all if they have fewer."""
    totals = accumulate(targets.numel() for _, targets in batches)
    return next((count for count, total in enumerate(totals, 1) if total >= tokens), len(batches))


def by_sequence(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss per sequence in nats per token, (B,), in the model's own precision."""
    loss: Tensor = model(*batch, by_sequence=True)
    return loss


def progress_of(metrics: Sequence[dict[str, Any]]) -> float | None:
    """Return the decrease of the loss in nats while tokens grow e-fold, in the second half of a run; None if unknown.

    It is the least-squares slope of the logged loss against the logarithm of the step.
    """
    losses = {line["step"]: line.get("loss_fp8", line.get("loss_bf16")) for line in metrics if "lr" in line}
    known = [(math.log(step), loss) for step, loss in losses.items() if loss is not None and step >= max(losses) / 2]
    if len(known) < MANY_LOGGED:
        return None
    log_steps, values = np.array(known).T
    return max(0.0, -float(np.polyfit(log_steps, values, 1)[0]))


def _pieces(setup: Setup, tokens: int) -> Iterator[Batch]:
    """Yield the held-out sequences in a fixed random order, in batches of about `tokens` tokens."""
    inputs_ST, targets_ST = (torch.cat(part) for part in zip(*setup.heldout, strict=True))
    order = torch.randperm(len(inputs_ST), generator=torch.Generator().manual_seed(0))
    for rows in order.split(max(1, tokens // targets_ST.shape[1])):
        yield inputs_ST[rows].to(setup.device), targets_ST[rows].to(setup.device)
