"""Verification of `octavo localize`: predicted and measured changes of the loss, on other text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from octavo._util.terminal import Report, progress, silent
from octavo.conversion.policy import Policy
from octavo.errors import DataError
from octavo.lab.models.factory import count_parameters, model_name
from octavo.lab.sensitivity.localisation import matmul_precision
from octavo.lab.sensitivity.loss import Loss, losses
from octavo.lab.sensitivity.precision_switch import Choice, switchable
from octavo.lab.sensitivity.result import Localisation
from octavo.lab.sensitivity.run import TOKENS, Settings, by_sequence, count_batches, localize_target, open_target
from octavo.lab.train.evaluate import standard_error
from octavo_bench.kind import TO_STDOUT, Kind, Output, device_named
from octavo_bench.results import Row

SINGLE, RANDOM = "single layers", "random maps"
LEAST = 0.7
"""Lowest acceptable rank correlation of predicted and measured changes of the loss."""
KIND = Kind(
    name="localize",
    keys={"workload": str, "layers": int, "predicted": list, "measured": list, "rank_correlation": float},
    columns=(
        ("workload", "{workload}"),
        ("recipe", "{recipe}"),
        ("maps", "{maps}"),
        ("count", "{count}"),
        ("tokens to predict", "{probe_tokens:,}"),
        ("tokens to measure", "{heldout_tokens:,}"),
        ("rank correlation", "{rank_correlation:.3f}"),
    ),
    names=3,
    told=(("standard error of a measured change", "{error:.0e}"),),
    derived=lambda row: {"count": len(row["predicted"])},
    may_fail=False,
)


def verify(
    model: nn.Module,
    found: Localisation,
    batches: Sequence[Any],
    loss: Loss,
    *,
    maps: int,
    policy: Policy | None = None,
    scales: str | None = None,
    report: Report = silent,
) -> list[dict[str, Any]]:
    """Return a row for single layers and a row for random maps.

    Predicted changes are summed over the layers with fprop in FP8; measured is the loss of the model on `batches` minus
    that in high precision. Random maps have any number of layers with equal probability.

    Everything else is in the model's own precision, with TF32 on a GPU: in BF16, rounding after each changed layer
    would require four times the tokens.

    Args:
        model, policy, scales: as for `octavo.localize`.
        found: the localisation.
        batches: data not used for `found`.
        loss: see `Loss`.
        maps: number of single layers, drawn at random, and of random maps.
        report: called before each measurement, with the completed share.
    """
    names = [layer.name for layer in found.layers if ("fprop",) in layer.recipes]
    predicted = {layer.name: layer.change.mean for layer in found.layers}
    groups = {SINGLE: _some(names, maps), RANDOM: list(random_maps(names, maps))}
    rows = []
    precision = "high" if next(model.parameters()).is_cuda else "highest"
    with switchable(model, found.recipe, policy, 8192, scales) as switch, matmul_precision(precision):
        before = losses(model, batches, loss)
        done, total = 1, 1 + sum(map(len, groups.values()))  # forward passes over the batches
        for title, group in groups.items():
            measured, errors = [], []
            for number, layers in enumerate(group):
                report(f"verify, {title} {number + 1} of {len(group)}", done / total)
                done += 1
                chosen: dict[str, Choice] = dict.fromkeys(layers, ("fprop",))
                with switch.using(chosen):
                    change = losses(model, batches, loss) - before
                measured.append(float(change.mean()))
                errors.append(standard_error(change))
            sums = [sum(predicted[name] for name in layers) for layers in group]
            rows.append(_row(title, group, sums, measured, errors))
    return rows


def _some(names: Sequence[str], count: int) -> list[list[str]]:
    """Return `count` random single layers, in the order of the model."""
    picked = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))[:count].tolist()
    return [[names[place]] for place in sorted(picked)]


def random_maps(names: Sequence[str], count: int) -> Iterator[list[str]]:
    """Yield random maps with a uniformly distributed number of layers, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        size = int(torch.randint(1, len(names) + 1, (), generator=generator))
        picked = torch.randperm(len(names), generator=generator)[:size].tolist()
        yield [names[place] for place in sorted(picked)]


def _row(
    title: str, group: Sequence[Sequence[str]], predicted: list[float], measured: list[float], errors: list[float]
) -> dict[str, Any]:
    return {
        "maps": title,
        "layers": max(map(len, group), default=0) if title == RANDOM else len(group),
        "predicted": predicted,
        "measured": measured,
        "error": float(np.mean(errors)),
        "rank_correlation": rank_correlation(predicted, measured),
    }


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation, ties at their mean rank; 0 if either does not vary."""
    ranks = np.array([_ranks(a), _ranks(b)])
    centred = ranks - ranks.mean(1, keepdims=True)
    spread = np.sqrt((centred**2).sum(1)).prod()
    return float((centred[0] * centred[1]).sum() / spread) if spread else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    x = np.asarray(values, dtype=np.float64)
    below, same = (x[:, None] > x).sum(1), (x[:, None] == x).sum(1)
    ranks: np.ndarray[Any, Any] = below + (same - 1) / 2
    return ranks


def verify_run(
    run: Path, settings: Settings, maps: int, verify_tokens: int, report: Report = silent
) -> list[dict[str, Any]]:
    """Return the rows of a run's newest weights, localised and verified on different held-out text.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        DataError: the run's text no longer exists, or is too short to verify on.
    """
    target = open_target(run, settings, settings.tokens + verify_tokens)
    config, model = target.setup.config, target.setup.states[0].model
    count = count_batches(target.batches, settings.tokens)
    parts = target.batches[:count], target.batches[count:]
    seen, others = (sum(targets.numel() for _, targets in part) for part in parts)
    if not others:
        raise DataError(
            f"{config.data.source}: has {seen:,} held-out tokens, and all would be localised on. Leave some to "
            f"verify on: --tokens {max(1, seen // 4)}"
        )
    found = localize_target(target, settings, report)
    scales = config.run.scales or None
    about = {
        "workload": model_name(config.model.architecture, count_parameters(model)),
        "recipe": found.recipe.name,
        "step": target.run.trained.step,
        "probe_tokens": seen,
        "heldout_tokens": others,
    }
    return [about | row for row in verify(model, found, parts[1], by_sequence, maps=maps, scales=scales, report=report)]


def command(
    run: Path,
    /,
    *,
    maps: int = 16,
    recipe: str = "",
    tokens: int = TOKENS,
    verify_tokens: int = 4 * TOKENS,
    device: str = "auto",
    output: Output = TO_STDOUT,
) -> int:
    """Localise a run as `octavo localize` does, and verify its predictions on other held-out text.

    Exits with 1 if the rank correlation of predicted and measured changes of the loss is below 0.7.

    Examples:

        octavo bench localize runs/demo
        octavo bench localize runs/demo --maps 24 --verify-tokens 1000000

    Parameters
    ----------
    run
        Directory of a run or of one of its checkpoints.
    maps
        Number of single layers, and of random maps, to apply.
    recipe
        Recipe of the layers in FP8, a name or a recipe file; by default the run's.
    tokens
        Number of held-out tokens to localise on.
    verify_tokens
        Number of further held-out tokens to verify on.
    device
        cuda or cpu; auto takes the GPU if there is one.
    """
    settings = Settings(recipe=recipe, tokens=tokens, device=device)
    with progress() as report:
        rows = verify_run(run, settings, maps, verify_tokens, report)
    flags: Row = {"maps": maps, "recipe": recipe, "tokens": tokens, "verify_tokens": verify_tokens}
    output.keep(KIND, rows, run.name, device=device_named(device), **flags)
    return int(any(row["rank_correlation"] < LEAST for row in rows))
