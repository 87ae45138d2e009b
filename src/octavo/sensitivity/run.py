"""Localise a run of `octavo train` (`octavo localize`): its newest weights, on held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo._util.terminal import Report
from octavo.conversion import revert
from octavo.errors import DataError
from octavo.models.factory import count_parameters, model_name
from octavo.recipes import load
from octavo.sensitivity.localisation import localize, parse_budget
from octavo.sensitivity.result import Localisation
from octavo.sensitivity.verify import verify
from octavo.train.files import read_metrics
from octavo.train.load_run import find, restore, settings_of
from octavo.train.setup import Batch, Setup

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
    maps: int = 0
    """Number of random maps to verify predictions with; 0: no verification."""
    verify_tokens: int = 4 * TOKENS
    """Number of further held-out tokens to verify on."""


def localize_run(run: Path, settings: Settings, report: Report) -> tuple[Localisation, list[dict[str, Any]]]:
    """Return the localisation of the run's newest weights, and the rows of a result if it was verified.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        DataError: the run's text no longer exists, or is too short to verify on.
    """
    parse_budget(settings.budget)
    recipe = load(settings.recipe) if settings.recipe else None
    found = find(run)
    wanted = settings.tokens + (settings.verify_tokens if settings.maps else 0)
    config = settings_of(found, "octavo localize", {"device": settings.device, "eval_tokens": wanted})
    setup = restore(found, config)
    model = setup.states[0].model
    revert(model)
    model.float()
    seen, others = _split(list(_pieces(setup, min(BATCH_TOKENS, settings.tokens))), settings, setup)
    recipe = recipe or load(config.run.recipe)
    scales = config.run.scales or None
    localisation = localize(
        model,
        seen,
        recipe,
        budget=settings.budget,
        loss=by_sequence,
        few=min(len(seen), max(1, FEW_TOKENS // seen[0][1].numel())),
        tokens=config.run.batch // config.run.accumulate * config.data.sequence,
        measure=settings.measure,
        progress=progress_of(read_metrics(found.path.parent.parent / "metrics.jsonl")),
        scales=scales,
        report=report,
    )
    if not settings.maps:
        return localisation, []
    about = {
        "workload": model_name(config.model.architecture, count_parameters(model)),
        "recipe": recipe.name,
        "step": found.step,
        "probe_tokens": sum(targets.numel() for _, targets in seen),
        "heldout_tokens": sum(targets.numel() for _, targets in others),
    }
    rows = verify(model, localisation, others, by_sequence, maps=settings.maps, scales=scales, report=report)
    return localisation, [about | row for row in rows]


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
    steps, of_them = np.array(known).T
    return max(0.0, -float(np.polyfit(steps, of_them, 1)[0]))


def _pieces(setup: Setup, tokens: int) -> Iterator[Batch]:
    """Yield the held-out sequences in a fixed random order, in batches of about `tokens` tokens."""
    inputs_ST, targets_ST = (torch.cat(part) for part in zip(*setup.heldout, strict=True))
    order = torch.randperm(len(inputs_ST), generator=torch.Generator().manual_seed(0))
    for rows in order.split(max(1, tokens // targets_ST.shape[1])):
        yield inputs_ST[rows].to(setup.device), targets_ST[rows].to(setup.device)


def _split(batches: list[Batch], settings: Settings, setup: Setup) -> tuple[list[Batch], list[Batch]]:
    """Return the batches to localise on and those to verify on, which are disjoint."""
    count, tokens = 0, 0
    while count < len(batches) and tokens < settings.tokens:
        tokens += batches[count][1].numel()
        count += 1
    if settings.maps and count == len(batches):
        raise DataError(
            f"{setup.config.data.source}: has {tokens:,} held-out tokens, and all would be localised on. Leave some to "
            f"verify on: --tokens {max(1, tokens // 4)}"
        )
    return batches[:count], batches[count:]
