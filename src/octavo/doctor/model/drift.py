"""Drift: the same weights on the same batch, in FP8 and in the model's own precision."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from octavo import kernels
from octavo.conversion import disabled
from octavo.dashboard.verdict import GAP_LIMIT
from octavo.doctor.check import Finding, Verdict, check, failure, ok, skipped, warning
from octavo.doctor.subjects import Trial, fp8_layers
from octavo.generators import untouched_generators
from octavo.numerics import cosine_of, inner_products
from octavo.recipes import GEMMS

COSINE = 0.9
"""Least cosine between a layer's gradient in FP8 and in high precision that is usual."""


@check(
    "drift",
    symptom="the loss in FP8 stays above that in BF16",
    remedy="Take a finer recipe (block), keep the layer named in BF16, or its block: octavo localize finds which.",
    needs=fp8_layers,
)
def drift(trial: Trial) -> Finding:
    """Compare loss and gradients of one batch. The limits of the loss are those of the dashboard."""
    fp8, high = (float(loss) for loss in trial.losses())
    cosines = _cosines(trial)
    return judge(fp8, high, cosines)


def judge(fp8: float, high: float, cosines: Mapping[str, float]) -> Finding:
    """Return the finding for two losses, and the cosine between the gradients of each layer."""
    worst = min(cosines, key=lambda name: (not math.isnan(cosines[name]), cosines[name]), default="none")
    cosine = cosines.get(worst, 1.0)
    gap = 100 * (fp8 - high) / abs(high) if high else 0.0
    seen = f"loss {fp8:.4f} in FP8, {high:.4f} without ({gap:+.2f} %); cosine of gradients from {cosine:.3f} ({worst})"
    verdict = Verdict.OK if abs(gap) <= GAP_LIMIT and cosine >= COSINE else Verdict.WARNING
    verdict = verdict if abs(gap) <= 5 * GAP_LIMIT else Verdict.FAILURE  # so is NaN, which is below nothing
    numbers = {"loss_fp8": fp8, "loss_high": high, "gap_percent": gap, "layer": worst, "cosine": cosine}
    return Finding(verdict, seen, numbers, [{"layer": name, "cosine": value} for name, value in cosines.items()])


def _cosines(trial: Trial) -> dict[str, float]:
    """Return the cosine between the gradients of each FP8 layer's weight in both precisions."""
    wanted = {f"{name}.weight" for name in trial.layers}
    with untouched_generators():
        torch.manual_seed(0)
        fp8 = trial.gradients(wanted)
        torch.manual_seed(0)
        with disabled(trial.model):
            high = trial.gradients(wanted)
    both = {name.removesuffix(".weight"): (fp8[name], high[name]) for name in fp8 if name in high}
    return {name: cosine_of(inner_products(*gradients)) for name, gradients in both.items()}


@check(
    "fast sums",
    symptom="a checkpoint is worse on other hardware or in BF16 than it was in training",
    remedy="Train on with the recipe whose sums are slow, such as 'folded'; octavo bench portability RUN tells more.",
)
def fast_sums(trial: Trial) -> Finding:
    """Where a recipe asks for fast accumulation, compute the loss with slow accumulation too."""
    fast = [name for name, layer in trial.layers.items() if _is_fast(layer.recipe)]
    if not fast:
        return skipped("every recipe in use accumulates slowly")
    if trial.device.type != "cuda":
        return skipped(f"{len(fast)} layers accumulate fast, which only a GPU does")
    as_is, _ = trial.losses()
    with kernels.gemm_by("slow"):
        slow, _ = trial.losses()
    return judge_sums(float(as_is), float(slow), len(fast))


def judge_sums(fast: float, slow: float, layers: int) -> Finding:
    """Return the finding for the losses with fast and with slow sums."""
    gap = 100 * (fast - slow) / abs(slow) if slow else 0.0
    found = ok if abs(gap) <= GAP_LIMIT else warning if abs(gap) <= 5 * GAP_LIMIT else failure
    seen = f"loss {fast:.4f} as it is, {slow:.4f} with slow sums ({gap:+.2f} %); {layers} layers sum fast"
    return found(seen, loss=fast, loss_slow=slow, gap_percent=gap, layers=layers)


def _is_fast(recipe: object) -> bool:
    return any(getattr(recipe, gemm).accumulate == "fast" for gemm in GEMMS)
