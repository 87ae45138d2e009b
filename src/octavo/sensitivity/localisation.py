"""`octavo.localize`: from a model and representative batches to a precision map."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.conversion.policy import Policy
from octavo.errors import ConfigError, NonFiniteError
from octavo.nn.scales import scales as kept_scales
from octavo.recipes import RecipeLike, load
from octavo.sensitivity import times
from octavo.sensitivity.choices import Choice
from octavo.sensitivity.gradient import cosines
from octavo.sensitivity.loss import Change, Loss, loss_changes
from octavo.sensitivity.result import Localisation, Sensitivity
from octavo.sensitivity.solve import Option, solve
from octavo.sensitivity.switchboard import Switchboard, switchboard

EXPONENT = 0.095
"""The loss falls with the tokens to the power of minus this (Kaplan et al. 2020, arXiv 2001.08361, equation 1.2)."""
Report = Callable[[str], None]


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a model that is called with inputs and targets."""
    loss: Tensor = model(*batch)
    return loss


def localize(
    model: nn.Module,
    batches: Sequence[Any],
    recipe: RecipeLike = "folded",
    *,
    budget: str | float = "0.1%",
    loss: Loss = call_model,
    few: int | None = None,
    autocast: torch.dtype | None = torch.bfloat16,
    tokens: int | None = None,
    measure: bool | None = None,
    progress: float | None = None,
    policy: Policy | None = None,
    scales: str | Path | None = None,
    report: Report = lambda doing: None,
) -> Localisation:
    """Find what FP8 costs in every layer and GEMM and what it saves, and choose what fits a budget of loss.

    Each GEMM is switched to FP8 alone, in place, against a model all in high precision; the model is afterwards what it
    was, without gradients. fprop costs the loss that it changes (`octavo.sensitivity.loss`). Each GEMM costs `progress`
    (1 - cosine) on top, for it turns the gradient: steps that make a share of their progress less are as good as that
    share of tokens less. Costs are added up, and the map is solved for (`octavo.sensitivity.solve`).

    Args:
        model: not converted. Its weights should be FP32: where BF16 rounds, ten times the tokens are needed.
        batches: representative data, on the model's device: whatever `loss` takes. Text never trained on is best.
        recipe: what a layer in FP8 computes by.
        budget: loss that the map may cost, as a share of the loss, '0.1%', or in nats a token, 0.002.
        loss: (model, batch) -> nats a token, of the batch or of each sequence (B,). Without autocast: see `autocast`.
        few: batches that layers are switched on one at a time; by default a quarter of them.
        autocast: what autocast computes in while the model trains: times are of that, and what does not need FP32 is
            computed in it. None: no autocast.
        tokens: of a forward pass in training, for the times; by default those of a batch.
        measure: whether times are measured or predicted for an H200; by default measured on a GPU.
        progress: nats that the loss falls while tokens grow e-fold; by default 0.095 of the loss.
        policy: layers that it keeps in BF16 are left out; layers that it finds too small to gain are measured.
        scales: a calibration file, which `static` needs. Other scales that are kept start from `few` batches.
        report: called with what is measured next.

    Raises:
        ConfigError: no batches, a budget that is none, a model that is converted, or one without a layer for FP8.
        NonFiniteError: the loss of the model is not finite.
    """
    if not batches:
        raise ConfigError("localize: there are no batches. Give it representative data.")
    allowed = parse_budget(budget)
    recipe, few = load(recipe), few or max(1, len(batches) // 4)
    given = None if scales is None else str(scales)
    with switchboard(model, recipe, policy, tokens or 8192, given) as board, products("highest"):
        _start_scales(board, batches[:few], loss, given)
        device = next(model.parameters()).device
        before, changes = loss_changes(board, batches, few, loss, report, times.autocast(device, autocast))
        _check_finite(before, changes)
        turned = cosines(board, batches[:few], loss, report)
        calls = times.calls_of(board, batches[0], loss, autocast, tokens)
        measure = device.type == "cuda" if measure is None else measure
        ms = times.measured(board, calls, autocast, report) if measure else times.predicted(board, calls)
        progress = EXPONENT * before if progress is None else progress
        layers = _choose(board, changes, turned, ms, allowed(before), progress)
    return Localisation(
        recipe=recipe,
        loss=before,
        budget=allowed(before),
        progress=progress,
        layers=layers,
        timing="measured" if measure else "predicted",
        device=str(device),
        batches=len(batches),
    )


def parse_budget(budget: str | float) -> Callable[[float], float]:
    """Return the function from the loss to the nats that a budget allows.

    Raises:
        ConfigError: it is neither a share, '0.1%', nor a number that is not negative.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*(%?)\s*", str(budget))
    if match is None:
        raise ConfigError(f"budget {budget!r}: it is a share of the loss, as 0.1%, or nats a token, as 0.002.")
    number, is_share = float(match[1]), bool(match[2])
    return lambda loss: number / 100 * loss if is_share else number


def _choose(
    board: Switchboard,
    changes: Mapping[str, Change],
    turned: Mapping[str, Mapping[str, float]],
    ms: Mapping[str, Mapping[Choice, float]],
    budget: float,
    progress: float,
) -> tuple[Sensitivity, ...]:
    """Return every layer that is called, with what was chosen for it."""
    quiet = Change(0.0, 0.0, 0.0)
    found = {
        name: Sensitivity(
            name=name,
            shape=board.rows[name].shape,
            recipes=board.offered[name],
            change=changes.get(name, quiet),
            cosines=turned[name],
            ms=ms[name],
            costs={
                gemm: _cost(gemm, changes.get(name, quiet), value, progress) for gemm, value in turned[name].items()
            },
            chosen=(),
        )
        for name in ms
    }
    options = {name: [Option(s.cost(choice), s.saved(choice)) for choice in s.recipes] for name, s in found.items()}
    places = solve(options, budget)
    return tuple(replace(s, chosen=list(s.recipes)[places[name]]) for name, s in found.items())


def _cost(gemm: str, change: Change, cosine: float, progress: float) -> float:
    """Return what a GEMM counts against the budget.

    A loss that falls is luck of these weights, and pays for nothing: what is of second order is counted at the least.
    """
    turned = progress * max(0.0, 1 - cosine)
    return turned + (max(change.mean, change.second_order, 0.0) if gemm == "fprop" else 0.0)


def _start_scales(board: Switchboard, batches: Sequence[Any], loss: Loss, given: str | None) -> None:
    """Let scales that are kept from step to step see data, unless they came from a file."""
    book = kept_scales(board.model)
    if book is None or given is not None:
        return
    with board.using({name: max(offered, key=len) for name, offered in board.offered.items()}), torch.enable_grad():
        for batch in batches:
            loss(board.model, batch).sum().backward()
            board.model.zero_grad(set_to_none=True)
            book.roll()


def _check_finite(before: float, changes: Mapping[str, Change]) -> None:
    if not math.isfinite(before):
        raise NonFiniteError(f"localize: the loss of the model is {before}, in high precision. Load a good checkpoint.")
    for name, change in changes.items():
        if not math.isfinite(change.mean):
            raise NonFiniteError(
                f"localize: with {name} in FP8 the loss is not finite. octavo.observed says which operand it is; keep "
                "the layer in BF16 by a policy to localise the others."
            )


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Multiply FP32 by FP32 as it is, `highest`, or on a GPU rounded to TF32, `high`."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
