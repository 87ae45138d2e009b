"""How accurate: parity with BF16, hard inputs, and the loss on other hardware."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from octavo_bench.cli.app import Json, Names, Write, bench, device_named, finish, printer


@bench.command
def parity(
    *,
    recipes: str = "bf16,folded,block,tensorwise",
    seeds: str = "0,1",
    preset: str = "parity-cuda",
    steps: int | None = None,
    slots: int | None = None,
    out: Path = Path("runs/parity"),
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Train one model by several recipes and seeds, on the same batches, and compare held-out losses.

    Beside the losses: the gap to BF16 of the same seeds with its intervals, tokens and time to equal loss, and the
    cosine of FP8 gradients with BF16 gradients. OUT keeps runs, curves.json and report.txt.

    Examples:

        octavo bench parity
        octavo bench parity --recipes bf16,folded --seeds 0,1,2 --steps 1000
        octavo bench parity --preset parity-350m-cuda --recipes bf16,folded,block
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
    """
    from octavo_bench.accuracy.parity import add_evidence, curves, run_parity

    say = printer(json_output)
    names, numbers, shared = tuple(recipes.split(",")), _numbers(seeds), _shared(preset, steps)
    rows = run_parity(
        shared,
        names,
        numbers,
        out=out,
        slots=slots or _gpus(),
        report=say,
    )
    rows = add_evidence(rows, out, report=say)
    (out / "curves.json").write_text(json.dumps(curves(out, names, numbers)), encoding="utf-8")
    say(_parity_report(rows, out))
    command = f"octavo bench parity --recipes {recipes} --seeds {seeds} {' '.join(shared)}"
    return finish("parity", rows, write, json_output, command)


@bench.command
def tiers(
    *,
    states: Names = (),
    seeds: str = "0,1",
    preset: str = "parity-cuda",
    steps: int | None = None,
    slots: int | None = None,
    out: Path = Path("runs/tiers"),
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Train one model with every tier of optimizer states, on the same batches, and compare held-out losses.

    Examples:

        octavo bench tiers
        octavo bench tiers --states fp32 --states fp8 --seeds 0,1,2
        octavo bench tiers --preset tiny

    Parameters
    ----------
    states
        Tiers, and `fp8, all` and `fp8-min, all` for those with FP8 weights and gradients; all where it is not given.
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
    """
    from octavo_bench.accuracy.tiers import TIERS, run_tiers
    from octavo_bench.tables.accuracy import tiers_of

    say = printer(json_output)
    names, shared = states or tuple(TIERS), _shared(preset, steps)
    rows = run_tiers(shared, names, _numbers(seeds), out=out, slots=slots or _gpus(), report=say)
    say(tiers_of(rows))
    flags = [*(f'--states "{name}"' for name in states), f"--seeds {seeds}", *shared]
    return finish("tiers", rows, write, json_output, " ".join(["octavo bench tiers", *flags]))


def _shared(preset: str, steps: int | None) -> list[str]:
    """Return the flags of `octavo train` that all runs of a study share."""
    return ["--preset", preset, *(["--steps", str(steps)] if steps else [])]


def _numbers(seeds: str) -> tuple[int, ...]:
    return tuple(int(seed) for seed in seeds.split(","))


def _gpus() -> int:
    """Return how many runs there may be at a time: one a GPU, or one."""
    import torch

    return max(torch.cuda.device_count(), 1)


def _parity_report(rows: list[dict[str, Any]], out: Path) -> str:
    """Return the tables of the study, and how the losses ran apart; the same text is left in `report.txt`."""
    from octavo.train.plot import plot
    from octavo_bench.accuracy.parity import gap_curves
    from octavo_bench.tables.accuracy import parity_of

    gaps = gap_curves(out, rows)
    parts = [parity_of(rows)]
    if gaps:
        parts += ["Training loss less BF16's, nats a token, by tokens:", plot(gaps, unit="tokens").plain]
    report = "\n\n".join(parts) + "\n"
    (out / "report.txt").write_text(report, encoding="utf-8")
    return report


@bench.command
def stress(
    *,
    recipe: Names = (),
    device: str = "auto",
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Give one linear layer hard inputs and print the signal to noise of its three products, by recipe, in seconds.

    Outlier tokens, SwiGLU spikes, gradients at 1e-9, a weight row that grows a thousandfold, odd sequence lengths;
    median row / worst row in dB, against float64.

    Examples:

        octavo bench stress
        octavo bench stress --recipe folded --recipe delayed --device cpu

    Parameters
    ----------
    recipe
        Recipes; all where it is not given.
    device
        cuda or cpu; auto takes the GPU where there is one.
    """
    from octavo_bench.accuracy.stress import bench_stress

    say, device = printer(json_output), device_named(device)
    rows = bench_stress(recipe, device=device, report=lambda row: say(_stress_line(row)))
    command = " ".join(["octavo bench stress", *(f"--recipe {name}" for name in recipe)])
    return finish("stress", rows, write, json_output, command, device=device)


def _stress_line(row: dict[str, Any]) -> str:
    name = f"{row['case']:<26} {row['recipe']:<20}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    figures = [
        f"{title} {row[f'{key}_median_db']:5.1f} /{row[f'{key}_worst_db']:6.1f} dB" if f"{key}_worst_db" in row else ""
        for title, key in (("Y", "y"), ("dX", "dx"), ("dW", "dw"))
    ]
    broken = f"  {row['nonfinite']} values are not finite" if row["nonfinite"] else ""
    return f"{name} {'   '.join(figures)}{broken}"


@bench.command
def portability(
    run: Path,
    /,
    *,
    tolerance: float | None = None,
    tokens: int | None = None,
    device: str = "auto",
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Compute one model's held-out loss as it was trained, with slow accumulation, with exact sums and in BF16.

    Exits with 1 where they part by more than the tolerance: the weights have grown used to one accumulator. Off Hopper
    its accumulator is emulated, which is slow: for small models.

    Examples:

        octavo bench portability runs/demo
        octavo bench portability runs/demo/checkpoints/step-000300 --tokens 4096 --tolerance 0.01

    Parameters
    ----------
    run
        Directory of a run, or of one of its checkpoints.
    tolerance
        Largest difference to the loss as trained that is no alarm, in nats a token; 0.02.
    tokens
        Held-out tokens, in place of those that the run was evaluated on.
    device
        cuda or cpu; auto takes the GPU where there is one.
    """
    from octavo_bench.accuracy.portability import TOLERANCE, alarm, probe

    say = printer(json_output)
    say("held-out loss, nats a token; beside it the difference to that as trained")
    rows = probe(run, device=device, tokens=tokens, report=lambda row: say(_portability_line(row)))
    say("{model}, {recipe}, step {step}, {heldout_tokens:,} tokens; accumulator: {accumulator}".format(**rows[0]))
    flags = [f"--{name} {value}" for name, value in (("tolerance", tolerance), ("tokens", tokens)) if value is not None]
    command = " ".join(["octavo bench portability", run.name, *flags])
    code = finish("portability", rows, write, json_output, command, device=device_named(device))
    message = alarm(rows, TOLERANCE if tolerance is None else tolerance)
    if message is not None:
        print(f"octavo: alarm: {message}", file=sys.stderr)
    return code if message is None else 1


def _portability_line(row: dict[str, Any]) -> str:
    kernels = ", ".join(f"{count} x {name}" for name, count in row["kernels"].items()) or "no FP8"
    return f"{row['computation']:<24} {row['heldout_loss']:.4f}  {row['difference']:+.4f}  {kernels}"
