"""What whole training steps on several GPUs take."""

from __future__ import annotations

from typing import Any

from octavo.cli.bench.app import Json, Names, Write, bench, finish, positive, printer


@bench.command
def distributed(
    *,
    workload: str = "llama-3-8b",
    layout: Names = ("data",),
    only: Names = (),
    steps: int = 8,
    seconds: float | None = None,
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Train a Llama on the ranks of torchrun, by FSDP2 in BF16, by torchao if it is there, and by Octavo.

    Examples:

        torchrun --nproc-per-node 4 -m octavo bench distributed --write benchmarks/results
        torchrun --nproc-per-node 4 -m octavo bench distributed --workload llama-8b-blocks --layout tensor=2

    Parameters
    ----------
    workload
        llama-3-8b, llama-8b-blocks (eight blocks of it) or tiny-model.
    layout
        data; tensor=N; pipeline=N; pipeline=N,fp8 (FP8 between stages). More than one where given again. Ranks that are
        left share the data, sharded.
    only
        Implementations beside BF16; all where it is not given.
    steps
        Steps timed, after a warm-up; the median counts.
    seconds
        Begin with no other implementation after so many.
    """
    from octavo.bench.distributed.ranks import under_torchrun
    from octavo.bench.distributed.training import Work, bench_distributed
    from octavo.errors import ConfigError

    if not under_torchrun():
        raise ConfigError(
            "octavo bench distributed measures the ranks of torchrun: "
            "torchrun --nproc-per-node 4 -m octavo bench distributed"
        )
    import torch

    layouts = tuple(_layout(text) for text in layout)
    work = Work(workload=workload, layouts=layouts, only=only, steps=positive("--steps", steps), seconds=seconds)
    say = printer(json_output)
    rows = bench_distributed(work, lambda row: say(_line(row)))
    if not rows:  # another rank speaks
        return 0
    flags = [f"--workload {workload}", *(f"--layout {text}" for text in layout)]
    flags += [*(f'--only "{name}"' for name in only), f"--steps {steps}"]
    command = f"torchrun --nproc-per-node {rows[0]['ranks']} -m octavo bench distributed {' '.join(flags)}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return finish("distributed", rows, write, json_output, command, device=device)


def _layout(text: str) -> Any:
    """Return the layout that a text means."""
    from octavo.bench.distributed.trainers import Layout
    from octavo.errors import ConfigError

    match text.replace("=", ",").split(","):
        case ["data"]:
            return Layout()
        case ["tensor", ranks] if ranks.isdecimal() and int(ranks) > 1:
            return Layout(tensor=int(ranks))
        case ["pipeline", stages] if stages.isdecimal() and int(stages) > 1:
            return Layout(stages=int(stages))
        case ["pipeline", stages, "fp8"] if stages.isdecimal() and int(stages) > 1:
            return Layout(stages=int(stages), sent="fp8")
    raise ConfigError(f"--layout: '{text}' is none of data, tensor=N, pipeline=N and pipeline=N,fp8, with N from 2.")


def _line(row: dict[str, Any]) -> str:
    name = f"{row['workload']}  {row['layout']:<32} {row['implementation']:<32}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    speed = (
        f"{row['ms']:>8.1f} ms  {row['tokens_per_s_per_gpu']:>9,.0f} tokens/s/GPU  {row['ratio_to_bf16']:.2f} of BF16"
    )
    cost = f"{row['peak_gib']:.1f} GiB  {row['wire_bytes'] / 1e9:.2f} GB sent"
    return f"{name} {speed}  {cost}  loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}"
