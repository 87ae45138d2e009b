"""What telemetry of every tensor costs."""

from __future__ import annotations

from typing import Any

from octavo.cli.flags import positive
from octavo_bench.cli.app import Json, Names, Write, bench, device_named, finish, printer


@bench.command
def telemetry(
    *,
    workload: Names = (),
    every: int = 1,
    histograms_every: int = 0,
    device: str = "auto",
    steps: int = 1,
    rounds: int = 60,
    write: Write = None,
    json_output: Json = False,
) -> int:
    """Time steps with telemetry and without, in turns.

    Examples:

        octavo bench telemetry
        octavo bench telemetry --workload tiny --device cpu

    Parameters
    ----------
    workload
        Stacks among the workloads of `octavo bench step`, or `demo`, the model of `octavo train --preset demo`; by
        default `llama-8b-stack` on a GPU and `demo` on a CPU.
    every
        Look at each step whose number this divides.
    histograms_every
        Look at the exponents, too, in each step whose number this divides; 0: never.
    device
        cuda or cpu; auto takes the GPU where there is one.
    steps
        Steps of each kind in a round; their median counts.
    rounds
        Pairs of steps without telemetry and with it, which take turns to be first; the median counts.
    """
    from octavo.errors import ConfigError, did_you_mean
    from octavo_bench.speed.telemetry import DEMO, bench_telemetry
    from octavo_bench.workloads import WORKLOADS, Workload

    device = device_named(device)
    known = {DEMO.name: DEMO} | {
        name: shape for name, shape in WORKLOADS.items() if isinstance(shape, Workload) and not shape.vocab
    }
    names = workload or (("llama-8b-stack",) if device == "cuda" else (DEMO.name,))
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise ConfigError(f"--workload: there is no stack '{name}'.{near} Stacks: {', '.join(known)}.")
    say = printer(json_output)
    settings: dict[str, Any] = {
        "device": device,
        "every": positive("--every", every),
        "histograms-every": histograms_every,
        "steps": positive("--steps", steps),
        "rounds": positive("--rounds", rounds),
    }
    named = {key.replace("-", "_"): value for key, value in settings.items()}
    rows = [bench_telemetry(known[name], **named, report=lambda row: say(_line(row))) for name in names]
    flags = [*(f"--workload {name}" for name in names), *(f"--{key} {value}" for key, value in settings.items())]
    command = " ".join(["octavo bench telemetry", *flags])
    return finish("telemetry", rows, write, json_output, command, device=device)


def _line(row: dict[str, Any]) -> str:
    times = f"{row['ms']:.2f} ms without, {row['ms_watched']:.2f} ms with, {row['tensors']} tensors"
    own = "" if row["own_percent"] is None else f"; {row['own_percent']:.2f} % in its own code"
    between = f"[{row['low_percent']:+.2f} %, {row['high_percent']:+.2f} %]"
    return f"{row['workload']}: {row['overhead_percent']:+.2f} % {between} of {row['pairs']} pairs{own}  ({times})"
