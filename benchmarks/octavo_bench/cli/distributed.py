"""What whole training steps on several GPUs take, and what one of many GPUs has to do in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from octavo.cli.flags import positive
from octavo_bench.cli.app import Json, Names, Write, bench, finish, printer

if TYPE_CHECKING:
    from octavo_bench.distributed.training import Work


Counts = Annotated[
    tuple[int, ...],
    Parameter(negative=(), help="Ranks that share the model. More than one number where given again."),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Flags:
    """What both commands measure."""

    workload: str = "llama-3-8b"
    """llama-3-8b, llama-8b-blocks (eight blocks of it) or tiny-model."""
    layout: Names = ("data",)
    """data, tensor=N, pipeline=N or pipeline=N,fp8 (FP8 between stages), or several. A rank alone has no pipeline."""
    only: Names = ()
    """Implementations beside BF16; all where it is not given."""
    steps: int = 8
    """Steps timed, after a warm-up; the median counts."""
    seconds: float | None = None
    """Begin with no other implementation after so many."""

    def work(self) -> Work:
        """Return what they ask for.

        Raises:
            ConfigError: a layout or a number that cannot be.
        """
        from octavo_bench.distributed.training import Work

        return Work(
            workload=self.workload,
            layouts=tuple(_layout(text) for text in self.layout),
            only=self.only,
            steps=positive("--steps", self.steps),
            seconds=self.seconds,
        )

    def __str__(self) -> str:
        flags = [f"--workload {self.workload}", *(f"--layout {text}" for text in self.layout)]
        return " ".join([*flags, *(f'--only "{name}"' for name in self.only), f"--steps {self.steps}"])


NO_FLAGS = Flags()


@bench.command
def distributed(*, flags: Flags = NO_FLAGS, write: Write = None, json_output: Json = False) -> int:
    """Train a Llama on the ranks of torchrun, by FSDP2 in BF16, by torchao if it is there, and by Octavo.

    For example:

        torchrun --nproc-per-node 4 -m octavo bench distributed --write benchmarks/results
        torchrun --nproc-per-node 4 -m octavo bench distributed --workload llama-8b-blocks --layout tensor=2
    """
    from octavo.errors import ConfigError
    from octavo_bench.distributed.ranks import under_torchrun
    from octavo_bench.distributed.training import bench_distributed

    if not under_torchrun():
        raise ConfigError(
            "octavo bench distributed measures the ranks of torchrun: "
            "torchrun --nproc-per-node 4 -m octavo bench distributed"
        )
    import torch

    say = printer(json_output)
    rows = bench_distributed(flags.work(), lambda row: say(_line(row)))
    if not rows:  # another rank speaks
        return 0
    launcher = f"torchrun --nproc-per-node {rows[0]['ranks']}"
    command = f"{launcher} -m octavo bench distributed {flags}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return finish("distributed", rows, write, json_output, command, device=device)


@bench.command
def rank(*, ranks: Counts = (4,), flags: Flags = NO_FLAGS, write: Write = None, json_output: Json = False) -> int:
    """Train one rank's part of a Llama without the others: what it computes, and the memory it needs.

    Collectives copy what the others would send, as if all held what this rank holds, on a network that takes no time.
    So a GPU measures its part of a step on any number of them, and what is left of a real step is the network's.

    For example:

        octavo bench rank --ranks 4 --write benchmarks/results
        octavo bench rank --ranks 512 --only "octavo folded"
    """
    import torch

    from octavo_bench.distributed.training import bench_distributed

    work, say = flags.work(), printer(json_output)
    rows = []
    for count in ranks:
        one = replace(work, alone_of=positive("--ranks", count))
        rows += bench_distributed(one, lambda row: say(f"rank of {row['ranks']:>4}  {_line(row)}"))
    command = f"octavo bench rank {' '.join(f'--ranks {count}' for count in ranks)} {flags}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return finish("rank", rows, write, json_output, command, device=device)


def _layout(text: str) -> Any:
    """Return the layout that a text means."""
    from octavo.errors import ConfigError
    from octavo_bench.distributed.trainers import Layout

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
    cost = f"{row['peak_gib']:.1f} GiB"
    if "wire_bytes" in row:
        cost += f"  {row['wire_bytes'] / 1e9:.2f} GB sent"
    return f"{name} {speed}  {cost}  loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}"
