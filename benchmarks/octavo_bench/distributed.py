"""Whole training steps on all ranks: speed, memory, bytes on the wire and losses, by implementation and layout."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from cyclopts import Parameter
from torch import Tensor, nn

from octavo._util.dist import is_first_rank
from octavo.errors import ConfigError
from octavo.lab.models.config import ModelConfig
from octavo.lab.train.device import WARM_UP_STEPS, gc_frozen
from octavo.lab.train.profile import profile
from octavo.lab.train.timing import milliseconds, synchronize
from octavo_bench.implementations import BF16
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, known, positive
from octavo_bench.ranks import any_rank, process_group, under_torchrun
from octavo_bench.render import figures, grouped, has_failed
from octavo_bench.results import Row
from octavo_bench.sharded import Implementation, Layout, Whole, implementations, lay_out, part_of_batch
from octavo_bench.timing import attempt, beside, peak_gib
from octavo_bench.traffic import Traffic

WARM_UP = WARM_UP_STEPS
"""Untimed first steps, which compile; two more before a graph capture."""
PROFILED = 2
"""Steps under the profiler, on a GPU."""


TOLD = (("ms with a wait after each step", "{waited_ms:.1f}"), ("first loss", "{first_loss:.4f}"))


def _derived(row: Row) -> Row:
    losses = {"first_loss": row["losses"][0], "last_loss": row["losses"][-1]} if "losses" in row else {}
    return losses | ({"wire_gb": row["wire_bytes"] / 1e9} if "wire_bytes" in row else {})


def by_workload(rows: Sequence[Row]) -> str:
    """Return one line per layout and implementation: speed, memory, bytes on the wire, loss, beside BF16."""
    return "\n\n".join(_of_workload(own) for own in grouped(rows, "workload", "ranks").values())


def _of_workload(rows: Sequence[Row]) -> str:
    shown = []
    for own in grouped(rows, "layout").values():
        first = None
        for row in own:
            if row["implementation"] == BF16:  # of this run: there may be several
                first = None if has_failed(row) else row
            shown.append(row if has_failed(row) or first is None else _beside(row, first))
    row = rows[0]
    how = "blocks compiled" if row["compiled"] else "eager"
    setting = f"{row['ranks']} GPUs, sequences of {row['shape']['sequence']:,} tokens, {how}"
    return f"{_title(row)}: {setting}\n\n{figures(KIND.columns[1:], shown, 2, every=True)}"


def _beside(row: Row, first: Row) -> Row:
    """Return a row with its figures relative to BF16's."""
    more = _derived(row)
    if "waited_ms" in row:
        more["waited_ratio"] = first["waited_ms"] / row["waited_ms"]
    if row is not first:
        for name, key in (("less_memory", "peak_gib"), ("less_wire", "wire_bytes")):
            more |= {name: 100 * (row[key] / first[key] - 1)} if first.get(key) else {}
    return row | more


def _title(row: Row) -> str:
    shape = row["shape"]
    return f"**{row['workload']}**, {shape['layers']} layers, dim {shape['dim']:,}, vocabulary {shape['vocab']:,}"


KIND = Kind(
    name="distributed",
    keys={
        "workload": str, "implementation": str, "tokens_per_s_per_gpu": float, "ratio_to_bf16": float,
        "peak_gib": float,
    },
    columns=(
        ("workload", "{workload}"),
        ("layout", "{layout}"),
        ("implementation", "{implementation}"),
        ("tokens/s/GPU", "{tokens_per_s_per_gpu:,.0f}"),
        ("times BF16's speed", "{ratio_to_bf16:.2f}"),
        ("with a wait after each step", "{waited_ratio:.2f}"),
        ("peak GiB", "{peak_gib:.1f}"),
        ("GB on the wire", "{wire_gb:.1f}"),
        ("memory", "{less_memory:+z.0f} %"),
        ("wire", "{less_wire:+z.0f} %"),
        ("last loss", "{last_loss:.4f}"),
    ),
    names=3,
    told=(("ms", "{ms:.1f}"), *TOLD),
    derived=_derived,
    show=by_workload,
    session=("hardware", "workload", "layout", "ranks"),  # each beside BF16 of its own
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model and its step."""

    name: str
    """Name in results."""
    model: ModelConfig
    """The whole model."""
    sequences: int
    """Sequences per step and rank; each is a micro-batch."""
    compile: bool
    """Compile each block."""


_LLAMA_8B = ModelConfig(
    vocab=128256, dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, sequence=8192, rope_theta=5e5
)
_BLOCKS = ModelConfig(vocab=32768, dim=4096, layers=8, heads=32, kv_heads=8, ffn=14336, sequence=4096, rope_theta=5e5)
_LONG = ModelConfig(vocab=32768, dim=2048, layers=4, heads=32, kv_heads=8, ffn=8192, sequence=32768, rope_theta=5e5)
_TINY = ModelConfig(vocab=256, dim=128, layers=2, heads=4, kv_heads=2, ffn=256, sequence=64)
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="llama-3-8b", model=_LLAMA_8B, sequences=1, compile=True),
        Workload(name="llama-8b-blocks", model=_BLOCKS, sequences=2, compile=True),
        Workload(name="llama-1b-blocks-32k", model=_LONG, sequences=1, compile=True),
        Workload(name="llama-1b-blocks-128k", model=replace(_LONG, sequence=131072), sequences=1, compile=True),
        Workload(name="tiny-model", model=_TINY, sequences=2, compile=False),
    )
}
"""By name: Llama-3-8B; eight of its blocks with a small vocabulary, to be split over ranks; four blocks of a Llama of
one billion on long sequences; one for tests."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A measurement; each layout is compared with BF16 of the same layout."""

    workload: str = "llama-3-8b"
    """llama-3-8b, llama-8b-blocks (eight blocks of it), llama-1b-blocks-32k, llama-1b-blocks-128k or tiny-model."""
    layout: Names = ("data",)
    """data, tensor=N, either with ,graph (a CUDA graph), context=N (not compiled), pipeline=N or pipeline=N,fp8 (FP8
    between stages), or several."""
    only: Names = ()
    """Implementations besides BF16; all by default."""
    steps: int = 8
    """Timed steps, after a warm-up; the median is reported."""
    seconds: float | None = None
    """Seconds after which no further implementation is started."""


BY_DEFAULT = Work()


def bench_distributed(work: Work) -> Iterator[Row]:
    """Yield a row per layout and implementation. Every rank of `torchrun` must call this; only rank 0 yields rows.

    `ms`: back-to-back steps, as in a run, with the host ahead of the GPU if possible. `waited_ms`: steps that each
    start after all ranks have finished the previous one, as in a run that reads the loss of each step. On a GPU, rows
    also have the parts of rank 0's time: `gemm_ms`, `attention_ms`, `elementwise_ms`, `optimizer_ms`,
    `communication_ms`, `idle_ms`. Concurrent kernels count in each part.

    Raises:
        ConfigError: an unknown workload, implementation or layout, or no steps.
    """
    workload, chosen, layouts = _check(work)
    with process_group() as device:
        began = time.perf_counter()
        for layout in layouts:
            baseline: Row | None = None
            for implementation in chosen:
                row = _about(workload, implementation, layout)
                if work.seconds is not None and any_rank(device, time.perf_counter() - began > work.seconds):
                    row["error"] = f"not started: --seconds {work.seconds:g} have passed"
                else:
                    row = attempt(row, partial(_measure, workload, implementation, layout, work, device), device.type)
                baseline = baseline or row
                if is_first_rank():
                    yield beside(row, baseline)


def _check(work: Work) -> tuple[Workload, list[Implementation], list[Layout]]:
    found = implementations()
    names = {BF16, *(known("--only", name, list(found), "implementation") for name in work.only or found)}
    workload = WORKLOADS[known("--workload", work.workload, list(WORKLOADS), "workload")]
    positive("--steps", work.steps)
    chosen = [implementation for name, implementation in found.items() if name in names]
    return workload, chosen, [parse_layout(text) for text in work.layout]


def _about(workload: Workload, implementation: Implementation, layout: Layout) -> Row:
    row: Row = {"workload": workload.name, "implementation": implementation.name, "layout": str(layout)}
    compiled = workload.compile and layout.context == 1
    return row | {"ranks": dist.get_world_size(), "shape": asdict(workload.model), "compiled": compiled}


def _measure(
    workload: Workload, implementation: Implementation, layout: Layout, work: Work, device: torch.device
) -> Row:
    ranks = dist.get_world_size()
    if ranks % (layout.tensor * layout.context * layout.stages):
        raise ConfigError(f"{ranks} ranks cannot be divided into {layout}.")
    warm_up = WARM_UP + (2 if layout.graph else 0)
    training = _Training(workload, implementation, layout, device, warm_up + 2 * work.steps + PROFILED + 1)
    compiled = workload.compile and layout.context == 1
    with _compiled(training.blocks) if compiled else contextlib.nullcontext():
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        timed = _time(training, warm_up, work.steps, device)
        peak = _largest(peak_gib(device.type), device)
        profiled = profile(training.step, PROFILED) if device.type == "cuda" else None
    training.launch()
    return {
        "tokens": workload.model.sequence * workload.sequences * ranks // layout.context,
        **timed,
        "tokens_per_s_per_gpu": workload.model.sequence * workload.sequences / layout.context / timed["ms"] * 1e3,
        **({} if profiled is None else profiled.spent(timed["ms"])),
        "peak_gib": peak,
        **({} if layout.context > 1 else _traffic(training.step, device)),  # a ring is of DTensors
        "losses": [_mean_of_ranks(loss, device) for loss in training.losses[: warm_up + work.steps]],
    }


class _Training:
    """An implementation that trains a workload in a layout."""

    def __init__(
        self, workload: Workload, implementation: Implementation, layout: Layout, device: torch.device, steps: int
    ) -> None:
        """Make the batches of `steps` steps, outside the timed region."""
        self._trainer, data = lay_out(workload.model, implementation, layout, device)
        named = [pair for module in self._trainer.modules for pair in module.named_parameters()]
        self._optimizer, self._after_step = implementation.optimizer(named), implementation.after_step
        sequences = workload.sequences * dist.get_world_size() // layout.context
        self._batches = iter([part_of_batch(workload.model, sequences, number, data) for number in range(steps)])
        self.blocks = self._trainer.blocks
        self.losses: list[Tensor | None] = []
        """Loss of each step, on the device; None on ranks without one."""
        if layout.graph and isinstance(self._trainer, Whole):
            self._trainer.replay(self._optimizer)

    def launch(self) -> None:
        """Launch kernels one by one from now on: no graph outlives the ranks, or hides their communication."""
        if isinstance(self._trainer, Whole):
            self._trainer.launch()

    def step(self) -> None:
        """Train on the next batch."""
        self.losses.append(self._trainer.step(*next(self._batches)))
        self._optimizer.step()
        self._optimizer.zero_grad()
        for module in self._trainer.modules:
            self._after_step(module)


def _time(training: _Training, warm_up: int, steps: int, device: torch.device) -> Row:
    """Time back-to-back steps, and steps with a wait after each."""
    with gc_frozen(device) as after_step:
        for _ in range(warm_up):
            training.step()
            after_step()
        _wait_for_all(device)
        times = milliseconds(training.step, device.type, steps)
        waited = [_waited(training.step, device) for _ in range(steps)]
    return {
        "ms": statistics.median(times),
        "ms_all": [round(time, 2) for time in times],
        "waited_ms": statistics.median(waited),
    }


def _traffic(step: Callable[[], None], device: torch.device) -> Row:
    """Return the bytes on the wire of a step whose blocks are not compiled."""
    with Traffic() as traffic:
        step()
    sent = int(_largest(sum(traffic.bytes.values()), device))
    return {"wire_bytes": sent, "wire_bytes_by_kind": traffic.bytes}


@contextlib.contextmanager
def _compiled(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Compile the forward of blocks; FSDP2's hooks stay outside."""
    plain = [block.forward for block in blocks]
    for block, forward in zip(blocks, plain, strict=True):
        block.forward = torch.compile(forward, dynamic=False)
    yield
    for block, forward in zip(blocks, plain, strict=True):
        block.forward = forward


def _waited(step: Callable[[], None], device: torch.device) -> float:
    """Return the milliseconds of a step that starts after all ranks have finished the previous one."""
    _wait_for_all(device)
    began = time.perf_counter()
    step()
    _wait_for_all(device)
    return 1e3 * (time.perf_counter() - began)


def _wait_for_all(device: torch.device) -> None:
    synchronize(device.type)
    dist.barrier()


def _mean_of_ranks(loss: Tensor | None, device: torch.device) -> float:
    known = torch.zeros(2, device=device)
    if loss is not None:
        known[0], known[1] = loss.float(), 1.0
    dist.all_reduce(known)
    return round(float(known[0] / known[1]), 5)


def _largest(value: float, device: torch.device) -> float:
    known = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(known, dist.ReduceOp.MAX)
    return known.item()


def command(*, work: Work = BY_DEFAULT, output: Output = TO_STDOUT) -> int:
    """Train a Llama on the ranks of torchrun: FSDP2 in BF16, torchao if installed, and Octavo.

    For example:

        torchrun --nproc-per-node 4 -m octavo bench distributed --write benchmarks/results
        torchrun --nproc-per-node 4 -m octavo bench distributed --workload llama-8b-blocks --layout tensor=2
    """
    if not under_torchrun():
        raise ConfigError(
            "octavo bench distributed measures the ranks of torchrun: "
            "torchrun --nproc-per-node 4 -m octavo bench distributed"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return output.finish(KIND, bench_distributed(work), device=device, **asdict(work))


def parse_layout(text: str) -> Layout:
    """Return the layout that a text such as `pipeline=4,fp8` describes."""
    if text.endswith(",graph") and not text.startswith(("pipeline", "context")):
        return parse_layout(text.removesuffix(",graph"))._replace(graph=True)
    match text.replace("=", ",").split(","):
        case ["data"]:
            return Layout()
        case ["tensor", ranks] if ranks.isdecimal() and int(ranks) > 1:
            return Layout(tensor=int(ranks))
        case ["context", ranks] if ranks.isdecimal() and int(ranks) > 1:
            return Layout(context=int(ranks))
        case ["pipeline", stages] if stages.isdecimal() and int(stages) > 1:
            return Layout(stages=int(stages))
        case ["pipeline", stages, "fp8"] if stages.isdecimal() and int(stages) > 1:
            return Layout(stages=int(stages), sent="fp8")
    raise ConfigError(
        f"--layout: '{text}' is none of data, tensor=N, data,graph, tensor=N,graph, context=N, pipeline=N and"
        " pipeline=N,fp8, with N from 2."
    )
