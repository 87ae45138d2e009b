"""Intervals of paired differences, and the curves of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, stdev

from torch import Tensor

from octavo.errors import ConfigError
from octavo.lab.train.evaluate import student


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


POINTS = 40
"""Points of a stored training-loss curve, each the mean over its part of the run."""


def stored_curve(losses: Tensor) -> list[float]:
    """Return the training loss as `POINTS` means over equal parts of the run, or unchanged if it has fewer steps."""
    return [round(float(part.mean()), 5) for part in losses.tensor_split(min(POINTS, len(losses)))]
