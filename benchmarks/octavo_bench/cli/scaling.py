"""A step on many GPUs, on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from octavo_bench.cli.app import Json, Write, bench, finish, printer


@bench.command
def scaling(
    file: Path | None = None,
    /,
    *,
    results: Annotated[Path, Parameter(negative=())] = Path("benchmarks/results"),
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Compute, from measured rates and stated links, what a step takes on 64, 512 and 4096 GPUs, in FP8 and in BF16.

    Nothing is measured: every layout that fits is estimated, and the fastest shown. The assumptions are in the result.

    Examples:

        octavo bench scaling
        octavo bench scaling --write benchmarks/results
        octavo bench scaling slow-network.toml

    Parameters
    ----------
    file
        Assumptions in TOML, key by key; the rest stay as docs/explanation/scaling.md lists them.
    results
        Directory of the result files that rates of one GPU are taken from.
    """
    from octavo_bench.distributed.assumptions import load
    from octavo_bench.distributed.measured_rates import measured
    from octavo_bench.distributed.scaling import bench_scaling

    say = printer(json_output)
    assumptions = measured(load(file), results)
    rows = bench_scaling(assumptions, report=lambda row: say(_line(row)))
    command = " ".join(["octavo bench scaling", *([file.name] if file else [])])
    finish("scaling", rows, write, json_output, command, hardware="paper")
    return 0  # that a model fits on no layout is an answer


def _line(row: dict[str, Any]) -> str:
    name = f"{row['model']:<6}{row['gpus']:>5} GPUs  {row['scheme']:<16}"
    if "error" in row:
        return f"{name} {row['error']}"
    times = f"{row['ms']:>10,.0f} ms: compute {row['compute_ms']:,.0f}, bubble {row['bubble_ms']:,.0f}"
    rest = f"not hidden {row['exposed_ms']:,.0f} of {row['communication_ms']:,.0f}"
    ratio = f"{row['ratio_to_bf16']:.2f} x BF16" if "ratio_to_bf16" in row else "BF16 fits nowhere"
    return f"{name} {times}, {rest}  {ratio}  {row['peak_gib']:.0f} GiB  {row['layout']}"
