"""`octavo localize`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from octavo._util.terminal import progress, say
from octavo.cli.bench import benchmarks
from octavo.cli.flags import positive
from octavo.errors import ConfigError

Write = Annotated[
    Path | None,
    Parameter(negative=(), help="Directory of result files to write to: benchmarks/results, in the repository."),
]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MeasurementFlags:
    """What is measured, and on how many tokens."""

    tokens: int | None = None
    """Number of held-out tokens; by default 131072."""
    times: str = "auto"
    """measured or predicted; auto measures on a GPU, and otherwise predicts for an H200."""
    verify: int = 0
    """Number of maps whose loss is compared with its prediction; exits with 1 for a rank correlation below 0.7."""
    verify_tokens: int | None = None
    """Number of held-out tokens for --verify; by default 524288."""


def localize(
    run: Path,
    /,
    *,
    recipe: str = "",
    budget: str = "0.1%",
    output: Annotated[Path | None, Parameter(name=("--out", "-o", "--output"))] = None,
    measurement: MeasurementFlags | None = None,
    device: str = "auto",
    write: Write = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Measure the cost and gain of FP8 per layer and GEMM of a run's model; find the precision map for a budget.

    Switches one GEMM at a time to FP8, on held-out text. The map is a recipe file.

    Examples:

        octavo localize runs/demo
        octavo localize runs/demo --budget 0.1% --recipe tensorwise -o map.toml
        octavo train runs/demo/config.json --recipe map.toml --out runs/mapped
        octavo localize runs/demo --verify 16 --json

    Parameters
    ----------
    run
        Directory of a run or of one of its checkpoints.
    recipe
        Recipe of the layers in FP8, a name or a recipe file; by default the run's.
    budget
        Loss increase allowed for the map: a share, such as 0.1%, or nats per token, such as 0.002.
    output
        File to write the map to, .toml.
    device
        cuda or cpu; auto uses the GPU if there is one.
    json_output
        Print the result as JSON on stdout, progress on stderr.
    """
    from octavo.sensitivity.run import Settings, localize_run

    how = measurement or MeasurementFlags()
    times, verify = how.times, how.verify
    if times not in ("auto", "measured", "predicted"):
        raise ConfigError(f"--times: '{times}' is not auto, measured or predicted.")
    if output is not None and output.suffix != ".toml":
        raise ConfigError(f"--output: {output}: a precision map must be a .toml file.")
    if verify < 0 or (write is not None and not verify):
        raise ConfigError("--write stores the results of --verify: give --verify a number of maps, such as 16.")
    results = None if write is None else benchmarks("results")
    counts = {"tokens": how.tokens, "verify_tokens": how.verify_tokens}
    given = {
        name: positive(f"--{name.replace('_', '-')}", count) for name, count in counts.items() if count is not None
    }
    measure = {"auto": None, "measured": True, "predicted": False}[times]
    settings = Settings(recipe=recipe, budget=budget, device=device, measure=measure, maps=verify, **given)
    with progress() as report:
        found, rows = localize_run(run, settings, report)
    if json_output:
        say(json.dumps({**json.loads(found.to_json()), "verified": rows}, indent=1))
    else:
        say(found, *map(_verified, rows))
    if output is not None:
        say(f"written: {found.save(output)}", to_stderr=True)
    if write is None or results is None or not rows:
        return int(any(row["rank_correlation"] < LEAST for row in rows))
    flags = [f"--recipe {recipe}" if recipe else "", f"--verify {verify}", *(f"--{n} {c}" for n, c in given.items())]
    command = " ".join(filter(None, ["octavo localize", run.name, *(flag.replace("_", "-") for flag in flags)]))
    say(f"written: {results.save('localize', rows, write, command, device=device)}", to_stderr=True)
    return int(any(row["rank_correlation"] < LEAST for row in rows))


LEAST = 0.7
"""Lowest acceptable rank correlation of predicted and measured loss change."""


def _verified(row: dict[str, Any]) -> str:
    return (
        f"verified by {row['maps']}, {len(row['predicted'])} on {row['heldout_tokens']:,} other tokens: "
        f"rank correlation {row['rank_correlation']:.3f} (each measured ± {row['error']:.0e})"
    )
