"""Time a training step of a workload in BF16, in torchao, in Transformer Engine and by every recipe.

All implementations run one after another in one process, on the same weights and the same random normal data. Times are
medians of several steps after a warm-up. Profiled steps give the parts of the time, measured rates of the machine the
floor, and BF16 timed again at the end the drift of the machine.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo import kernels
from octavo.errors import NonFiniteError, RunError, UnsupportedError
from octavo.lab.models.flops import datasheet_tflops
from octavo.lab.monitor.power import PowerMeter
from octavo.lab.monitor.system import SystemProbe
from octavo.lab.train.profile import Profile, profile
from octavo.lab.train.timing import milliseconds, warm_up
from octavo_bench import rates
from octavo_bench.implementations import BF16, TORCHAO, Implementation, implementations
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, device_named, known, positive
from octavo_bench.rates import floor_ms
from octavo_bench.render import figures, grouped
from octavo_bench.results import Row, slug
from octavo_bench.timing import attempt, peak_gib
from octavo_bench.workloads import (
    ENCODER_WORKLOADS,
    IMAGE_WORKLOADS,
    WORKLOADS,
    EncoderWorkload,
    ImageWorkload,
    Training,
    Workload,
    build,
)

PROFILED_MS = 200
"""Minimum profiled milliseconds. CUPTI may give the first kernels of a session times of another clock, and PyTorch
drops those (pytorch/pytorch#192021): in a short session, all."""
TRACED = 25
"""Kernels per implementation in a trace."""
COLUMNS = (
    ("implementation", "{implementation}"),
    ("ms", "{ms:.1f}"),
    ("times BF16's speed", "{ratio_to_bf16:.2f}"),
    (f"times {TORCHAO}", "{ratio_to_peer:.2f}"),
    ("GEMM ms", "{gemm_ms:.1f}"),
    ("attention ms", "{attention_ms:.1f}"),
    ("element-wise ms", "{elementwise_ms:.1f}"),
    ("optimizer ms", "{optimizer_ms:.1f}"),
    ("communication ms", "{communication_ms:.1f}"),
    ("idle ms", "{idle_ms:.1f}"),
    ("peak GiB", "{peak_gib:.1f}"),
    ("mJ per token", "{mj_per_token:.2f}"),
    ("watts", "{watts:.0f}"),
    ("MHz", "{mhz:,.0f}"),
    ("of BF16's datasheet peak", "{mfu_bf16:.2f}"),
    ("fraction of floor", "{fraction_of_floor:.2f}"),
)


def by_workload(rows: Sequence[Row]) -> str:
    """Return, per workload, the time of every implementation and of its parts, and its peak memory."""
    return "\n\n".join(_table(own) + _session(own[0]) for own in grouped(rows, "workload").values())


def _table(rows: Sequence[Row]) -> str:
    peer = next((row["ms"] for row in rows if row["implementation"] == TORCHAO and "ms" in row), None)
    if peer is not None:
        rows = [row | {"ratio_to_peer": peer / row["ms"]} if "ms" in row else row for row in rows]
    peers = dict.fromkeys(row["package"] for row in rows if "package" in row)
    beside = f"; beside {' and '.join(peers)}" if peers else ""
    return f"**{rows[0]['workload']}**{_shape(rows[0])}{beside}\n\n{figures(COLUMNS, rows)}"


def _shape(row: Row) -> str:
    if "shape" not in row:
        return ""
    shape = row["shape"]
    if "size" in shape:
        return f": {shape['batch']} images of {shape['size']} x {shape['size']} pixels, bottlenecks {shape['depths']}"
    if "kv_heads" not in shape:
        sizes = f"dim {shape['dim']:,}, ffn {shape['ffn']:,}, {shape['heads']} heads"
        mode = "" if shape["compiled"] else ", all in eager mode"
        batch = f"{shape['batch']} x {shape['sequence']:,} tokens"
        return f": {shape['layers']} layers of nn.TransformerEncoderLayer, {sizes}, {batch}{mode}"
    kind = f", vocabulary {shape['vocab']:,}" if shape.get("vocab") else ", no head"
    tokens = f"{shape['batch']} x {shape['sequence']:,} tokens"
    tokens += f" of packed documents of {shape['document']:,} on average" if shape.get("document") else ""
    sizes = f"dim {shape['dim']:,}, ffn {shape['ffn']:,}, {shape['heads']} heads, {shape['kv_heads']} KV heads"
    return f": {shape['layers']} layers, {sizes}{kind}, {tokens}"


def _session(baseline: Row) -> str:
    """Return the notes of a session from its baseline: rates and drift of the machine."""
    said = []
    if "rates" in baseline:
        rates = baseline["rates"]
        tflops = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates["tflops"].items())
        said.append(
            f"The machine's own rates in this session: copy {rates['copy_gb_per_s']:,.0f} GB/s; GEMM TFLOP/s: {tflops}."
        )
    if "drift" in baseline:
        said.append(f"BF16, timed again at the end: {100 * baseline['drift']:+z.1f} % of its time.")
    return "\n\n" + " ".join(said) if said else ""


KIND = Kind(
    name="step",
    keys={"workload": str, "implementation": str, "ms": float, "ratio_to_bf16": float, "peak_gib": float},
    columns=(
        ("workload", "{workload}"),
        *COLUMNS,
        ("energy not known", "{energy_missing}"),
        ("when timed again at the end", "{drift:+z.1%}"),
    ),
    names=2,
    session=("hardware", "workload"),  # a machine's results do not replace another's
    show=by_workload,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Settings shared by all implementations of a run."""

    workload: Workload | EncoderWorkload | ImageWorkload
    device: str = "cuda"
    """On a CPU nothing is compiled."""
    steps: int = 20
    """Timed steps; the median is reported."""
    warm_up_s: float = 1.0
    """Seconds of warm-up steps, at least three steps."""
    trace: Path | None = None
    """Directory for the longest kernels of each implementation, one JSON file each; on a GPU only."""


def bench_step(session: Session, names: tuple[str, ...] = ()) -> Iterator[Row]:
    """Yield one row per implementation; the baseline first.

    Rows of implementations that fail have `error` and no figures. The baseline's row is yielded again at the end, with
    its drift.

    Args:
        names: implementations to run, BF16 always first; all if empty.

    Raises:
        ConfigError: an unknown name.
        RunError: the baseline failed, so that nothing can be compared.
    """
    workload, limits = session.workload, None
    if isinstance(workload, Workload):
        found = implementations(head=workload.vocab > 0)
        limits = rates.measure(workload, session.device) if session.device == "cuda" else None
    else:
        found = workload.implementations()
    chosen = [known("--only", name, list(found), "implementation") for name in names] or found
    baseline = _row(session, found[BF16])
    if "error" in baseline:
        raise RunError(f"the baseline {BF16} failed, so that nothing can be compared: {baseline['error']}")
    others = [name for name in dict.fromkeys(chosen) if name != BF16]
    for name in (BF16, *others):
        row = baseline if name == BF16 else _row(session, found[name])
        if "error" not in row:
            _compare(session, row, baseline, found[name], limits)
        yield row
    if others:
        again = _row(session, found[BF16])
        baseline |= {"drift": round(again["ms"] / baseline["ms"] - 1, 4)} if "ms" in again else {}
        yield baseline


def _row(session: Session, implementation: Implementation) -> Row:
    """Return the row of an implementation."""
    row: Row = {"workload": session.workload.name, "implementation": implementation.name}
    if implementation.package is not None:
        row["package"] = f"{implementation.package} {importlib.metadata.version(implementation.package)}"
    return attempt(row, partial(_measure, session, implementation), session.device)


def _measure(session: Session, implementation: Implementation) -> Row:
    workload, device = session.workload, session.device
    training = build(workload, implementation, device, compile=device == "cuda")
    with _attention(device):
        first_norm = _gradient_norm(training)
        warm_up(training.step, device, seconds=session.warm_up_s)
        with kernels.record() as ledger:
            training.step()
        times, peak, energy = _time(training, session)
        ms = statistics.median(times)
        profiled = profile(training.step, _profiled_steps(ms)) if device == "cuda" else None
        last_norm = _gradient_norm(training)
    if not math.isfinite(first_norm + last_norm):  # NaN draws less power than numbers: its time would be too short
        raise NonFiniteError(f"{implementation.name}: its gradients are not finite, so its time is meaningless.")
    if profiled is not None and not isinstance(workload, ImageWorkload):
        _check_attention(implementation, profiled)
    if profiled is not None and session.trace is not None:
        _write_trace(session.trace, workload.name, implementation.name, profiled)
    if implementation.name.startswith("octavo") and not ledger.gemms:
        raise UnsupportedError(f"{implementation.name}: no GEMM ran in FP8, so its time would be BF16's.")
    return {
        "ms": round(ms, 3),
        "peak_gib": round(peak, 2),
        "tokens_per_s": round(workload.tokens / ms * 1e3),
        "spread_ms": round(max(times) - min(times), 3),
        **energy,
        **({} if profiled is None else profiled.spent(ms)),
        "fp8_gemms": dict(ledger.gemms),
        "weights_quantised": ledger.weights,
        "fallbacks": ledger.fallbacks,
        "gradient_norm": float(f"{first_norm:.4g}"),
        "shape": asdict(workload),
    }


def _profiled_steps(ms: float) -> int:
    """Return the number of steps of `ms` milliseconds to profile: the profiler may lose the first of a session."""
    return max(3, math.ceil(PROFILED_MS / ms))


def _check_attention(implementation: Implementation, profiled: Profile) -> None:
    """Raise if no fused attention ran: without a suitable cuDNN, Transformer Engine falls back silently."""
    name = implementation.name
    if not profiled.kernels:
        raise RunError(f"{name}: the profiler saw no kernel, so whether attention was fused is unknown.")
    if not profiled.parts["attention"]:
        longest = ", ".join(kernel["name"][:60] for kernel in profiled.kernels[:8])
        raise UnsupportedError(
            f"{name}: its attention was not fused, so its time is not what users get. Its longest kernels: {longest}."
        )


def _time(training: Training, session: Session) -> tuple[list[float], float, Row]:
    """Return the milliseconds of each step, the peak of allocated memory in GiB, and the energy as keys of a row."""
    if session.device != "cuda":
        return milliseconds(training.step, session.device, session.steps), 0.0, {}
    torch.cuda.reset_peak_memory_stats()
    with PowerMeter(SystemProbe(torch.cuda.current_device())) as power:
        times = milliseconds(training.step, session.device, session.steps)
    energy = rates.energy_row(power, "mj_per_token", statistics.fmean(times) / session.workload.tokens)
    return times, peak_gib(session.device), energy


def _gradient_norm(training: Training) -> float:
    """Run a step and return its global gradient norm: in the first step all implementations have the same work."""
    training.forward_backward()
    gradients = [parameter.grad for parameter in training.model.parameters() if parameter.grad is not None]
    norm = math.hypot(*(float(torch.linalg.vector_norm(gradient, dtype=torch.float32)) for gradient in gradients))
    training.update()
    return norm


def _compare(
    session: Session, row: Row, baseline: Row, implementation: Implementation, limits: rates.Rates | None
) -> None:
    """Add the figures relative to the baseline, the floor and the datasheet."""
    row["ratio_to_bf16"] = round(baseline["ms"] / row["ms"], 3)
    peak = datasheet_tflops(torch.cuda.get_device_name()) if session.device == "cuda" else None
    if peak is not None:
        row["mfu_bf16"] = round(session.workload.flops / row["ms"] / peak / 1e9, 4)
    if limits is None or not implementation.has_floor:
        return
    if row is baseline:
        row["rates"] = asdict(limits)
    assert isinstance(session.workload, Workload), "only Llama has a floor"
    floor = floor_ms(session.workload, implementation, limits, baseline["attention_ms"])
    row |= {"floor_ms": round(floor, 2), "fraction_of_floor": round(floor / row["ms"], 4)}


def _write_trace(directory: Path, workload: str, implementation: str, profiled: Profile) -> None:
    trace = {"workload": workload, "implementation": implementation, "kernels": profiled.kernels[:TRACED]}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{slug(f'{workload} {implementation}')}.json"
    path.write_text(json.dumps(trace, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _attention(device: str) -> Iterator[None]:
    """Use cuDNN's attention where supported: the fastest on Hopper, and the same for every implementation."""
    if device != "cuda":
        yield
        return
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        yield


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Overrides of the workload's fields."""

    dim: int | None = None
    """In place of the workload's: width of the residual stream."""
    ffn: int | None = None
    """Hidden width of the feed-forward."""
    heads: int | None = None
    """Query heads."""
    kv_heads: int | None = None
    """Key and value heads."""
    layers: int | None = None
    """Blocks."""
    batch: int | None = None
    """Sequences per step, or images."""
    sequence: int | None = None
    """Tokens per sequence."""
    vocab: int | None = None
    """Token ids of a whole model; 0 for a stack of blocks without head and optimizer."""


AS_NAMED = Shape()


def command(
    *,
    workload: Names = ("llama-8b-stack",),
    only: Names = (),
    shape: Shape = AS_NAMED,
    device: str = "auto",
    steps: int = 20,
    trace: Annotated[Path | None, Parameter(negative=())] = None,
    output: Output = TO_STDOUT,
) -> int:
    """Time a training step of Llama blocks, a whole Llama, encoder layers or a ResNet: BF16, recipes, installed peers.

    Peers are torchao and Transformer Engine: its whole layer in eager mode, and its linear modules in compiled blocks.

    Exits with 1 if an implementation failed, after measuring the others.

    Examples:

        octavo bench step
        octavo bench step --workload llama-1b --only "octavo folded" --trace traces
        octavo bench step --dim 5120 --ffn 17408 --heads 40 --layers 4 --batch 1
        octavo bench step --workload vit-l-stack --workload vit-l-stack-eager --only "octavo rotated"
        octavo bench step --workload tiny --device cpu

    Parameters
    ----------
    workload
        llama-8b-stack (8 layers, 16,384 tokens), llama-70b-stack and 175b-stack (2 layers), llama-1b-stack, 175b and
        llama-1b (with head, loss and optimizer), llama-1b-packed (the same on documents of 512 tokens on average that
        do not see each other; not by peers), vit-l-stack and encoder-2048-stack (8 and 4 layers of PyTorch's encoder,
        25,216 and 16,384 tokens; with -eager behind the name nothing is compiled, BF16 neither), resnet50 (256 images,
        channels last), tiny, tiny-model, tiny-packed, tiny-encoder, tiny-encoder-eager or tiny-resnet; repeatable.
    only
        Implementations to run besides BF16; all by default.
    device
        cuda or cpu; auto takes the GPU if there is one.
    steps
        Timed steps, after a warm-up; the median is reported.
    trace
        Directory for the longest kernels of each implementation, as JSON; on a GPU.
    """
    all_known: dict[str, Workload | EncoderWorkload | ImageWorkload]
    all_known = {**WORKLOADS, **ENCODER_WORKLOADS, **IMAGE_WORKLOADS}
    fields = asdict(shape)
    chosen = [all_known[known("--workload", name, list(all_known), "workload")].but(**fields) for name in workload]
    device, steps = device_named(device), positive("--steps", steps)
    sessions = (Session(workload=one, device=device, steps=steps, trace=trace) for one in chosen)
    rows = (row for session in sessions for row in bench_step(session, only))
    flags = {"workload": workload, "only": only, **fields, "steps": steps}
    return output.finish(KIND, rows, device=device, **flags)
