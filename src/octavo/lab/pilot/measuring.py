"""One short training per precision, on the same batches from the same weights: time, energy, memory and losses."""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from octavo import kernels
from octavo._util.rng import untouched_generators
from octavo.conversion import Plan, convert
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.doctor.accuracy import drift
from octavo.lab.doctor.check import run_check
from octavo.lab.doctor.subjects import trial_of
from octavo.lab.monitor.power import PowerMeter
from octavo.lab.monitor.system import SystemProbe
from octavo.lab.train.profile import profile
from octavo.lab.train.subject import NO_VALUES, Subject, first_sample, to_device
from octavo.lab.train.timing import Stopwatch, milliseconds, synchronize, warm_up
from octavo.nn import reuse_weight_codes
from octavo.nn.fp8_weights import values
from octavo.nn.linear import LinearLayer, is_transposed
from octavo.nn.modules import hooked, input_of

PRECISIONS: dict[str, torch.dtype | None] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
"""Autocast dtype of the precisions that are no recipe; a recipe computes the rest in BF16."""
WARM_UP = 3
"""Steps before those that are timed."""
TIMED = 10
"""Number of timed steps, the last ones; fewer in a short run."""
DECODED = 32
"""Tokens decoded, of which the median time counts."""


@dataclass(kw_only=True)
class Measurement:
    """Measurements of one precision. Times are means per step in milliseconds; None: unknown."""

    precision: str
    """bf16, fp16, fp32, or a recipe."""
    phases: dict[str, float] = field(default_factory=dict)
    """Milliseconds per phase; idle and communication are parts of the others."""
    parts: dict[str, float] = field(default_factory=dict)
    """Milliseconds of the GPU per kind of kernel: gemm, attention, elementwise, ...; quantize is a part of the last."""
    step_ms: float | None = None
    """Latency of a step."""
    tokens_per_s: float | None = None
    tflops: float | None = None
    """Achieved TFLOP/s: FLOPs of the model per step time."""
    joules_per_token: float | None = None
    pj_per_flop: float | None = None
    """Picojoules per FLOP of the model."""
    peak_gib: float | None = None
    """Peak memory of tensors on the GPU."""
    resident_gib: float | None = None
    """Memory between steps: weights, moments, gradients."""
    allocations: dict[str, float] = field(default_factory=dict)
    """Calls of PyTorch's allocator and of cudaMalloc per step, and GiB that are reserved beyond the peak of tensors."""
    decode_ms: float | None = None
    """Latency of one decoded token of one sequence."""
    decode_batch_ms: float | None = None
    """Latency of one decoded token of each sequence of the batch."""
    losses: list[float] = field(default_factory=list)
    layer_errors: dict[str, float] = field(default_factory=dict)
    """||Y8 - Y|| / ||Y|| of each FP8 layer's output, on the first batch."""
    gradient_cosines: dict[str, float] = field(default_factory=dict)
    """Cosine of each FP8 weight's gradient with the one in high precision, on the first batch."""
    fallbacks: list[str] = field(default_factory=list)
    failed: str = ""
    """Reason for a failure; empty for none."""

    @property
    def times(self) -> dict[str, float]:
        """The phases, then the kinds of kernels that are no phase."""
        return {**self.phases, **{kind: ms for kind, ms in self.parts.items() if kind not in self.phases}}


class Flops(NamedTuple):
    """FLOPs and launches of a training step."""

    total: float
    elsewhere: float
    """Those outside linear layers."""
    rows: int
    """M of the linear layers."""
    launches: int = 0
    """Operators that compute something, forward and backward, in eager mode."""


class _Launches(TorchDispatchMode):
    """Counts the operators that are no views of their arguments."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += not any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The subject, and settings shared by all precisions."""

    subject: Subject
    device: torch.device
    steps: int = 20
    """Steps whose losses are compared; the last ones are timed."""
    lr: float = 3e-4
    compile: bool = False
    flops: Flops | None = None
    """None: unknown."""

    @property
    def rows(self) -> int:
        """M of the linear layers, for plans."""
        return self.subject.tokens if self.flops is None else self.flops.rows


def measure(precision: str, model: nn.Module, how: Conditions) -> tuple[Measurement, Plan | None]:
    """Train a copy of a model in one precision and return what was measured, and the plan of a recipe.

    A precision that fails, for example for lack of memory, says so in `failed`.

    Args:
        precision: a key of `PRECISIONS`, or a recipe.
        model: with the initial weights, on the CPU.
    """
    found = Measurement(precision=precision)
    plan = None
    try:
        with untouched_generators():
            plan = _measure(copy.deepcopy(model).to(how.device), how, found)
    except (RuntimeError, NotImplementedError, UnsupportedError) as error:  # RuntimeError includes out of memory
        found.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    torch.compiler.reset()
    gc.collect()
    if how.device.type == "cuda":
        torch.cuda.empty_cache()
    return found, plan


def _measure(model: nn.Module, how: Conditions, found: Measurement) -> Plan | None:
    """Train and measure; a function of its own, so that its model and states are freed before the next ones."""
    plan = None
    if found.precision not in PRECISIONS:
        plan = convert(model, found.precision, tokens=how.rows)
        _errors(model, how.subject, found)
    run = _Training(model, how, PRECISIONS.get(found.precision, torch.bfloat16))
    torch.manual_seed(0)  # the same dropout in every precision
    _train(run, how, found)
    if how.device.type == "cuda" and how.subject.decode is not None:
        batch = next(how.subject.batches())
        found.decode_ms, found.decode_batch_ms = (_decode(run, each) for each in (first_sample(batch), batch))
    return plan


class _Training:
    """A model in training by autocast, with AdamW and, in FP16, a loss scale."""

    def __init__(self, model: nn.Module, how: Conditions, dtype: torch.dtype | None) -> None:
        self.model, self.subject, self.device, self.dtype = model, how.subject, how.device, dtype
        self.scaler = torch.amp.GradScaler(how.device.type, enabled=dtype == torch.float16)
        self.optimizer = torch.optim.AdamW(model.parameters(), how.lr, fused=how.device.type == "cuda")
        if how.compile:
            model.compile()
        self.batches = how.subject.batches()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype or torch.bfloat16, enabled=self.dtype is not None)

    def step(self, mark: Callable[[str], None] = lambda phase: None) -> Tensor:
        """Train on the next batch; `mark` is called after each phase."""
        batch = to_device(next(self.batches), self.device)
        mark("data")
        with self.autocast():
            loss = self.subject.loss(self.model, batch)
        mark("forward")
        self.scaler.scale(loss).backward()
        mark("backward")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        mark("optimizer")
        return loss.detach()


def _train(run: _Training, how: Conditions, found: Measurement) -> None:
    is_gpu, flops = how.device.type == "cuda", None if how.flops is None else how.flops.total
    timed = min(TIMED, max(1, how.steps - WARM_UP))
    losses = [run.step() for _ in range(how.steps - timed)]
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        found.resident_gib = torch.cuda.memory_allocated() / 2**30
    synchronize(how.device.type)  # energy counts from here: the host may be several steps ahead
    probe = SystemProbe(torch.cuda.current_device() if is_gpu else None)
    watch = Stopwatch(how.device)
    with kernels.record() as ledger, PowerMeter(probe) as power:
        losses += [run.step(watch.mark) for _ in range(timed)]
        total = watch.milliseconds()
    found.losses = [float(loss) for loss in losses]
    found.fallbacks = list(ledger.fallbacks)
    found.phases = {phase: ms / timed for phase, ms in total.items()}
    found.step_ms = sum(found.phases.values())
    found.tokens_per_s = 1e3 * how.subject.tokens / found.step_ms
    found.tflops = None if flops is None else flops / found.step_ms / 1e9
    if is_gpu:
        found.peak_gib = torch.cuda.max_memory_allocated() / 2**30
        found.allocations = allocations(before, torch.cuda.memory_stats(), timed)
        joules = None if power.watts is None else 1e-3 * power.watts * found.step_ms
        found.joules_per_token = joules / how.subject.tokens if joules else None
        found.pj_per_flop = 1e12 * joules / flops if joules and flops else None
        seen = profile(run.step, 2)
        found.parts = {part: round(ms, 3) for part, ms in (seen.parts | {"quantize": seen.quantize}).items()}
        found.phases |= {"communication": seen.parts["communication"], "idle": max(found.step_ms - seen.busy, 0.0)}


def allocations(before: Mapping[str, Any], after: Mapping[str, Any], steps: int) -> dict[str, float]:
    """Return allocator calls per step and fragmentation, from `torch.cuda.memory_stats` before and after some steps."""
    calls = {"allocations": "allocation.all.allocated", "device_mallocs": "num_device_alloc"}
    found = {name: (after.get(key, 0) - before.get(key, 0)) / steps for name, key in calls.items()}
    beyond = after["reserved_bytes.all.peak"] - after["allocated_bytes.all.peak"]
    return found | {"fragmentation_gib": round(beyond / 2**30, 3)}


def _decode(run: _Training, batch: Any) -> float:
    """Return the median milliseconds of one step of decoding, with the codes of the weights made once."""
    assert run.subject.decode is not None
    run.model.eval()
    with torch.no_grad(), run.autocast(), reuse_weight_codes(run.model):
        step = run.subject.decode(run.model, to_device(batch, run.device))
        warm_up(step, run.device.type, seconds=0.1)
        return statistics.median(milliseconds(step, run.device.type, DECODED))


def _errors(model: nn.Module, subject: Subject, found: Measurement) -> None:
    """Compare each FP8 layer's output, and the gradient of its weight, with high precision, on the first batch."""
    trial = trial_of(model, subject)
    rows = run_check(drift, trial).finding.rows
    found.gradient_cosines = {str(row["layer"]): float(row["cosine"]) for row in rows}

    def compare(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> None:
        x = input_of(args, kwargs)
        weight, bias = values(cast(LinearLayer, layer).matrix, torch.float32), cast(Tensor | None, layer.bias)
        exact = nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
        found.layer_errors[name] = float((y.float() - exact).norm() / exact.norm().clamp(min=1e-30))

    layers = {name: layer for name, layer in trial.layers.items() if isinstance(layer, LinearLayer)}
    hooks = (each.register_forward_hook(partial(compare, name), with_kwargs=True) for name, each in layers.items())
    with hooked(hooks), torch.no_grad():
        trial.loss()


def count_flops(subject: Subject) -> Flops | None:
    """Return the FLOPs and launches of a step; None if the model cannot be traced.

    Counted on a model without values: products of matrices, convolutions and attention, in forward and backward.
    """
    rows: list[int] = []
    inside = 0.0

    def note(layer: nn.Module, inputs: object, y: Tensor) -> None:
        nonlocal inside
        rows.append(y.numel() // y.shape[-1])
        features = layer.get_parameter("weight").numel() // y.shape[-1]
        inside += 2.0 * y.numel() * features * (3 if y.requires_grad else 1)

    try:
        model = subject.build_without_values().to("meta")
        linears = (module for module in model.modules() if isinstance(module, nn.Linear) or is_transposed(module))
        batch = to_device(next(subject.batches()), torch.device("meta"))
        with (
            hooked(layer.register_forward_hook(note) for layer in linears),
            FlopCounterMode(display=False) as counter,
            cast(Any, _Launches)() as launches,  # PyTorch's mode has no types
        ):
            subject.loss(model, batch).backward()
    except ConfigError:  # a ValueError too
        raise
    except NO_VALUES:
        return None
    total = float(counter.get_total_flops())
    rows_of_most = statistics.mode(rows) if rows else subject.tokens
    return Flops(total, max(total - inside, 0.0), rows_of_most, launches.count)
