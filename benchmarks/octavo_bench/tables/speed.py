"""What the docs show of speed: steps, products, fused kernels, and what telemetry costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from octavo_bench import results
from octavo_bench.results import Result
from octavo_bench.tables.markdown import table
from octavo_bench.tables.rows import Row, figures, grouped


def step(result: Result) -> str:
    """Return, for each workload, the time of every implementation, what it is spent on, and its peak memory."""
    return _steps(result, STEP_COLUMNS, notes=True)


def step_summary(result: Result) -> str:
    """Return, for each language model, time, speed against its peers and peak memory of every implementation."""
    rows = tuple(row for row in result.rows if not _is_of_images(row))
    return _steps(replace(result, rows=rows), [column for column in STEP_COLUMNS if column[1] in SUMMARY], notes=False)


PEER = "torchao tensorwise"
STEP_COLUMNS = (
    ("ms", "ms", "{:.1f}"),
    ("times BF16's speed", "ratio_to_bf16", "{:.2f}"),
    (f"times {PEER}", "ratio_to_peer", "{:.2f}"),
    ("GEMM ms", "gemm_ms", "{:.1f}"),
    ("attention ms", "attention_ms", "{:.1f}"),
    ("element-wise ms", "elementwise_ms", "{:.1f}"),
    ("optimizer ms", "optimizer_ms", "{:.1f}"),
    ("communication ms", "communication_ms", "{:.1f}"),
    ("idle ms", "idle_ms", "{:.1f}"),
    ("peak GiB", "peak_gib", "{:.1f}"),
    ("of BF16's datasheet peak", "mfu_bf16", "{:.2f}"),
    ("fraction of floor", "fraction_of_floor", "{:.2f}"),
)
"""Title, key of the row, format. A column that no row has a figure for is left out."""
SUMMARY = ("ms", "ratio_to_bf16", "ratio_to_peer", "peak_gib")


def _steps(result: Result, columns: Sequence[tuple[str, str, str]], *, notes: bool) -> str:
    blocks = []
    for (workload,), rows in grouped(result.rows, "workload").items():
        peer = next((row["ms"] for row in rows if row["implementation"] == PEER and "ms" in row), None)
        if peer is not None:
            rows = [row | {"ratio_to_peer": peer / row["ms"]} if "ms" in row else row for row in rows]
        block = f"**{workload}**{_shape(rows[0])}\n\n{figures(('implementation',), columns, rows)}"
        blocks.append(block + (_session(rows[0]) if notes else ""))
    return "\n\n".join(blocks)


def _is_of_images(row: Row) -> bool:
    return "size" in row.get("shape", {})


def _shape(row: Row) -> str:
    if "shape" not in row:
        return ""
    shape = row["shape"]
    if _is_of_images(row):
        return f": {shape['batch']} images of {shape['size']} x {shape['size']} pixels, bottlenecks {shape['depths']}"
    kind = f", vocabulary {shape['vocab']:,}" if shape.get("vocab") else ", no head"
    tokens = f"{shape['batch']} x {shape['sequence']:,} tokens"
    sizes = f"dim {shape['dim']:,}, ffn {shape['ffn']:,}, {shape['heads']} heads, {shape['kv_heads']} KV heads"
    return f": {shape['layers']} layers, {sizes}{kind}, {tokens}"


def _session(baseline: Row) -> str:
    """Return what the baseline's row says of the whole session: the machine's own rates, and its drift."""
    said = []
    if "rates" in baseline:
        rates = baseline["rates"]
        tflops = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates["tflops"].items())
        said.append(
            f"The machine's own rates in this session: copy {rates['copy_gb_per_s']:,.0f} GB/s; GEMM TFLOP/s: {tflops}."
        )
    if "drift" in baseline:
        said.append(f"BF16, timed again at the end: {100 * baseline['drift']:+.1f} % of its time.")
    return "\n\n" + " ".join(said) if said else ""


def gemm(result: Result) -> str:
    """Return one table: a line a shape, a column a kernel; TFLOP/s, and times BF16's in brackets."""
    columns: dict[tuple[str, str, str], str] = {}
    for row in result.rows:
        title = "BF16" if row["kernel"] == "bf16" else f"{row['operands']}, {row['accumulate']}: `{row['kernel']}`"
        columns[row["kernel"], row["operands"], row["accumulate"]] = title
    body = []
    for (shape,), rows in grouped(result.rows, "shape").items():
        cells = {(row["kernel"], row["operands"], row["accumulate"]): _gemm_cell(row) for row in rows}
        body.append((shape.replace("x", " x "), *(cells.get(column, "") for column in columns)))
    return table(("M x N x K", *columns.values()), body)


def _gemm_cell(row: Row) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    return f"{row['tflops']:,.0f}" + ("" if row["kernel"] == "bf16" else f" ({row['ratio_to_bf16']:.2f})")


KERNEL_COLUMNS = (
    ("ms", "ms", "{:.3f}"),
    ("passes", "passes", "{}"),
    ("GB/s", "gb_per_s", "{:,.0f}"),
    ("of a copy's", "ratio_to_copy", "{:.2f}"),
)


def kernels(result: Result) -> str:
    """Return one line a kernel and shape: time, and the bytes it must move against those of a copy."""
    return figures(("kernel", "shape"), KERNEL_COLUMNS, result.rows)


def telemetry(directory: Path) -> str:
    """Return one line a workload, machine by machine: what telemetry of every tensor adds to a step."""
    found = results.latest_by_hardware("telemetry", directory)
    return "\n\n".join(f"{_telemetry(result)}\n\n{result.origin}" for result in found)


def _telemetry(result: Result) -> str:
    header = ("workload", "on", "tokens", "tensors", "ms without", "ms with", "overhead", "95 % interval", "own code")
    rows = [
        (
            row["workload"],
            row["device"],
            f"{row['tokens']:,}",
            str(row["tensors"]),
            f"{row['ms']:.2f}",
            f"{row['ms_watched']:.2f}",
            f"{row['overhead_percent']:+.2f} %",
            f"{row['low_percent']:+.2f} to {row['high_percent']:+.2f} %",
            "" if row["own_percent"] is None else f"{row['own_percent']:.2f} %",
        )
        for row in result.rows
    ]
    return table(header, rows)


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "step": ("step", step),
    "step-summary": ("step", step_summary),
    "gemm": ("gemm", gemm),
    "kernels": ("kernels", kernels),
}
"""By name: the kind whose newest result the table shows, and what shows it."""

COMBINED: dict[str, Callable[[Path], str]] = {"telemetry": telemetry}
"""By name: what shows the newest results of all machines, from their directory."""
