"""The learning rate as a pure function of the step: a linear warm-up, then half a cosine."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, peak: float, warmup: float, floor: float) -> float:
    """Return the learning rate of `step`, counted from 0, in a run of `steps` steps.

    It rises in a straight line over the first `warmup * steps` steps (above 0: the first step learns),
    reaches `peak` at their end, and falls along half a cosine to `floor * peak` at the last step.
    """
    rising = round(warmup * steps)
    if step < rising:
        return peak * (step + 1) / rising
    falling = max(1, steps - 1 - rising)
    progress = min(1.0, (step - rising) / falling)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
