"""What optimizers take, and what their storage does to the loss."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from octavo.cli.flags import positive
from octavo_bench.cli.app import Json, Names, Write, bench, device_named, finish, printer


@bench.command
def optimizer(
    *,
    states: Names = (),
    parameters: float | None = None,
    ablation: Annotated[bool, Parameter(negative=())] = False,
    device: str = "auto",
    repeats: int = 20,
    steps: int = 1000,
    seeds: str = "0,1",
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Time the optimizer of every tier of states beside PyTorch's fused AdamW; or train with each of FP8-LM's choices.

    Examples:

        octavo bench optimizer
        octavo bench optimizer --states fp8 --states exact --parameters 3e8
        octavo bench optimizer --device cpu --repeats 3
        octavo bench optimizer --ablation --steps 1000

    Parameters
    ----------
    states
        Tiers to time; all where it is not given.
    parameters
        About how many; by default 1e9 on a GPU and 1e6 on a CPU.
    ablation
        Train a small model of bytes on the CPU with each storage of FP8-LM's ablation instead, and compare losses.
    device
        cuda or cpu; auto takes the GPU where there is one.
    repeats
        Steps timed, after a warm-up; the median counts.
    steps
        Steps of each run of the ablation.
    seeds
        Seeds of the ablation, with commas between them.
    """
    from octavo.optim import states_named
    from octavo_bench import results
    from octavo_bench.memory.ablation import run_ablation
    from octavo_bench.memory.optimizer import bench_optimizer

    say = printer(json_output)
    for name in states:
        states_named(name)
    if ablation:
        numbers = tuple(int(seed) for seed in seeds.split(","))
        rows = run_ablation(
            steps=positive("--steps", steps), seeds=numbers, report=lambda row: say(_ablation_line(row))
        )
        command = f"octavo bench optimizer --ablation --steps {steps} --seeds {seeds}"
        finish("ablation", rows, write, json_output, command, device="cpu")
        return 0  # that a choice diverges is what is measured
    device = device_named(device)
    count = int(parameters or (1e9 if device == "cuda" else 1e6))
    flags = [*(f"--states {name}" for name in states), f"--parameters {count}", f"--repeats {repeats}"]
    command, done = " ".join(["octavo bench optimizer", *flags]), list[dict[str, Any]]()

    def report(row: dict[str, Any]) -> None:
        say(_optimizer_line(row))
        done.append(row)
        if write is not None:  # what is measured stays, whatever ends the next row
            results.save("optimizer", done, write, command, device=device)

    rows = bench_optimizer(
        parameters=positive("--parameters", count),
        device=device,
        repeats=positive("--repeats", repeats),
        states=states,
        report=report,
    )
    spent, before = (sum(row.get(key, 0.0) for row in rows) for key in ("seconds", "seconds_to_first_step"))
    say(f"{spent:.0f} s, {before:.0f} s of them until the first steps were done: weights, states, compilation")
    return finish("optimizer", rows, write, json_output, command, device=device)


def _ablation_line(row: dict[str, Any]) -> str:
    return f"{row['states']:<12} seed {row['seed']}  {row.get('heldout_loss', 'diverged')}  {row['about']}"


def _optimizer_line(row: dict[str, Any]) -> str:
    name = f"{row['states']:<18} weight {row['weight']:<14} gradient {row['gradient']:<9}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    figures = f"{row['bytes_per_parameter']:>6.2f} B  {row['ms']:>9.3f} ms  {row['ratio_to_fused_adamw']:.2f} of fused"
    return f"{name} {figures}  clipped {row['ms_clipped']:.3f} ms  {row['ratio_to_copy']:.2f} of a copy's rate"
