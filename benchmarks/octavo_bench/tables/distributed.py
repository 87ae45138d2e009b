"""What the docs show of many GPUs: whole steps, and what a reduction of gradients loses and costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo_bench.implementations import BF16
from octavo_bench.results import Result
from octavo_bench.tables.markdown import table
from octavo_bench.tables.rows import Row, figures, grouped
from octavo_bench.tables.speed import STEP_COLUMNS


def distributed(result: Result) -> str:
    """Return one line a layout and implementation: speed, memory, bytes on the wire and loss, beside BF16 above it."""
    return "\n\n".join(_of_workload(rows) for rows in grouped(result.rows, "workload").values())


def distributed_summary(result: Result) -> str:
    """Return the same of workloads that nobody cut."""
    workloads = grouped(result.rows, "workload").values()
    whole = [rows for rows in workloads if all(row["layout"] == "data" for row in rows)]
    return "\n\n".join(_of_workload(rows) for rows in whole)


def _of_workload(rows: Sequence[Row]) -> str:
    body = []
    for (layout,), of_layout in grouped(rows, "layout").items():
        first = None
        for row in of_layout:
            if row["implementation"] == BF16:  # of this run: there may be several
                first = None if "error" in row else row
            body.append((layout, row["implementation"], *_distributed_cells(row, first)))
    speed = "tokens/s/GPU", "times BF16's speed", "with a wait after each step"
    titles = (*speed, "peak GiB", "GB on the wire", "memory", "wire", "last loss")
    header = f"**{rows[0]['workload']}**, {_setting(rows[0])}"
    return f"{header}\n\n{table(('layout', 'implementation', *titles), body)}"


def _setting(row: Row) -> str:
    how = "blocks compiled" if row["compiled"] else "eager"
    return f"{_model(row)}: {row['ranks']} GPUs, sequences of {row['shape']['sequence']:,} tokens, {how}"


def _model(row: Row) -> str:
    shape = row["shape"]
    return f"{shape['layers']} layers, dim {shape['dim']:,}, vocabulary {shape['vocab']:,}"


def _distributed_cells(row: Row, first: Row | None) -> list[str]:
    if "error" in row or first is None:
        return [f"failed: {row['error']}", *[""] * 7]
    less = [f"{100 * (row[key] / first[key] - 1):+.0f} %" if first[key] else "" for key in ("peak_gib", "wire_bytes")]
    speed = [f"{row['tokens_per_s_per_gpu']:,.0f}", f"{row['ratio_to_bf16']:.2f}", _waited(row, first)]
    cost = [f"{row['peak_gib']:.1f}", f"{row['wire_bytes'] / 1e9:.1f}", *(["", ""] if row is first else less)]
    return [*speed, *cost, f"{row['losses'][-1]:.4f}"]


def _waited(row: Row, first: Row) -> str:
    """Return the ratio of speeds of steps that each begin when the one before has ended on all ranks."""
    return f"{first['waited_ms'] / row['waited_ms']:.2f}" if "waited_ms" in row else ""


RANK_COLUMNS = [
    column for column in STEP_COLUMNS if column[1] not in ("ratio_to_peer", "mfu_bf16", "fraction_of_floor")
]
"""As `STEP_COLUMNS`, without what is known of one GPU with all the work alone."""


def rank(result: Result) -> str:
    """Return one line an implementation and number of ranks: a step of one rank alone, and where its time goes."""
    return "\n\n".join(_alone(rows) for rows in grouped(result.rows, "workload").values())


def _alone(rows: Sequence[Row]) -> str:
    header = f"**{rows[0]['workload']}**, {_model(rows[0])}"
    named = [row | {"ranks": str(row["ranks"])} for row in rows]
    return f"{header}\n\n{figures(('ranks', 'layout', 'implementation'), RANK_COLUMNS, named)}"


def reduce(result: Result) -> str:
    """Return one line a scheme and collective: the error on each kind of gradient, time, and bytes sent for a value."""
    kinds = list(dict.fromkeys(row["gradient"] for row in result.rows))
    header = ["ranks", "collective", "scheme", *(f"dB, {kind}" for kind in kinds), *(f"bias, {kind}" for kind in kinds)]
    body = []
    for (ranks, collective, scheme), rows in grouped(result.rows, "ranks", "collective", "scheme").items():
        by_kind = {row["gradient"]: row for row in rows if "error" not in row}
        decibels = [f"{by_kind[kind]['snr_db']:.1f}" if kind in by_kind else "failed" for kind in kinds]
        bias = [f"{by_kind[kind]['bias_percent']:+.3f} %" if kind in by_kind else "" for kind in kinds]
        any_row = next(iter(by_kind.values()), None)
        cost = (f"{any_row['ms']:.3f}", _sent(any_row)) if any_row else ("", "")
        body.append((str(ranks), collective, scheme, *decibels, *bias, *cost))
    return table((*header, "ms", "bytes sent a value"), body)


def _sent(row: Row) -> str:
    across = f", {row['across_bytes'] / row['elements']:.2f} of them across hosts" if "across_bytes" in row else ""
    return f"{row['wire_bytes'] / row['elements']:.2f}{across}"


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "distributed": ("distributed", distributed),
    "distributed-summary": ("distributed", distributed_summary),
    "rank": ("rank", rank),
    "reduce": ("reduce", reduce),
}
"""By name: the kind whose newest result the table shows, and what shows it."""
