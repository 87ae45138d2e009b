"""`octavo.localize`: from a model and representative batches to a precision map."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo._util.terminal import Report, silent
from octavo.conversion.default_recipe import choose
from octavo.conversion.planner import find_attentions
from octavo.conversion.policy import Policy
from octavo.errors import ConfigError, NonFiniteError
from octavo.lab.sensitivity import times
from octavo.lab.sensitivity.gradient import backward_passes, cosines
from octavo.lab.sensitivity.loss import FORWARD_BACKWARD, UNCHANGED, Change, Loss, loss_changes
from octavo.lab.sensitivity.precision_switch import Choice, PrecisionSwitch, fullest, switchable
from octavo.lab.sensitivity.result import Localisation, Sensitivity
from octavo.lab.sensitivity.solve import Option, solve
from octavo.nn.scaling_state import scales as kept_scales
from octavo.recipes import RecipeLike

EXPONENT = 0.095
"""Exponent of the loss in the number of tokens (Kaplan et al. 2020, arXiv 2001.08361, equation 1.2)."""


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """Call the model with inputs and targets and return its loss."""
    loss: Tensor = model(*batch)
    return loss


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Settings of the measurements of `octavo.localize`."""

    few: int | None = None
    """Number of batches on which layers are switched one by one; by default a quarter."""
    autocast: torch.dtype | None = torch.bfloat16
    """Autocast dtype of training, used for times and where FP32 is not needed. None: no autocast."""
    tokens: int | None = None
    """Tokens per forward pass in training, for the times; by default those of a batch."""
    measure: bool | None = None
    """Measure times or predict them for an H200; by default measured on a GPU."""
    progress: float | None = None
    """Decrease of the loss in nats while tokens grow e-fold; by default 0.095 of the loss."""
    scales: str | Path | None = None
    """A calibration file, required by `static`. Other stored scales are initialised on `few` batches."""
    report: Report = silent
    """Called before each measurement with its description and the share of all work that is done, 0 to 1."""


class Work:
    """Counts passes over a batch, in forward passes, and reports the share that is done."""

    def __init__(self, report: Report, total: float) -> None:
        self._report, self._total, self._done = report, total, 0.0

    def __call__(self, doing: str, passes: float) -> None:
        """Report a measurement that begins and takes this many passes."""
        self._report(doing, min(self._done / self._total, 1.0))
        self._done += passes


def localize(
    model: nn.Module,
    batches: Sequence[Any],
    recipe: RecipeLike | None = None,
    *,
    budget: str | float = "0.1%",
    loss: Loss = call_model,
    policy: Policy | None = None,
    **options: Any,
) -> Localisation:
    """Measure the cost and gain of FP8 in every layer and GEMM, and choose a precision map within a budget of loss.

    Each GEMM is switched to FP8 alone, in place, against the model in high precision; afterwards the model is unchanged
    and has no gradients. fprop costs the change of the loss (`octavo.lab.sensitivity.loss`). Each GEMM also costs
    `progress` (1 - cosine), as it turns the gradient: losing a share of progress per step equals training on that share
    of tokens less. Costs add up, and the map is the optimum (`octavo.lab.sensitivity.solve`).

    Args:
        model: not converted. FP32 weights are best: BF16 rounding requires ten times the tokens.
        batches: representative data, preferably not trained on, on the model's device, in the form that `loss` takes.
        recipe: recipe of layers in FP8; None: the default (`octavo.plan`).
        budget: loss that the map may cost, as a share of the loss, '0.1%', or in nats per token, 0.002.
        loss: (model, batch) -> nats per token, of the batch or per sequence (B,). Without autocast: see `autocast`.
        policy: layers that it keeps in BF16 are left out; layers too small to gain are measured.
        options: fields of `Measurement`.

    Raises:
        ConfigError: no batches, an invalid budget, a converted model, or a model without a layer for FP8.
        NonFiniteError: the loss or the gradient is not finite, in high precision or with a layer in FP8.
    """
    if not batches:
        raise ConfigError("localize: there are no batches. Give it representative data.")
    allowed, how = parse_budget(budget), Measurement(**options)
    recipe, _ = choose(recipe, model, policy or Policy(), device := next(model.parameters()).device)
    few, tokens = how.few or max(1, len(batches) // 4), how.tokens or 8192
    given = None if how.scales is None else str(how.scales)
    with switchable(model, recipe, policy, tokens, given) as switch, matmul_precision("highest"), _no_gradients(model):
        _start_scales(switch, batches[:few], loss, given)
        measure = device.type == "cuda" if how.measure is None else how.measure
        each = 1 + len(switch.only("fprop")) + FORWARD_BACKWARD * (1 + backward_passes(switch))
        report = Work(how.report, FORWARD_BACKWARD * len(batches) + few * each + len(switch.layers) * measure)
        before, changes = loss_changes(switch, batches, few, loss, report, times.autocast(device, how.autocast))
        _check_loss(before)
        directions = cosines(switch, batches[:few], loss, report)
        _check_changes(changes)  # after the gradients, which make them NaN if they are
        calls = times.calls_of(switch, batches[:few], loss, how.autocast, how.tokens)
        ms = times.measured(switch, calls, how.autocast, report) if measure else times.predicted(switch, calls)
        progress = EXPONENT * before if how.progress is None else how.progress
        layers = _choose(switch, changes, directions, ms, allowed(before), progress)
    return Localisation(
        recipe=recipe,
        loss=before,
        budget=allowed(before),
        progress=progress,
        layers=layers,
        timing="measured" if measure else "predicted",
        device=str(device),
        batches=len(batches),
        unmeasured=tuple(find_attentions(model)),
    )


def parse_budget(budget: str | float) -> Callable[[float], float]:
    """Return a function from the loss to the budget in nats.

    Raises:
        ConfigError: it is neither a share, '0.1%', nor a non-negative number.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*(%?)\s*", str(budget))
    if match is None:
        raise ConfigError(f"budget {budget!r}: it must be a share of the loss, as 0.1%, or nats per token, as 0.002.")
    number, is_share = float(match[1]), bool(match[2])
    return lambda loss: number / 100 * loss if is_share else number


def _choose(
    switch: PrecisionSwitch,
    changes: Mapping[str, Change],
    cosines: Mapping[str, Mapping[str, float]],
    ms: Mapping[str, Mapping[Choice, float]],
    budget: float,
    progress: float,
) -> tuple[Sensitivity, ...]:
    """Return every layer with its choice; one without times was not called, and stays in high precision."""
    found = {}
    for name, offered in switch.offered.items():
        change = changes.get(name, UNCHANGED)
        found[name] = Sensitivity(
            name=name,
            shape=switch.rows[name].shape,
            recipes=offered,
            change=change,
            cosines=cosines[name],
            ms=ms.get(name, {}),
            costs={gemm: _cost(gemm, change, cosine, progress) for gemm, cosine in cosines[name].items()},
            chosen=(),
        )
    measured = {name: s for name, s in found.items() if s.ms}
    options = {name: [Option(s.cost(choice), s.saved(choice)) for choice in s.recipes] for name, s in measured.items()}
    places = dict.fromkeys(found, 0) | solve(options, budget)
    return tuple(replace(s, chosen=list(s.recipes)[places[name]]) for name, s in found.items())


def _cost(gemm: str, change: Change, cosine: float, progress: float) -> float:
    """Return the cost of a GEMM against the budget.

    A decrease of the loss is luck of these weights and not credited: the second-order part is the least cost.
    """
    turned = progress * max(0.0, 1 - cosine)
    return turned + (max(change.mean, change.second_order, 0.0) if gemm == "fprop" else 0.0)


def _start_scales(switch: PrecisionSwitch, batches: Sequence[Any], loss: Loss, given: str | None) -> None:
    """Initialise stored scales on data, unless they came from a file."""
    scaling_state = kept_scales(switch.model)
    if scaling_state is None or given is not None:
        return
    with switch.using({name: fullest(offered) for name, offered in switch.offered.items()}), torch.enable_grad():
        for batch in batches:
            loss(switch.model, batch).sum().backward()
            switch.model.zero_grad(set_to_none=True)
            scaling_state.update_scales()


def _check_loss(before: float) -> None:
    if not math.isfinite(before):
        raise NonFiniteError(f"localize: the loss of the model is {before}, in high precision. Load a good checkpoint.")


def _check_changes(changes: Mapping[str, Change]) -> None:
    for name, change in changes.items():
        if not math.isfinite(change.mean):
            raise NonFiniteError(
                f"localize: with {name} in FP8 the change of the loss is not finite. octavo.observed names the "
                "operand; keep the layer in BF16 by a policy to localise the others."
            )


@contextmanager
def _no_gradients(model: nn.Module) -> Iterator[None]:
    """Drop the gradients of a model after the block, also where a pass failed after its backward."""
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of FP32 matmuls: `highest`, or `high` for TF32 on a GPU."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
