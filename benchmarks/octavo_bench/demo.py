"""`octavo bench demo`: the demo's run as a result of kind `demo`, with its settings and its log."""

from __future__ import annotations

from pathlib import Path

from octavo._util import config_reader
from octavo.errors import ConfigError
from octavo.train.files import read_metrics
from octavo_bench.cli import TO_STDOUT, Output
from octavo_bench.results import Row


def row_of(run: Path) -> Row:
    """Return the summary of a finished run, with its `config` and the lines of its log as `history`.

    Raises:
        ConfigError: a file of the run is missing or malformed.
    """
    summary = config_reader.read_file(run / "summary.json")
    log = run / "metrics.jsonl"
    if not log.exists():
        raise ConfigError(f"{log}: no such file. Name the directory of a finished run of `octavo train`.")
    return {**summary, "config": config_reader.read_file(run / "config.json"), "history": read_metrics(log)}


def command(run: Path = Path("runs/demo"), /, *, output: Output = TO_STDOUT) -> int:
    """Store a finished run of `make demo` as a result: the table of the demo and the README's pictures show it.

    Examples:

        octavo bench demo --write benchmarks/results
        octavo bench demo runs/demo --json

    Parameters
    ----------
    run
        Directory of the run.
    """
    row = row_of(run)
    output.say(f"{row['device']}: {row['steps']} steps, gap {row['gap_percent']:+z.2f} %")
    return output.finish("demo", [row], "make demo")
