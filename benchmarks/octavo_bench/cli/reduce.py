"""What it costs and loses to sum gradients over ranks."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from octavo.cli.flags import positive
from octavo_bench.cli.app import Json, Names, Write, bench, finish, printer


@bench.command
def reduce(
    *,
    scheme: Names = (),
    ranks: Annotated[tuple[int, ...], Parameter(negative=())] = (),
    elements: float | None = None,
    dtype: str = "float32",
    repeats: int = 10,
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Compare reductions of gradients with an FP64 mean: error, bias, time, bytes on the wire.

    By itself it starts processes on the CPU, whose times say nothing of GPUs. Under torchrun it measures its ranks.

    Examples:

        octavo bench reduce
        octavo bench reduce --scheme fp8-block --scheme fp8-lm --ranks 8
        torchrun --nproc-per-node 4 -m octavo bench reduce --dtype bfloat16 --write benchmarks/results

    Parameters
    ----------
    scheme
        Reductions to measure; all where it is not given.
    ranks
        Processes to start; more than one measurement where given again. By default 2, then 4.
    elements
        Values of the gradient: by default 1e8 on GPUs and 2e5 on a CPU.
    dtype
        Of the gradient, float32 or bfloat16.
    repeats
        Calls timed, after a warm-up; the median counts.
    """
    import torch

    from octavo.distributed import REDUCTIONS
    from octavo_bench.distributed.ranks import under_torchrun
    from octavo_bench.distributed.reduce import Work, bench_reduce

    on_gpu = under_torchrun() and torch.cuda.is_available()
    count = int(elements or (1e8 if on_gpu else 2e5))
    work = Work(scheme or REDUCTIONS, positive("--elements", count), dtype, positive("--repeats", repeats))
    say = printer(json_output)
    rows = bench_reduce(work, ranks, lambda row: say(_line(row)))
    if not rows:  # another rank speaks
        return 0
    launch = f"torchrun --nproc-per-node {rows[0]['ranks']} -m octavo" if under_torchrun() else "octavo"
    flags = [*(f"--scheme {name}" for name in scheme), *(f"--ranks {number}" for number in ranks)]
    flags += [f"--elements {count}", f"--dtype {dtype}", f"--repeats {repeats}"]
    command = " ".join([launch, "bench reduce", *flags])
    return finish("reduce", rows, write, json_output, command, device="cuda" if on_gpu else "cpu")


def _line(row: dict[str, Any]) -> str:
    name = f"{row['scheme']:<11} {row['ranks']:>3} ranks  {row['gradient']:<13} {row['collective']:<15}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    figures = f"{row['snr_db']:>7.2f} dB  bias {row['bias_percent']:>+9.4f} %  {row['ms']:>9.3f} ms"
    return f"{name} {figures}  {row['wire_bytes'] / row['elements']:.3f} B a value sent"
