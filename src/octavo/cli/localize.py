"""`octavo localize`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from octavo.cli.bench import benchmarks
from octavo.cli.flags import positive
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.sensitivity.localisation import Report


def localize(
    run: Path,
    /,
    *,
    recipe: str = "",
    budget: str = "0.1%",
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    tokens: int | None = None,
    times: str = "auto",
    device: str = "auto",
    verify: int = 0,
    verify_tokens: int | None = None,
    write: Annotated[
        Path | None,
        Parameter(negative=(), help="Directory of result files to write to: benchmarks/results, in the repository."),
    ] = None,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Find what FP8 costs in every layer and product of a run's model, what it saves, and the map that fits a budget.

    Products are switched to FP8 one at a time on held-out text. The map is a recipe file.

    Examples:

        octavo localize runs/demo
        octavo localize runs/demo --budget 0.1% --recipe tensorwise -o map.toml
        octavo train runs/demo/config.json --recipe map.toml --out runs/mapped
        octavo localize runs/demo --verify 16 --json

    Parameters
    ----------
    run
        Directory of a run, or of one of its checkpoints.
    recipe
        What a layer in FP8 computes by: a name or a recipe file; by default that of the run.
    budget
        Loss that the map may cost: a share of it, 0.1%, or nats a token, 0.002.
    output
        File to write the map to, .toml.
    tokens
        Held-out tokens to look at; 131072.
    times
        measured or predicted; auto measures on a GPU, and predicts an H200's elsewhere.
    device
        cuda or cpu; auto takes the GPU where there is one.
    verify
        Put so many single layers and random maps into effect on other text: does the loss change as predicted? Exits
        with 1 where the rank correlation is below 0.7.
    verify_tokens
        Held-out tokens to verify on; 524288.
    json_output
        Print everything as JSON on stdout, the progress on stderr.
    """
    from octavo.sensitivity.run import Settings, localize_run

    if times not in ("auto", "measured", "predicted"):
        raise ConfigError(f"--times: '{times}' is none of auto, measured, predicted.")
    if output is not None and output.suffix != ".toml":
        raise ConfigError(f"--output: {output}: a precision map is a .toml file.")
    if verify < 0 or (write is not None and not verify):
        raise ConfigError("--write keeps what --verify measures: give --verify a number of maps, such as 16.")
    results = None if write is None else benchmarks("results")
    counts = {"tokens": tokens, "verify_tokens": verify_tokens}
    given = {
        name: positive(f"--{name.replace('_', '-')}", count) for name, count in counts.items() if count is not None
    }
    measure = {"auto": None, "measured": True, "predicted": False}[times]
    settings = Settings(recipe=recipe, budget=budget, device=device, measure=measure, maps=verify, **given)
    with _progress() as report:
        found, rows = localize_run(run, settings, report)
    if json_output:
        print(json.dumps({**json.loads(found.to_json()), "verified": rows}, indent=1))
    else:
        print(found, *map(_verified, rows), sep="\n")
    if output is not None:
        print(f"written: {found.save(output)}", file=sys.stderr)
    if write is None or results is None or not rows:
        return int(any(row["rank_correlation"] < LEAST for row in rows))
    flags = [f"--recipe {recipe}" if recipe else "", f"--verify {verify}", *(f"--{n} {c}" for n, c in given.items())]
    command = " ".join(filter(None, ["octavo localize", run.name, *(flag.replace("_", "-") for flag in flags)]))
    print(f"written: {results.save('localize', rows, write, command, device=device)}", file=sys.stderr)
    return int(any(row["rank_correlation"] < LEAST for row in rows))


LEAST = 0.7
"""Rank correlation of predicted and measured loss change below which a map is not to be trusted."""


def _verified(row: dict[str, Any]) -> str:
    return (
        f"verified by {row['maps']}, {len(row['predicted'])} on {row['heldout_tokens']:,} other tokens: "
        f"rank correlation {row['rank_correlation']:.3f} (each measured ± {row['error']:.0e})"
    )


@contextmanager
def _progress() -> Iterator[Report]:
    """What is measured now, on a terminal; nothing in a pipe."""
    from rich.console import Console
    from rich.status import Status

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda doing: None
        return
    with Status("reading the run", console=console) as status:
        yield lambda doing: status.update(doing)
