"""Silent fallback: do the products of a step really run in FP8, and by the fast kernels?"""

from __future__ import annotations

from octavo import kernels
from octavo.doctor.check import Finding, check, failure, ok
from octavo.doctor.subjects import Trial, fp8_layers


@check(
    "fallback",
    symptom="FP8 is no faster than BF16, or much slower",
    remedy="Choose a recipe whose kernels this GPU has (octavo doctor --only kernels), or keep the layer in BF16.",
    needs=fp8_layers,
)
def fallback(trial: Trial) -> Finding:
    """Count the FP8 products of one step by kernel, and collect the reason of every fallback."""
    with kernels.record() as ledger:
        trial.step()
    ran = dict(ledger.gemms)
    rows = [{"kernel": kernel, "products": count} for kernel, count in ran.items()]
    if ledger.fallbacks:
        more = f" (and {len(ledger.fallbacks) - 1} more)" if len(ledger.fallbacks) > 1 else ""
        return failure(f"{ledger.fallbacks[0]}{more}", rows=rows, fallbacks=list(ledger.fallbacks), products=ran)
    if not ran:
        remedy = "Call octavo.convert, and leave octavo.disabled. Layers whose class was changed since are not FP8."
        return failure(f"{len(trial.layers)} layers are converted, and no product ran in FP8", remedy=remedy)
    return ok(
        f"a step's products: {', '.join(f'{count} {kernel}' for kernel, count in ran.items())}", rows=rows, products=ran
    )
