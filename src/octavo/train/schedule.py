"""What changes over a run as pure functions of the step: the learning rate, and the precision."""

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


def is_bf16(step: int, *, steps: int, first: int, last_share: float) -> bool:
    """Return whether the FP8 model makes `step`, counted from 0, in BF16, in a run of `steps` steps.

    It does in the first `first` steps, where a model changes most, and in the last `last_share * steps` (rounded), so
    that what FP8 has cost is won back.
    """
    return step < first or step >= steps - round(last_share * steps)
