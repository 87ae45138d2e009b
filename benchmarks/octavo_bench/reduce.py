"""Error and cost of every reduction of gradients: error against an FP64 mean, time, bytes sent.

Without `torchrun` the ranks are CPU processes started here and connected by gloo: errors and bytes are those of any
machine, times are gloo's. Under `torchrun` its ranks are used, on GPUs if there are any.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
from cyclopts import Parameter
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessException, spawn

from octavo._util.dist import is_first_rank
from octavo.distributed.reduce import REDUCTIONS, reduction
from octavo.distributed.reduce.scheme import Scheme, TwoLevel
from octavo.errors import ConfigError, RunError
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, known, positive
from octavo_bench.ranks import TIMEOUT, process_group, under_torchrun
from octavo_bench.render import cell, grouped, has_failed, table
from octavo_bench.results import Row
from octavo_bench.timing import attempt, median_ms

COLUMNS = 1024
"""Columns of a heavy-tailed gradient, each with its own size."""
EXACT_DB = 300.0
"""Reported if the error is zero in FP64."""


def by_gradient(rows: Sequence[Row]) -> str:
    """Return one line per scheme and collective: the error on each kind of gradient, time, and bytes sent per value."""
    kinds = list(dict.fromkeys(row["gradient"] for row in rows))
    header = ["ranks", "collective", "scheme", *(f"dB, {kind}" for kind in kinds), *(f"bias, {kind}" for kind in kinds)]
    body = []
    for (ranks, collective, scheme), own in grouped(rows, "ranks", "collective", "scheme").items():
        by_kind = {row["gradient"]: row for row in own if not has_failed(row)}
        decibels = [cell("{snr_db:.1f}", by_kind.get(kind, {})) or "failed" for kind in kinds]
        bias = [cell("{bias_percent:+z.3f} %", by_kind.get(kind, {})) for kind in kinds]
        any_row = next(iter(by_kind.values()), None)
        cost = (f"{any_row['ms']:.3f}", _sent(any_row)) if any_row else ("", "")
        body.append((str(ranks), collective, scheme, *decibels, *bias, *cost))
    return table((*header, "ms", "bytes sent a value"), body)


def _sent(row: Row) -> str:
    across = f", {row['across_bytes'] / row['elements']:.2f} of them across hosts" if "across_bytes" in row else ""
    return f"{row['wire_bytes'] / row['elements']:.2f}{across}"


KIND = Kind(
    name="reduce",
    keys={"scheme": str, "ranks": int, "snr_db": float, "ms": float, "wire_bytes": int},
    columns=(
        ("scheme", "{scheme}"),
        ("ranks", "{ranks} ranks"),
        ("gradient", "{gradient}"),
        ("collective", "{collective}"),
        ("dB", "{snr_db:.2f}"),
        ("bias", "{bias_percent:+.4f} %"),
        ("ms", "{ms:.3f}"),
        ("bytes sent a value", "{sent}"),
    ),
    names=4,
    derived=lambda row: {"sent": _sent(row)},
    show=by_gradient,
)


class Work(NamedTuple):
    """A measurement."""

    schemes: tuple[str, ...]
    """Names in `REDUCTIONS`."""
    elements: int
    """Values of a rank's gradient; rounded down to a multiple of the ranks."""
    dtype: str
    """Gradient dtype: float32 or bfloat16."""
    repeats: int
    """Timed calls; the median is reported."""


def bench_reduce(work: Work, ranks: Sequence[int] = ()) -> Iterator[Row]:
    """Yield a row per scheme, gradient and collective.

    Under `torchrun` every rank must call this; only rank 0 yields rows.

    Args:
        ranks: numbers of ranks, one measurement each; 2 and 4 by default. Empty under `torchrun`.

    Raises:
        ConfigError: an unknown scheme or dtype, fewer than two ranks, or ranks given under `torchrun`.
        RunError: a process failed.
    """
    _check(work, ranks)
    if under_torchrun():
        with process_group() as device:
            yield from (row for row in _measure(work, device) if is_first_rank())
        return
    for number in ranks or (2, 4):
        yield from _in_processes(work, number)


def _check(work: Work, ranks: Sequence[int]) -> None:
    for name in work.schemes:
        known("--scheme", name, list(REDUCTIONS), "reduction")
    if work.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"gradients are float32 or bfloat16, not '{work.dtype}'.")
    if ranks and under_torchrun():
        raise ConfigError("under torchrun its ranks are measured: leave out --ranks.")
    if any(number < 2 for number in ranks):
        raise ConfigError(f"one rank has nothing to reduce: {', '.join(map(str, ranks))} ranks.")


def _in_processes(work: Work, ranks: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as place:
        try:
            spawn(_process, (ranks, work, place), nprocs=ranks)
        except ProcessException as error:
            raise RunError(f"rank {error.error_index} of {ranks}: {str(error).strip().splitlines()[-1]}") from error
        rows: list[Row] = json.loads((Path(place) / "rows.json").read_text())
    return rows


def _process(rank: int, ranks: int, work: Work, place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{place}/store", TIMEOUT, ranks, rank)
    rows = list(_measure(work, torch.device("cpu")))
    if rank == 0:
        (Path(place) / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _measure(work: Work, device: torch.device) -> Iterator[Row]:
    """Yield the rows, on every rank."""
    ranks = dist.get_world_size()
    work = work._replace(elements=max(work.elements // ranks, 1) * ranks)
    for kind, draw in GRADIENTS.items():
        exact = sum(_gradient(draw, rank, work, device).double() for rank in range(ranks)) / ranks
        assert isinstance(exact, Tensor)
        own = _gradient(draw, dist.get_rank(), work, device)
        for name in work.schemes:
            for collective, call in COLLECTIVES.items():
                row = {"scheme": name, "ranks": ranks, "gradient": kind, "collective": collective}
                row |= {"elements": work.elements, "dtype": work.dtype}
                # Whatever is unsupported on this machine fails on every rank.
                yield attempt(row, partial(_figures, name, call, own, exact, work.repeats))


def _figures(name: str, call: Collective, own: Tensor, exact: Tensor, repeats: int) -> Row:
    scheme = _scheme(name, own.device)
    found = call(scheme, own.clone())
    sent = {"wire_bytes": scheme.sent}
    if isinstance(scheme, TwoLevel):
        sent["across_bytes"] = scheme.outer.sent
    if found.numel() < exact.numel():
        exact = exact.chunk(dist.get_world_size())[dist.get_rank()]
    # Warm-up by calls, not seconds: all ranks must make the same number.
    ms = median_ms(partial(call, scheme, own.clone()), own.device.type, repeats, seconds=0.0, queued=False)
    return {**_error(found, exact), "ms": round(ms, 4), **sent}


def _error(found: Tensor, exact: Tensor) -> Row:
    """Compare with the exact mean: signal-to-noise ratio, and bias of the projection onto it."""
    found = found.double()
    sums = torch.stack([exact.square().sum(), (found - exact).square().sum(), (found * exact).sum()])
    dist.all_reduce(sums)
    signal, noise, along = sums.tolist()
    decibels = 10 * math.log10(signal / noise) if noise else EXACT_DB
    return {"snr_db": round(min(decibels, EXACT_DB), 2), "bias_percent": round(100 * (along / signal - 1), 5)}


# --- collectives -----------------------------------------------------------------------------------------------------

Collective = Callable[[Scheme, Tensor], Tensor]
"""(scheme, gradient) -> mean, or this rank's part of it."""


def _reduce_scatter(scheme: Scheme, gradient: Tensor) -> Tensor:
    part = gradient.new_empty(gradient.numel() // dist.get_world_size(), dtype=torch.float32)
    scheme.reduce_scatter(part, gradient, _world())
    return part


def _all_reduce(scheme: Scheme, gradient: Tensor) -> Tensor:
    scheme.all_reduce(gradient, _world())
    return gradient


COLLECTIVES: dict[str, Collective] = {"reduce-scatter": _reduce_scatter, "all-reduce": _all_reduce}


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _scheme(name: str, device: torch.device) -> Scheme:
    return reduction(name, init_device_mesh(device.type, _hosts()) if name == TwoLevel.name else None)


def _hosts() -> tuple[int, int]:
    """Return (hosts, ranks per host) as set by `torchrun`; a single host counts as two."""
    ranks = dist.get_world_size()
    within = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if within == ranks:
        within = ranks // 2 if ranks % 2 == 0 else 1
    return ranks // within, within


# --- gradients -------------------------------------------------------------------------------------------------------

Draw = Callable[[torch.Generator, torch.Generator, int, torch.device], Tensor]
"""(generator shared by all ranks, generator of this rank, number of values, device) -> FP32 gradient."""


def _gradient(draw: Draw, rank: int, work: Work, device: torch.device) -> Tensor:
    """Return the gradient of a rank, which every rank can draw."""
    shared, own = (torch.Generator(device).manual_seed(seed) for seed in (0, rank + 1))
    return draw(shared, own, work.elements, device).mul_(1e-4).to(getattr(torch, work.dtype))


def _correlated(shared: torch.Generator, own: torch.Generator, count: int, device: torch.device) -> Tensor:
    """Return normal values, mostly equal on all ranks: partial sums grow with the number of ranks."""
    signal = torch.randn(count, generator=shared, device=device)
    return signal.add_(torch.randn(count, generator=own, device=device), alpha=0.5)


def _heavy_tailed(shared: torch.Generator, own: torch.Generator, count: int, device: torch.device) -> Tensor:
    """Return values of Student's t with 4 degrees of freedom, mostly noise of the rank, columns of log-normal size."""
    sizes = torch.randn(COLUMNS, generator=shared, device=device).exp_()
    signal = _student(shared, count, device).add_(_student(own, count, device), alpha=4.0)
    return signal.mul_(sizes.repeat(count // COLUMNS + 1)[:count])


def _student(generator: torch.Generator, count: int, device: torch.device) -> Tensor:
    square = sum(torch.randn(count, generator=generator, device=device).square_() for _ in range(4))
    assert isinstance(square, Tensor)
    return torch.randn(count, generator=generator, device=device).mul_(square.div_(4).rsqrt_())


GRADIENTS: dict[str, Draw] = {"correlated": _correlated, "heavy-tailed": _heavy_tailed}


def command(
    *,
    scheme: Names = (),
    ranks: Annotated[tuple[int, ...], Parameter(negative=())] = (),
    elements: float | None = None,
    dtype: str = "float32",
    repeats: int = 10,
    output: Output = TO_STDOUT,
) -> int:
    """Compare reductions of gradients with an FP64 mean: error, bias, time, bytes on the wire.

    Without torchrun it starts CPU processes, whose times say nothing about GPUs. Under torchrun it measures its ranks.

    Examples:

        octavo bench reduce
        octavo bench reduce --scheme fp8-block --scheme fp8-lm --ranks 8
        torchrun --nproc-per-node 4 -m octavo bench reduce --dtype bfloat16 --write benchmarks/results

    Parameters
    ----------
    scheme
        Reductions to measure; all by default.
    ranks
        Processes to start; repeat the flag for further measurements. By default 2, then 4.
    elements
        Values of the gradient: by default 1e8 on GPUs and 2e5 on a CPU.
    dtype
        Dtype of the gradient, float32 or bfloat16.
    repeats
        Timed calls, after a warm-up; the median is reported.
    """
    on_gpu = under_torchrun() and torch.cuda.is_available()
    count = positive("--elements", int(elements or (1e8 if on_gpu else 2e5)))
    work = Work(scheme or tuple(REDUCTIONS), count, dtype, positive("--repeats", repeats))
    given = {"scheme": scheme, "ranks": ranks, "elements": count, "dtype": dtype, "repeats": repeats}
    return output.finish(KIND, bench_reduce(work, ranks), device="cuda" if on_gpu else "cpu", **given)
