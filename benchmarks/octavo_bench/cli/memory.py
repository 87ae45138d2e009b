"""What training takes of memory, measured beside what was predicted."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from octavo_bench.cli.app import Json, Names, Write, bench, finish, printer


@bench.command
def memory(
    *,
    workload: str = "llama-1b",
    only: Names = (),
    largest: Annotated[bool, Parameter(negative=())] = False,
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Train two steps of a Llama in BF16 and by Octavo's options, and compare the peak of memory with the forecast.

    It needs a CUDA device. `octavo plan --memory` predicts without one.

    Examples:

        octavo bench memory
        octavo bench memory --largest

    Parameters
    ----------
    workload
        A whole model among the workloads of `octavo bench step`.
    only
        Cases to measure; all where it is not given.
    largest
        Find the largest model of the workload's proportions that is predicted to fit this GPU, and train that instead.
    """
    from octavo.errors import ConfigError, did_you_mean
    from octavo_bench.memory.peak import bench_memory
    from octavo_bench.workloads import WORKLOADS

    if workload not in WORKLOADS:
        near = did_you_mean(workload, WORKLOADS)
        raise ConfigError(f"--workload: there is no workload '{workload}'.{near} Workloads: {', '.join(WORKLOADS)}.")
    say = printer(json_output)
    rows = bench_memory(WORKLOADS[workload], only, largest=largest, report=lambda row: say(_line(row)))
    flags = [f"--workload {workload}", *(f'--only "{name}"' for name in only), *(["--largest"] if largest else [])]
    command = " ".join(["octavo bench memory", *flags])
    return finish("memory", rows, write, json_output, command, device="cuda")


def _line(row: dict[str, Any]) -> str:
    name = f"{row['workload']}: {row['implementation']}"
    predicted = f"predicted {row['predicted_gib']:.2f} GiB" if "predicted_gib" in row else ""
    if "error" in row:
        return f"{name}\n    {predicted} failed: {row['error']}"
    size = f"{row['parameters'] / 1e9:.2f} B parameters"
    return f"{name}\n    {size}  {row['peak_gib']:.2f} GiB  {predicted} ({row['error_percent']:+.1f} %)"
