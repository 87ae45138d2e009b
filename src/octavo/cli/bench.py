"""`octavo bench`: measure, and write result files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

bench = App(name="bench", help="Measure speed and accuracy, and write the result files that the tables are made from.")


@bench.command
def step(
    *,
    workload: str = "llama-8b-stack",
    only: tuple[str, ...] = (),
    device: str = "auto",
    steps: int = 20,
    write: Annotated[Path | None, Parameter(negative=())] = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Time forward and backward of a stack of Llama blocks: BF16, torchao where it is installed, every recipe.

    Examples:

        octavo bench step
        octavo bench step --only "octavo folded" --steps 50
        octavo bench step --workload tiny --device cpu

    Parameters
    ----------
    workload
        llama-8b-stack (8 layers, 16,384 tokens) or tiny.
    only
        Implementations to run beside BF16; all where it is not given.
    device
        cuda or cpu; auto takes the GPU where there is one.
    steps
        Steps timed, after a warm-up; the median counts.
    write
        Directory of result files to write to, benchmarks/results in this repository.
    json_output
        Print the rows as JSON on stdout, the progress on stderr.
    """
    from octavo.bench.step import WORKLOADS, bench_step
    from octavo.errors import ConfigError, did_you_mean

    if workload not in WORKLOADS:
        near = did_you_mean(workload, WORKLOADS)
        raise ConfigError(f"--workload: there is no '{workload}'.{near} Workloads: {', '.join(WORKLOADS)}.")
    device = _device(device)

    def report(row: dict[str, Any]) -> None:
        parts = " ".join(
            f"{part} {row[f'{part}_ms']:.1f}" for part in ("gemm", "attention", "elementwise") if f"{part}_ms" in row
        )
        figures = f"{row['ms']:>9.2f} ms  {row['ratio_to_bf16']:.2f} x BF16  {row['peak_gib']:.1f} GiB"
        print(
            f"{row['implementation']:<20} {figures}  {parts}",
            file=sys.stderr if json_output else sys.stdout,
            flush=True,
        )

    rows = bench_step(WORKLOADS[workload], only, device=device, compile=device == "cuda", steps=steps, report=report)
    return _finish("step", rows, write, json_output, f"octavo bench step --workload {workload} --steps {steps}")


@bench.command
def parity(
    *,
    recipes: str = "bf16,folded,block,tensorwise",
    seeds: str = "0,1",
    preset: str = "parity-cuda",
    steps: int | None = None,
    slots: int | None = None,
    out: Path = Path("runs/parity"),
    write: Annotated[Path | None, Parameter(negative=())] = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Train one model by several recipes and seeds, on the same batches, and compare held-out losses.

    Examples:

        octavo bench parity
        octavo bench parity --recipes bf16,folded --seeds 0,1,2 --steps 1000
        octavo bench parity --preset tiny

    Parameters
    ----------
    recipes
        Recipes, with commas between them.
    seeds
        Seeds, with commas between them. Runs of one seed share weights and batches.
    preset
        The run that all share.
    steps
        Steps of each run, in place of the preset's.
    slots
        Runs at a time; by default one a GPU.
    out
        Directory for the runs.
    write
        Directory of result files to write to, benchmarks/results in this repository.
    json_output
        Print the rows as JSON on stdout, the progress on stderr.
    """
    import torch

    from octavo.bench.parity import curves, run_parity

    names, numbers = tuple(recipes.split(",")), tuple(int(seed) for seed in seeds.split(","))
    shared = ["--preset", preset, *(["--steps", str(steps)] if steps else [])]
    rows = run_parity(
        shared,
        names,
        numbers,
        out=out,
        slots=slots or max(torch.cuda.device_count(), 1),
        report=lambda line: print(line, file=sys.stderr if json_output else sys.stdout, flush=True),
    )
    (out / "curves.json").write_text(json.dumps(curves(out, names, numbers)), encoding="utf-8")
    command = f"octavo bench parity --recipes {recipes} --seeds {seeds} {' '.join(shared)}"
    return _finish("parity", rows, write, json_output, command)


def _device(name: str) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _finish(kind: str, rows: list[dict[str, Any]], write: Path | None, json_output: bool, command: str) -> int:
    from octavo.bench import results

    if json_output:
        print(json.dumps(rows, indent=1))
    if write is not None:
        result = results.Result(
            kind=kind,
            date=results.today(),
            hardware=results.hardware(),
            versions=results.versions(),
            command=command,
            rows=tuple(rows),
        )
        path = results.write(result, write)
        print(f"written: {path}", file=sys.stderr)
    return 0
