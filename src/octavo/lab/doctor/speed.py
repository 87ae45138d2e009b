"""Checks of a model's speed: layers in FP8, silent fallbacks, shapes, launch-bound steps, host syncs."""

from __future__ import annotations

import math
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo import kernels
from octavo._util.terminal import and_more, quantity
from octavo.conversion.gain import predicted_gain
from octavo.kernels.runtime.devices import H200, Rates
from octavo.kernels.runtime.dispatch import rates
from octavo.lab.doctor.check import Finding, check, failure, ok, skipped, warning
from octavo.lab.doctor.subjects import Trial, a_gpu, fp8_layers
from octavo.lab.train.timing import busy, kernels_of, synchronize
from octavo.nn import Conv1d, Conv2d
from octavo.nn.first_call import CallNotes, note_calls
from octavo.nn.linear import LinearLayer, is_transposed
from octavo.nn.modules import hooked


@check(
    "layers",
    symptom="FP8 takes the same time and memory as BF16",
    remedy="octavo plan gives the reason for each layer in BF16; --min-gain 0 also converts layers without gain.",
)
def layers(trial: Trial) -> Finding:
    """Count the layers with GEMMs, and those in FP8 by recipe."""
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d
    total = sum(isinstance(module, kinds) or is_transposed(module) for module in trial.model.modules())
    recipes = Counter(layer.recipe.name for layer in trial.layers.values())
    weights = {str(layer.weight.dtype)[6:] for layer in trial.layers.values()}
    seen = f"{recipes.total()} of {total} layers are in FP8"
    if not recipes:
        return warning(seen, layers=total)
    listed = ", ".join(f"{count} by {name}" if len(recipes) > 1 else name for name, count in recipes.items())
    parameters = sum(p.numel() for p in trial.model.parameters())
    seen = f"{seen} ({listed}), weights of {' and '.join(sorted(weights))}, {parameters / 1e6:,.2f} M parameters"
    return ok(seen, layers=total, fp8=recipes.total(), parameters=parameters, recipes=dict(recipes))


@check(
    "fallback",
    symptom="FP8 is no faster than BF16, or much slower",
    remedy="Choose a recipe that this GPU has kernels for (octavo doctor --only kernels), or keep the layer in BF16.",
    needs=fp8_layers,
)
def fallback(trial: Trial) -> Finding:
    """Count the GEMMs in eight bits of one step by kernel, and collect the reasons of fallbacks."""
    with kernels.record() as ledger:
        trial.step()
    ran = dict(ledger.gemms)
    rows = [{"kernel": kernel, "products": count} for kernel, count in ran.items()]
    if ledger.fallbacks:
        seen = f"{ledger.fallbacks[0]}{and_more(ledger.fallbacks)}"
        return failure(seen, rows=rows, fallbacks=list(ledger.fallbacks), products=ran)
    if not ran:
        remedy = "Call octavo.convert, outside octavo.disabled. Layers whose class was changed since are not FP8."
        return failure(f"{quantity(len(trial.layers), 'layer')} converted, but no GEMM ran in FP8", remedy=remedy)
    if uncalled := _uncalled(trial):
        seen = f"{quantity(len(uncalled), 'layer')} in FP8 by the plan not called in a step: {uncalled[0]}"
        remedy = (
            "The module around it reads its weight and multiplies by it itself: keep it in BF16, or call the layer."
        )
        return warning(seen + and_more(uncalled), remedy=remedy, uncalled=uncalled)
    return ok(
        f"GEMMs per step: {', '.join(f'{count} {kernel}' for kernel, count in ran.items())}", rows=rows, products=ran
    )


def _uncalled(trial: Trial) -> list[str]:
    """Return the names of layers in FP8 that the loss does not call."""
    notes = CallNotes(trial.layers.values())
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        trial.loss()
    uncalled = {id(layer) for layer in notes.uncalled}
    note_calls(notes.uncalled)
    return [name for name, layer in trial.layers.items() if id(layer) in uncalled and layer.enabled]


Layer = LinearLayer | Conv1d | Conv2d


def _known_rates(trial: Trial) -> str:
    """Requirement of a check: rates of the GPU, if there is one."""
    is_known = trial.device.type != "cuda" or rates(trial.device) is not None
    return "" if is_known else "Octavo has no rates of this GPU to predict a gain with; `octavo bench step` measures it"


@check(
    "shapes",
    symptom="a small model, or a small batch, is slower in FP8",
    remedy="Convert on the GPU or with device='cuda', and leave min_gain at 1: they stay in BF16. Or use more tokens.",
    needs=lambda trial: fp8_layers(trial) or _known_rates(trial),
    read=lambda trial: (_shape_rows(trial), trial.device.type == "cuda"),
)
def shapes(read: tuple[list[dict[str, Any]], bool]) -> Finding:
    """Judge the predicted gain of every FP8 layer for its tokens per step: on this GPU, without one on an H200.

    Readings are rows of `layer`, `shape`, `tokens`, `gain` and `pads`, and whether there is a GPU.
    """
    rows, on_gpu = read
    lost, padded = [r for r in rows if r["gain"] < 1], [r for r in rows if r["pads"]]
    least = min(rows, key=lambda row: row["gain"])
    lowest = f"lowest predicted gain {least['gain']:.2f}, {least['layer']}"
    seen = f"{len(lost)} of {len(rows)} layers slower than BF16; {lowest}"
    if not on_gpu:
        return skipped(f"FP8 never pays on a CPU; on an H200, {seen}" if lost else "FP8 never pays on a CPU")
    if lost:
        return warning(seen, rows=rows, lost=len(lost), gain=least["gain"])
    if padded:
        remedy = f"Make features and tokens multiples of {padded[0]['pads']}."
        return warning(f"{len(padded)} of {len(rows)} layers are padded in every GEMM", remedy=remedy, rows=rows)
    return ok(f"{quantity(len(rows), 'layer')}; {lowest}", gain=least["gain"])


def _shape_rows(trial: Trial) -> list[dict[str, Any]]:
    """Return one row per layer that ran."""
    tokens: dict[str, int] = {}

    def count(name: str, layer: Layer, inputs: object, y: Tensor) -> None:
        tokens[name] = y.numel() // _matrix(layer).shape[0]

    hooks = (layer.register_forward_hook(partial(count, name)) for name, layer in trial.layers.items())
    with hooked(hooks), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        trial.loss()
    known = rates(trial.device) or H200
    return [_shape_row(name, trial.layers[name], seen, known) for name, seen in tokens.items()]


def _matrix(layer: Layer) -> Tensor:
    """Return the weight with output features first."""
    return layer.matrix if isinstance(layer, LinearLayer) else layer.weight


def _shape_row(name: str, layer: Layer, tokens: int, known: Rates) -> dict[str, Any]:
    out, features = _matrix(layer).shape[0], math.prod(_matrix(layer).shape[1:])
    taps = 0 if isinstance(layer, LinearLayer) else math.prod(layer.kernel_size)
    gain = predicted_gain(layer.recipe, out, features, tokens, taps, rates=known)
    operands = (operand for _, a, b in layer.recipe.gemms() for operand in (a, b))
    multiple = 16 if all(operand.granularity in ("tensor", "row", "column") for operand in operands) else 128
    pads = multiple if any(size % multiple for size in (out, features, tokens)) else 0
    return {"layer": name, "shape": f"{out} x {features}", "tokens": tokens, "gain": round(gain, 3), "pads": pads}


STEPS = 5
WARM_UP = 3
BUSY = 0.9
"""Share of a step with the device busy; below it the device waits."""
HOST = 0.9
"""Share of a step that the host spends launching, above which the step is launch-bound."""
SHARED = 3e-4
"""Seconds of a kernel of a few microseconds, above which other processes have taken the GPU meanwhile."""
TRACE = "step.json"


class Timing(NamedTuple):
    """Mean seconds per step."""

    host: float
    """Until the host has launched everything."""
    step: float
    """Until the device is done as well."""
    busy: float
    """With at least one kernel running."""
    smallest: float = 0.0
    """Of the smallest kernel, from its launch to its end: long where other processes take turns on the GPU."""


def measure(step: Callable[[], Any], trace: Path | None = None) -> Timing:
    """Time steps that each start on an idle device, so that the host cannot run ahead."""
    for _ in range(WARM_UP):
        step()
    host = whole = 0.0
    for _ in range(STEPS):
        synchronize("cuda")
        start = perf_counter()
        step()
        host += perf_counter() - start
        synchronize("cuda")
        whole += perf_counter() - start
    ran = kernels_of(step, STEPS, None if trace is None else trace / TRACE)
    return Timing(host / STEPS, whole / STEPS, busy(ran) / 1e6 / STEPS, _smallest())


def _smallest() -> float:
    """Return the median seconds of a kernel that fills one element, with the wait for its end."""
    one, seconds = torch.empty((), device="cuda"), []
    for _ in range(WARM_UP + 21):
        synchronize("cuda")
        start = perf_counter()
        one.fill_(1.0)
        synchronize("cuda")
        seconds.append(perf_counter() - start)
    return median(seconds[WARM_UP:])


@check(
    "launches",
    symptom="the GPU is underused; a larger batch takes no more time",
    remedy="Compile (--compile on), use more tokens per step, or capture the step in a CUDA graph.",
    needs=a_gpu,
    read=lambda trial: measure(trial.step, trial.trace),
)
def launches(timing: Timing) -> Finding:
    """Judge the time of a few steps on host and device; with `--trace DIR`, a Chrome trace is written."""
    busy, host = timing.busy / timing.step, timing.host / timing.step
    numbers: dict[str, Any] = {"host_ms": 1e3 * timing.host, "step_ms": 1e3 * timing.step, "busy_ms": 1e3 * timing.busy}
    seen = f"a step takes {numbers['step_ms']:.2f} ms, with the device busy for {numbers['busy_ms']:.2f} ms"
    if timing.smallest > SHARED:
        remedy = "Stop the other processes on this GPU, and look again: nvidia-smi lists them."
        shared = f"{seen}, but other processes use this GPU: its smallest kernel takes {1e3 * timing.smallest:.2f} ms"
        return warning(shared, remedy=remedy, **numbers)
    if busy >= BUSY:
        return ok(seen, **numbers)
    if host >= HOST:
        return warning(f"launch-bound: {seen}, the host launching for {numbers['host_ms']:.2f} ms", **numbers)
    remedy = "The device waits for something other than launches: see a trace (--trace DIR)."
    return warning(f"{seen}, but not waiting for the host", remedy=remedy, **numbers)


_WARNING = "called a synchronizing"
_TORCH, _PYTHON = (str(Path(module.__file__ or "").parent) for module in (torch, traceback))


class CodeLine(NamedTuple):
    """A line of code."""

    file: str
    """Full path."""
    line: int
    code: str


def _syncs_of_a_step(trial: Trial) -> Counter[CodeLine]:
    """Run a step in PyTorch's sync debug mode, which does not report torch.cuda.synchronize()."""
    trial.step()  # one-time setup in the first step may wait
    with recorded_syncs() as places:
        trial.step()
    return places


@check(
    "host syncs",
    symptom="the GPU is idle between steps, or within one",
    remedy="Keep values on the device, and read them (.item(), .cpu(), print, if) only when a step is logged.",
    needs=a_gpu,
    read=_syncs_of_a_step,
)
def syncs(places: Counter[CodeLine]) -> Finding:
    """Judge the lines that waited in one step, with counts."""
    if not places:
        return ok("no host sync in a step", waits=0)
    rows = [{"place": f"{p.file}:{p.line}", "code": p.code, "waits": count} for p, count in places.most_common()]
    place, _ = places.most_common(1)[0]
    where = f"{'/'.join(Path(place.file).parts[-2:])}:{place.line}: {place.code}"
    seen = f"{places.total()} host syncs per step, most in {where}"
    return warning(seen, rows=rows, waits=places.total())


@contextmanager
def recorded_syncs() -> Iterator[Counter[CodeLine]]:
    """Collect the lines within the block that make the host wait for a CUDA device."""
    places: Counter[CodeLine] = Counter()
    before = torch.cuda.get_sync_debug_mode()

    def record(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if _WARNING in str(message):
            places[_caller()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _caller() -> CodeLine:
    """Return the innermost line that is neither in PyTorch, nor in Python, nor in this file."""
    stack = traceback.extract_stack()
    others = [each for each in stack if each.filename != __file__ and not each.filename.startswith(_TORCH)]
    users = [each for each in others if not each.filename.startswith(_PYTHON) or "site-packages" in each.filename]
    frame = (users or stack)[-1]
    return CodeLine(frame.filename, frame.lineno or 0, frame.line or "")
