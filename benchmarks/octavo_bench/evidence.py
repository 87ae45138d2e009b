"""Evidence for a difference between two recipes: 95 % confidence intervals, equal loss, gradient cosines.

Two pairings answer two questions. Over seeds: would another seed show this difference? Over held-out sequences: are
these particular weights worse, or is it the choice of text? The second has thousands of pairs but ignores seeds.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression, stdev
from typing import Any

import torch
from torch import Tensor, nn

from octavo._util import config_reader
from octavo.conversion import Policy, convert
from octavo.errors import ConfigError
from octavo.lab.data.loader import Batch
from octavo.lab.train import checkpoint
from octavo.lab.train.config import assemble
from octavo.lab.train.evaluate import paired_interval, student
from octavo.lab.train.setup import set_up
from octavo.lab.train.train_state import TrainState
from octavo.numerics import cosine_of, inner_products


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    half_width: float | None
    """Half of the 95 % confidence interval; None for a single pair, which shows no spread."""


def over_seeds(differences: Sequence[float]) -> Interval:
    """Return the mean of the differences, one per seed, with its interval.

    With two seeds Student's factor is 12.7, so the interval is wide.
    """
    if len(differences) < 2:
        return Interval(fmean(differences), None)
    error = stdev(differences) / math.sqrt(len(differences))
    return Interval(fmean(differences), student(len(differences) - 1) * error)


@dataclass(frozen=True, slots=True)
class Line:
    """Least-squares line."""

    slope: Interval
    """With its 95 % confidence interval."""
    center: tuple[float, float]
    """Means of x and y, a point on the line."""
    width: float
    """Root of the sum of squares of x about its mean."""
    points: int

    def at(self, x: float) -> Interval:
        """Return the line at x, with the 95 % confidence interval of its mean there."""
        away = (x - self.center[0]) / self.width
        error = (self.slope.half_width or 0.0) * self.width * math.sqrt(1 / self.points + away**2)
        return Interval(self.center[1] + self.slope.mean * (x - self.center[0]), error)


def fit(x: Sequence[float], y: Sequence[float]) -> Line:
    """Return the least-squares line, with intervals by Student's t at n - 2 degrees of freedom.

    Raises:
        ConfigError: fewer than three points, whose scatter is unknown.
    """
    if len(x) < 3:
        raise ConfigError(f"a line through {len(x)} points has no interval: three or more are needed.")
    slope, intercept = linear_regression(x, y)
    squares = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    width = math.sqrt(sum((a - fmean(x)) ** 2 for a in x))
    error = student(len(x) - 2) * math.sqrt(squares / (len(x) - 2)) / width
    return Line(Interval(slope, error), (fmean(x), fmean(y)), width, len(x))


LEVEL = 0.05
"""Probability that an interval misses the true value."""


def at_any_time(differences: Sequence[float]) -> Interval:
    """Return the mean of the differences with an anytime-valid confidence interval.

    With 95 % probability all intervals of a growing sample contain the true mean, so that optional stopping after any
    pair is valid. The half width is None while no finite interval is valid: up to four pairs.
    """
    errors = errors_at_any_time(len(differences))
    if errors is None:
        return Interval(fmean(differences), None)
    return Interval(fmean(differences), errors * stdev(differences) / math.sqrt(len(differences)))


def errors_at_any_time(pairs: int, level: float = LEVEL) -> float | None:
    """Return the half width of that interval in standard errors of the mean; None if unbounded.

    The interval contains each mean m that a mixture of likelihood ratios does not reject: that of N(m + d s, s^2) to
    N(m, s^2), integrated over d ~ N(0, 1) and over s with density 1 / s. It is a test martingale where m is the mean
    (Lai 1976; Perez-Ortiz et al. 2024), and exceeds 1 / level at any time with probability `level` at most (Ville).
    With t = (mean - m) / standard error it is

        (1 + n)^(-1/2) ((1 + t^2 / (n - 1)) / (1 + t^2 / ((1 + n) (n - 1))))^(n/2)

    Exact for independent normal differences of unknown variance.
    """
    grown = 1 + pairs
    ratio = (grown / level**2) ** (1 / pairs) if pairs else math.inf
    return None if ratio >= grown else math.sqrt((pairs - 1) * (ratio - 1) / (1 - ratio / grown))


def over_sequences(losses: Sequence[float], reference: Sequence[float], block: int = 16) -> Interval:
    """Return the mean of `losses - reference`, paired by sequence, with its interval (`paired_interval`)."""
    return Interval(*paired_interval(losses, reference, block))


POINTS = 40
"""Points of a stored training-loss curve, each the mean over its part of the run."""


def stored_curve(losses: Tensor) -> list[float]:
    """Return the training loss as `POINTS` means over equal parts of the run, or unchanged if it has fewer steps."""
    return [round(float(part.mean()), 5) for part in losses.tensor_split(min(POINTS, len(losses)))]


SMOOTHED = 0.05
"""Window of a smoothed curve, as a share of the run: single batches differ far more than recipes."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The smoothed training loss of one run."""

    tokens: tuple[float, ...]
    """Tokens trained on at each point: the middle of its window."""
    loss: tuple[float, ...]
    """Nats per token."""


@dataclass(frozen=True, slots=True)
class EqualLoss:
    """Two runs compared at equal loss: the higher of their final losses."""

    loss: float
    tokens_ratio: float
    """Tokens that the recipe needs for it, in units of the reference's; below 1: it needs fewer."""


def read_curve(metrics: Sequence[Mapping[str, Any]], lane: str) -> Curve:
    """Return the curve of `lane` from the lines of `metrics.jsonl`, smoothed by a moving average."""
    logged = [(line["tokens"], line[f"loss_{lane}"]) for line in metrics if line.get(f"loss_{lane}") is not None]
    width = max(1, round(SMOOTHED * len(logged)))
    windows = [logged[start : start + width] for start in range(len(logged) - width + 1)]
    return Curve(
        tuple(fmean(tokens for tokens, _ in window) for window in windows),
        tuple(fmean(loss for _, loss in window) for window in windows),
    )


def tokens_to(curve: Curve, loss: float) -> float:
    """Return the tokens after which `curve` stays at or below `loss`, interpolated linearly."""
    above = [i for i, value in enumerate(curve.loss) if value > loss]
    if not above:
        return curve.tokens[0]
    i = above[-1]
    if i + 1 == len(curve.loss):
        return curve.tokens[i]
    share = (curve.loss[i] - loss) / (curve.loss[i] - curve.loss[i + 1])
    return curve.tokens[i] + share * (curve.tokens[i + 1] - curve.tokens[i])


def equal_loss(curve: Curve, reference: Curve) -> EqualLoss:
    """Compare two runs at the higher of their final losses, which both have reached."""
    loss = max(curve.loss[-1], reference.loss[-1])
    return EqualLoss(loss, tokens_to(curve, loss) / tokens_to(reference, loss))


BEFORE = 2
"""Warm-up batches before the measured one, for scales with a history."""


def gradient_cosines(run: Path, recipes: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each recipe with the keys to add to its rows of kind `parity`.

    `cosine_start`, `cosine_end`: of the gradients of all weights as one vector, at the initial and at the final weights
    of the BF16 run; `cosine_layer_start`, `cosine_layer_end`: the lowest of a single matrix.

    Args:
        run: directory of a finished run in BF16.
    """
    config = assemble((str(run / "config.json"), config_reader.read_file(run / "config.json")))
    eager = dataclasses.replace(config.run, compile="off", baseline=False)
    setup = set_up(dataclasses.replace(config, run=eager))
    [lane] = setup.states
    part = config.run.batch // config.run.accumulate
    batches = [(x[:part], y[:part]) for x, y in itertools.islice(setup.loader, BEFORE + 1)]
    policy = Policy(min_gain=config.run.min_gain)
    found: dict[str, dict[str, Any]] = {recipe: {} for recipe in recipes}
    for moment in ("start", "end"):
        if moment == "end":
            _load_last(lane, run)
        reference = _gradients(lane, batches[-1:])
        for recipe in recipes:
            model = copy.deepcopy(lane.model)
            convert(model, recipe, policy=policy)
            gradients = _gradients(TrainState("fp8", model, config.optimizer), batches)
            whole, worst = compare(gradients, reference)
            found[recipe] |= {f"cosine_{moment}": whole, f"cosine_layer_{moment}": worst}
    yield from found.items()


def compare(gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the cosine of two gradients, each as one vector, and the lowest cosine of a single matrix."""
    products = {name: inner_products(gradients[name], reference[name]) for name in reference}
    whole = cosine_of(torch.stack([*products.values()]).sum(0))
    return whole, min(cosine_of(products[name]) for name in reference if reference[name].dim() >= 2)


def _load_last(lane: TrainState, run: Path) -> None:
    path = checkpoint.find(run / "checkpoints")[-1]
    saved = checkpoint.load(path).tensors["bf16"]
    weights: dict[str, Any] = {n.removeprefix("model."): t for n, t in saved.items() if n.startswith("model.")}
    lane.model.load_state_dict(weights, strict=False)  # a tied weight is saved once


def _gradients(lane: TrainState, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Return the gradient of the last batch; earlier batches only update stored scales."""
    model: nn.Module = lane.model.train()
    remember = torch.optim.SGD(model.parameters(), lr=0.0)  # stored scales are updated by an optimizer step
    for inputs_BT, targets_BT in batches:
        model.zero_grad(set_to_none=True)
        lane.loss(inputs_BT.to(lane.device), targets_BT.to(lane.device)).backward()
        remember.step()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache() if lane.device.type == "cuda" else None
    return gradients
