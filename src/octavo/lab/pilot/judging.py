"""The recommendation: rules on the results of a pilot, each with its reason and what would change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import starmap
from math import isfinite
from statistics import fmean, stdev
from typing import NamedTuple

from octavo._util.terminal import quantity
from octavo.conversion import Plan
from octavo.conversion.plan import commonest_reason
from octavo.kernels.runtime.devices import Rates
from octavo.lab.doctor.accuracy import COSINE
from octavo.lab.guard.alarms import percent_above
from octavo.lab.monitor.gap import GAP_LIMIT
from octavo.lab.pilot.measuring import Measurement
from octavo.lab.pilot.predicting import products_ms

WORTH = 1.05
"""Least speed-up for which FP8 is worth a change of a program."""
ALIKE = 1.02
"""Recipes within this ratio are equally fast: the loss decides between them."""
IDLE = 0.1
"""Share of a step with the GPU idle or waiting for data, above which that comes first."""
ROOM = 0.9
"""Share of the GPU's memory that a batch may fill."""


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """Results of a pilot."""

    workload: str
    unit: str
    tokens: int
    """Per batch."""
    samples: int
    """Sequences or images per batch."""
    data: str
    device: str
    predicted_for: str
    """The GPU that times and memory are predicted for; empty if they were measured."""
    capacity_gib: float
    parameters: int
    rows: int
    """M of the linear layers."""
    elsewhere: float | None
    """Share of a step's FLOPs outside linear layers."""
    compiled: bool
    rates: Rates | None
    """Rates of the GPU; None if unknown."""
    measured: dict[str, Measurement]
    """Measurement by precision, BF16 first."""
    plans: dict[str, Plan] = field(repr=False)
    """Plan by recipe."""

    @property
    def base(self) -> Measurement:
        """BF16."""
        return self.measured["bf16"]

    def speedup(self, precision: str) -> float:
        """Return BF16's step time over that of another precision; 0 if one is unknown."""
        one, other = self.base.step_ms, self.measured[precision].step_ms
        return one / other if one and other else 0.0

    def speedups(self, precision: str) -> dict[str, float]:
        """Return BF16's time over that of another precision, per phase and kind of kernel that both have."""
        base, own = self.base.times, self.measured[precision].times
        return {kind: ms / own[kind] for kind, ms in base.items() if ms and own.get(kind)}

    def gap(self, precision: str) -> tuple[float, float] | None:
        """Return how far the loss is above BF16's, in percent, and its standard error; None without losses.

        The second half of the steps counts.
        """
        found, base = self.measured[precision].losses, self.base.losses
        pairs = list(zip(found, base, strict=True))[len(base) // 2 :] if found and base else []
        gaps = [gap for gap in starmap(percent_above, pairs) if gap is not None]
        error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("inf")
        return (fmean(gaps), error) if gaps else None

    def trains(self, precision: str) -> bool:
        """Return True if the steps ran on fast kernels, with a loss that is not measurably above BF16's."""
        found, gap = self.measured[precision], self.gap(precision)
        return not found.failed and not found.fallbacks and (gap is None or gap[0] - 2 * gap[1] <= GAP_LIMIT)

    @property
    def best(self) -> str | None:
        """Recommended recipe: the fastest that trains like BF16; of equally fast ones, the first with a small gap."""
        fit = [name for name in self.plans if self.plans[name].fp8_layers and self.trains(name)]
        if not fit:
            return None
        least = max(map(self.speedup, fit)) / ALIKE
        close = [name for name in fit if self.speedup(name) >= least]
        return min(close, key=lambda name: max((self.gap(name) or (0.0, 0.0))[0], 0.0) > 0.1 * GAP_LIMIT)

    @property
    def adopts(self) -> bool:
        """True if FP8 is recommended."""
        return self.best is not None and self.speedup(self.best) >= WORTH


class Advice(NamedTuple):
    """One recommendation."""

    about: str
    decision: str
    reason: str
    changes: str
    """What would change it."""


def advise(pilot: Pilot) -> list[Advice]:
    """Return the recommendation of each rule."""
    found: list[Advice | None] = [_adopt(pilot)]
    if (best := pilot.best) is not None:
        found += [rule(pilot, pilot.plans[best], pilot.measured[best]) for rule in RULES]
    return [advice for advice in (*found, _host(pilot), _baseline(pilot)) if advice is not None]


def _adopt(pilot: Pilot) -> Advice:
    if pilot.best is None:
        alike: dict[str, list[str]] = {}
        for name in pilot.plans:
            if fault := _fault(pilot, name):
                alike.setdefault(fault, []).append(name)
        faults = (f"{', '.join(names)}: {fault}" for fault, names in alike.items())
        changes = "more tokens per forward, larger layers, or a recipe that this GPU has kernels for: octavo plan"
        return Advice("adopt", "no", "; ".join(faults), changes)
    how = f"predicted for {pilot.predicted_for.upper()}" if pilot.predicted_for else "measured"
    layers, speedup = pilot.plans[pilot.best].layers, pilot.speedup(pilot.best)
    fp8 = f"{sum(layer.is_fp8 for layer in layers)} of {len(layers)} layers in FP8{_said_gap(pilot, pilot.best)}"
    if not speedup:
        return Advice("adopt", "not known", f"no speed of {pilot.best} against BF16; {fp8}", "octavo pilot on that GPU")
    reason = f"{speedup:.2f} times BF16's speed ({how}) with {pilot.best}, {fp8}"
    if pilot.adopts:
        return Advice("adopt", "yes", reason, f"a speed-up below {WORTH}, or a loss {GAP_LIMIT:g} % above BF16's")
    return Advice("adopt", "not yet", reason, "more tokens per forward, wider layers, fewer launches: batch, host")


def _fault(pilot: Pilot, name: str) -> str:
    found, gap = pilot.measured[name], pilot.gap(name)
    if found.failed or found.fallbacks:
        return found.failed or found.fallbacks[0]
    if not pilot.plans[name].fp8_layers:
        return f"nothing converts: {commonest_reason(pilot.plans[name].layers)}"
    return f"its loss is {gap[0]:.2f} % above BF16's" if gap and not pilot.trains(name) else ""


def shown_gap(gap: tuple[float, float]) -> str:
    """Return a gap with its error in words; that of a single step is not known."""
    return f"{gap[0]:+z.2f} ± {gap[1]:.2f} %" if isfinite(gap[1]) else f"{gap[0]:+z.2f} % in one step"


def _said_gap(pilot: Pilot, name: str) -> str:
    gap = pilot.gap(name)
    return "" if gap is None else f"; loss {shown_gap(gap)} against BF16's on the same batches"


def _recipe(pilot: Pilot, plan: Plan, found: Measurement) -> Advice:
    names = sorted(pilot.plans, key=lambda name: name != pilot.best)
    speeds = {name: f"{speedup:.2f}" if (speedup := pilot.speedup(name)) else "not known" for name in names}
    said = [f"{name}: {_fault(pilot, name) or speeds[name]}" for name in names]
    changes = "trained weights: octavo localize maps layers and GEMMs; an engine that serves in FP8: recipe served"
    return Advice("recipe", found.precision, f"speed against BF16. {'; '.join(said)}", changes)


def _routing(pilot: Pilot, plan: Plan, found: Measurement) -> Advice:
    kept = Counter(layer.reason for layer in plan.layers if not layer.is_fp8)
    turned = sorted(name for name, cosine in found.gradient_cosines.items() if cosine < COSINE)
    said = [f"{quantity(count, 'layer')} in BF16: {reason}" for reason, count in kept.items()]
    said += [f"{len(turned)} with a gradient cosine below {COSINE}, as {turned[0]}"] if turned else []
    if found.layer_errors:
        worst = max(found.layer_errors, key=lambda name: found.layer_errors[name])
        said.append(f"largest error of an output {found.layer_errors[worst]:.1%}, {worst}")
    decision = f"keep {', '.join(turned[:4])}{' ...' if len(turned) > 4 else ''} in BF16" if turned else "as planned"
    return Advice("routing", decision, "; ".join(said) or "every layer gains", "trained weights: octavo localize RUN")


def _policy(pilot: Pilot, plan: Plan, found: Measurement) -> Advice:
    peak = found.peak_gib or 0.0
    if peak > ROOM * pilot.capacity_gib:
        reason = f"{peak:.1f} GiB of {pilot.capacity_gib:.0f} at this batch"
        return Advice("policy", "Policy(weights='fp8'), octavo.optim.AdamW", reason, "a smaller batch, or more GPUs")
    reason = "it leaves layers that would lose in BF16, and the memory suffices"
    return Advice("policy", "the default", reason, "a larger model: Policy(weights='fp8')")


def _batch(pilot: Pilot, plan: Plan, found: Measurement) -> Advice:
    gains, reason = dict.fromkeys((1, 2, 4), 1.0), "no rates of this GPU are known"
    if (rates := pilot.rates) is not None:
        for times in (1, 2, 4):
            rows = times * pilot.rows
            gains[times] = products_ms(plan, rows, rates, in_bf16=True) / products_ms(plan, rows, rates)
        said = ", ".join(f"{gain:.2f} at {times}x" for times, gain in gains.items())
        reason = f"predicted gain of the linear layers by tokens per step: {said}"
    if found.peak_gib is None:
        return Advice("batch", f"{pilot.samples}", f"{reason}; memory not known", "a measurement on the GPU")
    resident = found.resident_gib if found.resident_gib is not None else 16 * pilot.parameters / 2**30
    each = max(found.peak_gib - resident, 1e-3) / pilot.samples
    largest = max(1, int((ROOM * pilot.capacity_gib - resident) / each))
    reason += f"; {each:.2f} GiB per sequence or image, and {resident:.1f} GiB whatever the batch"
    grows = gains[4] > ALIKE * gains[1] or largest < pilot.samples
    decision = f"{largest}, the largest that fits" if grows else f"{pilot.samples}, up to {largest}"
    return Advice("batch", decision, reason, "octavo.recompute or octavo.offload, which free activations")


def _decoding(pilot: Pilot, plan: Plan, found: Measurement) -> Advice | None:
    base, own = pilot.base.decode_ms, found.decode_ms
    if not base or not own:
        return None
    reason = f"a token takes {own:.2f} ms in FP8, {base:.2f} ms in BF16: its GEMMs read weights and little else"
    if (all_base := pilot.base.decode_batch_ms) and (all_own := found.decode_batch_ms):
        reason += f"; of {pilot.samples} sequences at a time {all_own:.2f} and {all_base:.2f} ms"
    decision = "in FP8" if own < base / WORTH else "by an engine, not by the trainer"
    return Advice("decoding", decision, reason, "kernels for decoding, and batches of requests: octavo export")


def _transfers(pilot: Pilot, plan: Plan, found: Measurement) -> Advice | None:
    """Compare the time of GEMMs, which FP8 halves, with that of kernels bound by memory or by a link."""
    if not found.parts:
        return None
    moves = {name: found.times.get(name, 0.0) for name in ("data", "elementwise", "optimizer", "communication")}
    computes = found.parts["gemm"] + found.parts["attention"]
    first = max(moves, key=lambda name: moves[name])
    said = ", ".join(f"{name} {ms:.2f}" for name, ms in moves.items() if ms)
    reason = f"ms per step: GEMMs and attention {computes:.2f}; bound by memory or a link: {said}"
    decision = f"the bottleneck, {first} first" if sum(moves.values()) > computes else "not the bottleneck: GEMMs are"
    return Advice("transfers", decision, reason, "more tokens per forward, fused kernels (--compile), larger layers")


def _energy(pilot: Pilot, plan: Plan, found: Measurement) -> Advice | None:
    base, own = pilot.base.joules_per_token, found.joules_per_token
    if not base or not own:
        return None
    reason = f"{1e3 * own:.3g} mJ per {pilot.unit}, {1e3 * base:.3g} in BF16"
    return Advice("energy", f"{own / base:.0%} of BF16's", reason, "the power cap of the GPU")


def _host(pilot: Pilot) -> Advice | None:
    found = pilot.measured[pilot.best or "bf16"]
    if not found.step_ms or "idle" not in found.phases:
        return None
    idle, data = (found.phases.get(phase, 0.0) / found.step_ms for phase in ("idle", "data"))
    if pilot.predicted_for:
        if idle > IDLE:
            reason = (
                f"launching an eager step takes longer than its kernels: the GPU would be idle for {idle:.0%} of it"
            )
            return Advice("host", "fewer launches: torch.compile, a CUDA graph", reason, "a larger batch or model")
        return Advice("host", "not known here", "data loading cannot be predicted", "octavo pilot on that GPU")
    if data > IDLE:
        return Advice("host", "load data ahead", f"{data:.0%} of a step waits for it", "workers and pinned memory")
    if idle > IDLE:
        how = "a CUDA graph" if pilot.compiled else "torch.compile (--compile)"
        return Advice("host", f"fewer launches: {how}", f"the GPU is idle for {idle:.0%} of a step", "a larger batch")
    return Advice("host", "nothing to do", f"the GPU is idle for {idle:.0%} of a step", "a smaller model or batch")


def _baseline(pilot: Pilot) -> Advice | None:
    names = [name for name in ("fp16", "fp32") if name in pilot.measured and pilot.speedup(name)]
    if not names:
        return None
    said = "; ".join(f"{name} {pilot.speedup(name):.2f}{_said_gap(pilot, name)}" for name in names)
    return Advice("baseline", "BF16", f"speed against it: {said}", "a GPU without BF16")


RULES: tuple[Callable[[Pilot, Plan, Measurement], Advice | None], ...] = (
    _recipe, _routing, _policy, _batch, _transfers, _decoding, _energy,
)  # fmt: skip
"""Rules for the recipe to take, in order. To add one, write it here: it returns None where it does not apply."""
