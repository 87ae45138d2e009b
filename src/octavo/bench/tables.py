"""The tables of README and docs. Figures come from `benchmarks/results/latest`, facts from the code.

A page holds a table between two lines, and only what stands between them is written:

    <!-- table: parity -->
    <!-- end -->

`python -m octavo.bench.tables` writes every page again; with `--check` it names the pages that are not
current and exits with 1. Run it from the root of the repository, or give `--root`.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from octavo.bench import facts, results, scaling_tables
from octavo.bench.choice import choice
from octavo.bench.markdown import table
from octavo.bench.paired import over_seeds, student
from octavo.bench.results import Result
from octavo.errors import ConfigError, OctavoError, did_you_mean
from octavo.memory import KINDS

NOT_MEASURED = "*Not measured yet.*"
MARK = re.compile(r"^<!-- (?:table: (?P<name>\S+)|(?P<end>end)) -->$")

Row = dict[str, Any]


def demo(result: Result) -> str:
    """Return the table of the demo: both held-out losses, the gap, and the entropy of single bytes."""
    header = ("device", "recipe", "steps", "tokens", "FP8 loss", "BF16 loss", "gap", "byte entropy")
    rows = [
        (
            row["device"],
            row["recipe"],
            f"{row['steps']:,}",
            f"{row['tokens']:,}",
            f"{row['heldout_loss_fp8']:.4f}",
            f"{row['heldout_loss_bf16']:.4f}",
            f"{row['gap_percent']:+.2f} %",
            f"{row['unigram_entropy']:.4f}" if "unigram_entropy" in row else "",
        )
        for row in result.rows
    ]
    return table(header, rows)


def parity(result: Result) -> str:
    """Return, for each model, the held-out loss of every recipe and seed, and the gap to BF16 of the same seeds."""
    return parity_of(result.rows)


def parity_of(rows: Sequence[Row]) -> str:
    """Return the same from the rows alone."""
    groups = _grouped(rows, "model", "tokens")
    return "\n\n".join(_parity_of(f"{model}, {tokens:,} tokens", rows) for (model, tokens), rows in groups.items())


EVIDENCE = (
    ("95 % over sequences", "gap_95", "± {:.3f} %"),
    ("tokens to equal loss", "tokens_ratio", "{:.3f}"),
    ("speed at equal loss", "loss_matched_speedup", "{:.2f}"),
    ("gradient cosine, start", "cosine_start", "{:.4f}"),
    ("worst matrix", "cosine_layer_start", "{:.4f}"),
    ("gradient cosine, end", "cosine_end", "{:.4f}"),
    ("worst matrix", "cosine_layer_end", "{:.4f}"),
)
"""Title, key of the row, format: the mean over the seeds. A column that no row has a figure for is left out."""


def _parity_of(title: str, rows: Sequence[Row]) -> str:
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        of_recipe = losses.setdefault(row["recipe"], {})
        if row["seed"] in of_recipe:
            raise ConfigError(f"result of kind 'parity': {title}: {row['recipe']}, seed {row['seed']} stands twice.")
        of_recipe[row["seed"]] = row["heldout_loss"]
    seeds = sorted({row["seed"] for row in rows})
    bf16 = losses.get("bf16", {})
    shown = [column for column in EVIDENCE if any(column[1] in row for row in rows)]
    body = [
        (
            recipe,
            *(f"{by_seed[seed]:.4f}" if seed in by_seed else "" for seed in seeds),
            f"{fmean(by_seed.values()):.4f}",
            *(("", "") if recipe == "bf16" else _gap(by_seed, bf16)),
            *(_evidence([row for row in rows if row["recipe"] == recipe], key, form) for _, key, form in shown),
        )
        for recipe, by_seed in losses.items()
    ]
    titles = ("gap to BF16", "95 % over seeds", *(title for title, *_ in shown))
    header = ("recipe", *(f"seed {seed}" for seed in seeds), "mean", *titles)
    pairs = [len(by_seed.keys() & bf16.keys()) for recipe, by_seed in losses.items() if recipe != "bf16"]
    said = f"{_spread(list(bf16.values()))} {_meaning(pairs, [key for _, key, _ in shown])}".strip()
    return f"**{title}**: held-out loss, nats a token\n\n{table(header, body)}\n\n{said}"


def _gap(losses: dict[int, float], bf16: dict[int, float]) -> tuple[str, str]:
    """Return the mean gap over the seeds that both have, and half of its interval."""
    gaps = [100 * (loss / bf16[seed] - 1) for seed, loss in losses.items() if seed in bf16]
    if not gaps:
        return "BF16 not measured", ""
    found = over_seeds(gaps)
    return f"{found.mean:+.2f} %", "" if found.half_width is None else f"± {found.half_width:.2f} %"


def _evidence(rows: Sequence[Row], key: str, form: str) -> str:
    values = [row[key] * (100 / row["heldout_loss"] if key == "gap_95" else 1) for row in rows if key in row]
    return form.format(fmean(values)) if values else ""


def _meaning(pairs: Sequence[int], shown: Sequence[str]) -> str:
    """Return how the intervals and ratios are to be read; `pairs`: seeds that a recipe shares with BF16, for each."""
    said = []
    if factors := [f"{student(count - 1):.1f} standard errors with {count} seeds" for count in {*pairs} if count > 1]:
        said.append(
            f"The interval over seeds is Student's t for pairs of the same seed, {', '.join(factors)}: whether another"
            " seed would show the gap."
        )
    if "gap_95" in shown:
        said.append("The one over sequences compares the same held-out text: whether these very weights differ.")
    if "tokens_ratio" in shown:
        said.append(
            "Equal loss is the final smoothed training loss of the one that ended higher; tokens and speed at it are in"
            " units of BF16's."
        )
    return " ".join(said)


def _spread(bf16: Sequence[float]) -> str:
    if len(bf16) < 2:
        return f"BF16 was trained with {len(bf16)} seeds, so its own spread is not known."
    spread = max(bf16) - min(bf16)
    lie = f"The {len(bf16)} BF16 seeds lie {spread:.4f} apart ({100 * spread / fmean(bf16):.2f} %)"
    return f"{lie}: a gap inside that spread cannot be told from chance."


def step(result: Result) -> str:
    """Return, for each workload, the time of every implementation, what it is spent on, and its peak memory."""
    return _steps(result, STEP_COLUMNS, notes=True)


def step_summary(result: Result) -> str:
    """Return, for each workload, time, speed against its peers and peak memory of every implementation."""
    return _steps(result, [column for column in STEP_COLUMNS if column[1] in SUMMARY], notes=False)


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
    for (workload,), rows in _grouped(result.rows, "workload").items():
        peer = next((row["ms"] for row in rows if row["implementation"] == PEER and "ms" in row), None)
        if peer is not None:
            rows = [row | {"ratio_to_peer": peer / row["ms"]} if "ms" in row else row for row in rows]
        block = f"**{workload}**{_shape(rows[0])}\n\n{_figures(('implementation',), columns, rows)}"
        blocks.append(block + (_session(rows[0]) if notes else ""))
    return "\n\n".join(blocks)


def _figures(names: Sequence[str], columns: Sequence[tuple[str, str, str]], rows: Sequence[Row]) -> str:
    """Return a table of rows: what names them, then their figures; the error of a row that failed in the first."""
    shown = [column for column in columns if any(column[1] in row for row in rows)]
    body = []
    for row in rows:
        figures = [form.format(row[key]) if key in row else "" for _, key, form in shown]
        if "error" in row:
            figures[0] = f"failed: {row['error']}"
        body.append((*(row[name] for name in names), *figures))
    return table((*names, *(title for title, *_ in shown)), body)


def _shape(row: Row) -> str:
    if "shape" not in row:
        return ""
    shape = row["shape"]
    if "size" in shape:
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
    for (shape,), rows in _grouped(result.rows, "shape").items():
        cells = {(row["kernel"], row["operands"], row["accumulate"]): _gemm_cell(row) for row in rows}
        body.append((shape.replace("x", " x "), *(cells.get(column, "") for column in columns)))
    return table(("M x N x K", *columns.values()), body)


def _gemm_cell(row: Row) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    return f"{row['tflops']:,.0f}" + ("" if row["kernel"] == "bf16" else f" ({row['ratio_to_bf16']:.2f})")


def stress(result: Result) -> str:
    """Return, for each case, the signal to noise of the three products by every recipe: median row / worst row."""
    blocks = []
    for (case,), rows in _grouped(result.rows, "case").items():
        body = [(row["recipe"], *(_stress_cell(row, name) for name in ("y", "dx", "dw"))) for row in rows]
        blocks.append(f"**{case}**\n\n{table(('recipe', 'Y', 'dX', 'dW'), body)}")
    return "\n\n".join(blocks)


def _stress_cell(row: Row, name: str) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    if f"{name}_worst_db" not in row:
        return "not finite"
    return f"{row[f'{name}_median_db']:.1f} / {row[f'{name}_worst_db']:.1f} dB"


KERNEL_COLUMNS = (
    ("ms", "ms", "{:.3f}"),
    ("passes", "passes", "{}"),
    ("GB/s", "gb_per_s", "{:,.0f}"),
    ("of a copy's", "ratio_to_copy", "{:.2f}"),
)


def kernels(result: Result) -> str:
    """Return one line a kernel and shape: time, and the bytes it must move against those of a copy."""
    return _figures(("kernel", "shape"), KERNEL_COLUMNS, result.rows)


OPTIMIZER_COLUMNS = (
    ("bytes a parameter", "bytes_per_parameter", "{:.2f}"),
    ("ms", "ms", "{:.2f}"),
    ("of fused AdamW's time", "ratio_to_fused_adamw", "{:.2f}"),
    ("ms with clipping", "ms_clipped", "{:.2f}"),
    ("GB/s", "gb_per_s", "{:,.0f}"),
    ("of a copy's", "ratio_to_copy", "{:.2f}"),
    ("update error, dB", "update_error_db", "{:.1f}"),
    ("held-out loss", "heldout_loss", "{:.4f}"),
)


def optimizer(result: Result) -> str:
    """Return one line a tier and dtype of the weight: bytes, time, and the rate of what it must read and write."""
    return _figures(("states", "weight", "gradient"), OPTIMIZER_COLUMNS, result.rows)


def ablation(result: Result) -> str:
    """Return one line a choice of storage: held-out loss of each seed, or that it diverged, and the gap to FP32."""
    seeds = sorted({row["seed"] for row in result.rows})
    losses = {(row["states"], row["seed"]): row.get("heldout_loss", math.nan) for row in result.rows}
    first = result.rows[0]["states"]
    body = []
    for (states,), rows in _grouped(result.rows, "states").items():
        found = [losses.get((states, seed), math.nan) for seed in seeds]
        gap = fmean(loss - losses[first, seed] for loss, seed in zip(found, seeds, strict=True))
        cells = [f"{loss:.4f}" if math.isfinite(loss) else "diverged" for loss in found]
        body.append((states, rows[0].get("about", ""), *cells, f"{gap:+.4f}" if math.isfinite(gap) else ""))
    return table(("states", "storage", *(f"seed {seed}" for seed in seeds), f"gap to {first}"), body)


def memory(result: Result) -> str:
    """Return one line a workload and case: parameters, measured and predicted peak, and the forecast by kind."""
    header = ("workload", "trained as", "parameters", "peak GiB", "predicted", "error", "less than the first", *KINDS)
    body = []
    for (workload,), rows in _grouped(result.rows, "workload").items():
        first = next((row["peak_gib"] for row in rows if "error" not in row), None)
        body += [(workload, row["implementation"], *_memory_cells(row, first)) for row in rows]
    return table(header, body)


def _memory_cells(row: Row, first: float | None) -> list[str]:
    if "error" in row or first is None:
        return ["", "failed", f"{row['predicted_gib']:.2f}" if "predicted_gib" in row else "", *[""] * (2 + len(KINDS))]
    error = row["predicted_gib"] / row["peak_gib"] - 1
    less = f"{1 - row['peak_gib'] / first:.0%}" if "largest" not in row["workload"] else ""
    kinds = [f"{row[f'{kind}_gib']:.2f}" if f"{kind}_gib" in row else "" for kind in KINDS]
    size = f"{row['parameters'] / 1e9:.2f} B" if "parameters" in row else ""
    return [size, f"{row['peak_gib']:.2f}", f"{row['predicted_gib']:.2f}", f"{error:+.1%}", less, *kinds]


def telemetry(result: Result) -> str:
    """Return one line a workload: what telemetry of every tensor adds to a step."""
    header = ("workload", "tokens", "tensors", "ms without", "ms with", "overhead", "range over rounds")
    rows = [
        (
            row["workload"],
            f"{row['tokens']:,}",
            str(row["tensors"]),
            f"{row['ms']:.2f}",
            f"{row['ms_watched']:.2f}",
            f"{row['overhead_percent']:+.2f} %",
            f"{row['spread_percent']:.2f} %",
        )
        for row in result.rows
    ]
    return table(header, rows)


def reduce(result: Result) -> str:
    """Return one line a scheme and collective: the error on each kind of gradient, time, and bytes sent for a value."""
    kinds = list(dict.fromkeys(row["gradient"] for row in result.rows))
    header = ["ranks", "collective", "scheme", *(f"dB, {kind}" for kind in kinds), *(f"bias, {kind}" for kind in kinds)]
    body = []
    for (ranks, collective, scheme), rows in _grouped(result.rows, "ranks", "collective", "scheme").items():
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


FLOOR, DECADE = 1e-3, 16
"""Nats where the bars of `ablation_figure` begin, and the characters that each factor of ten has."""


def ablation_figure(result: Result) -> str:
    """Return the gaps to FP32 as bars on a logarithmic scale: of each choice the mean, and the range of its seeds."""
    exact = {row["seed"]: row["heldout_loss"] for row in result.rows if row["states"] == result.rows[0]["states"]}
    groups = _grouped(result.rows[len(exact) :], "states")
    width = max(len(states) for (states,) in groups)
    lines = [f"{'':{width}}  held-out loss above FP32's, nats; {DECADE} characters are a factor of ten, from {FLOOR}"]
    for (states,), rows in groups.items():
        gaps = [row["heldout_loss"] - exact[row["seed"]] for row in rows if "heldout_loss" in row]
        if len(gaps) < len(rows):
            failed = f"diverged: {len(rows) - len(gaps)} of {len(rows)} seeds"
            lines.append(f"{states:{width}}  {'x' * 3 * DECADE} {failed}")
            continue
        gap = fmean(gaps)
        bar = "█" * round(DECADE * math.log10(max(gap / FLOOR, 1.0)))
        lines.append(f"{states:{width}}  {bar}{' ' if bar else ''}{gap:+.4f}  ({min(gaps):+.4f} to {max(gaps):+.4f})")
    return "\n".join(("```text", *lines, "```"))


def _grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


MEASURED: dict[str, tuple[str, Callable[[Result], str]]] = {
    "demo": ("demo", demo),
    "parity": ("parity", parity),
    "stress": ("stress", stress),
    "step": ("step", step),
    "step-summary": ("step", step_summary),
    "gemm": ("gemm", gemm),
    "kernels": ("kernels", kernels),
    "optimizer": ("optimizer", optimizer),
    "memory": ("memory", memory),
    "ablation": ("ablation", ablation),
    "ablation-figure": ("ablation", ablation_figure),
    "reduce": ("reduce", reduce),
    "telemetry": ("telemetry", telemetry),
}
"""Tables of measurements: the kind whose newest result they show, and what shows it."""

COMBINED: dict[str, Callable[[Path], str]] = {"choice": choice, **scaling_tables.TABLES}
"""Tables made of several kinds of results, from their directory."""


def render(name: str, directory: Path) -> str:
    """Return the table called `name`; measured ones come from the results under `directory`.

    Raises:
        ConfigError: there is no such table, or a result file is invalid.
    """
    if name in facts.TABLES:
        return facts.TABLES[name]()
    if name in COMBINED:
        return COMBINED[name](directory) or NOT_MEASURED
    if name not in MEASURED:
        known = (*MEASURED, *COMBINED, *facts.TABLES)
        raise ConfigError(f"unknown table '{name}'.{did_you_mean(name, known)} Tables: {', '.join(known)}.")
    kind, show = MEASURED[name]
    result = results.latest(kind, directory)
    if result is None:
        return NOT_MEASURED
    software = ", ".join(f"{key} {value}" for key, value in result.versions.items())
    origin = f"Measured on {result.hardware} ({software}) with `{result.command}`: `{result.file_name}`."
    return f"{show(result)}\n\n{origin}"


def fill(text: str, directory: Path, where: str) -> str:
    """Return the page `text` with every table between markers written again; `where` names it in errors.

    Raises:
        ConfigError: a table that does not end, an end without a table, or an unknown table.
    """
    lines: list[str] = []
    open_table: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        mark = MARK.match(line)
        if mark is None:
            lines += [] if open_table else [line]
            continue
        if bool(mark["end"]) != bool(open_table):
            problem = f"'{open_table}' has no end before this line" if open_table else "ends a table that never began"
            raise ConfigError(f"{where}:{number}: {line}: {problem}.")
        lines.append(f"{render(open_table, directory)}\n{line}" if open_table else line)
        open_table = mark["name"]
    if open_table:
        raise ConfigError(f"{where}: the table '{open_table}' has no `<!-- end -->`.")
    return "\n".join(lines) + "\n"


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages of the repository at `root` that may hold tables."""
    named = [root / "README.md", root / "benchmarks" / "README.md"]
    return [page for page in (*named, *sorted((root / "docs").rglob("*.md"))) if page.is_file()]


def outdated(root: Path) -> dict[Path, str]:
    """Return the pages whose tables are not current, each with the text it should have."""
    directory = root / "benchmarks" / "results"
    texts = {page: page.read_text(encoding="utf-8") for page in pages(root)}
    current = {page: fill(text, directory, str(page.relative_to(root))) for page, text in texts.items()}
    return {page: text for page, text in current.items() if text != texts[page]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or only check them. Returns the exit code: 0 all current, 1 not."""
    parser = argparse.ArgumentParser(prog="python -m octavo.bench.tables", description="Write the generated tables.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is not current")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository (default: here)")
    options = parser.parse_args(arguments)
    try:
        stale = outdated(options.root)
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for page, text in stale.items():
        if not options.check:
            page.write_text(text, encoding="utf-8")
        print(f"{page}: {'not current; run python -m octavo.bench.tables' if options.check else 'written'}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
