"""`octavo bench demo`: the demo's run as a result of kind `demo`, with its settings and its log."""

from __future__ import annotations

from pathlib import Path

from octavo._util import config_reader
from octavo.errors import ConfigError
from octavo.lab.monitor.gap import fluctuation
from octavo.lab.train.files import read_metrics
from octavo_bench import results
from octavo_bench.kind import TO_STDOUT, Kind, Output
from octavo_bench.render import figures
from octavo_bench.results import Row


def _derived(row: Row) -> Row:
    """Return the duration of a run and the fluctuation of its gap."""
    more: Row = {"minutes": "{:.0f} min {:02.0f} s".format(*divmod(row["seconds"], 60))} if "seconds" in row else {}
    if "history" in row:
        gaps = [line["gap_percent"] for line in row["history"] if "gap_percent" in line]
        more["fluctuation"] = fluctuation(gaps)
    return more


def table(directory: Path) -> str:
    """Return one line per machine: the newest run of the demo."""
    found = results.newest("demo", directory)
    rows = [row for result in found for row in result.rows]
    return "\n\n".join([KIND.markdown(rows), *(result.origin for result in found)]) if found else ""


KIND: Kind = Kind(
    name="demo",
    keys={
        "recipe": str, "device": str, "steps": int, "tokens": int, "heldout_loss_fp8": float,
        "heldout_loss_bf16": float, "gap_percent": float,
    },
    columns=(
        ("device", "{device}"),
        ("recipe", "{recipe}"),
        ("steps", "{steps:,}"),
        ("tokens", "{tokens:,}"),
        ("FP8 loss", "{heldout_loss_fp8:.4f}"),
        ("BF16 loss", "{heldout_loss_bf16:.4f}"),
        ("gap", "{gap_percent:+z.2f} %"),
        ("fluctuation", "± {fluctuation:.2f} %"),
        ("byte entropy", "{unigram_entropy:.4f}"),
        ("time", "{minutes}"),
    ),
    names=2,
    derived=_derived,
    show=lambda rows: figures(KIND.columns, KIND.with_derived(rows), every=True),
    tables={"demo": table},
    session=("hardware",),
    may_fail=False,
    measured_by="make demo",
)  # fmt: skip


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
    return output.finish(KIND, [row_of(run)])
