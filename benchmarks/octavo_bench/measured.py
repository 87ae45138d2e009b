"""The tables of measurements in README and docs, from results of one kind; `choice` from several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from statistics import fmean

from octavo.conversion import make_plan
from octavo.errors import ConfigError
from octavo.memory import KINDS
from octavo.monitor.gap import fluctuation
from octavo.train.evaluate import student
from octavo_bench import results
from octavo_bench.evidence import over_seeds
from octavo_bench.implementations import BF16
from octavo_bench.render import Table, by_columns, cell, figures, grouped, newest, table
from octavo_bench.results import Result, Row

# --- accuracy --------------------------------------------------------------------------------------------------------

DEMO = (
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
)


def demo(directory: Path) -> str:
    """Return one line per machine: the newest run of the demo."""
    found = results.latest_by_hardware("demo", directory)
    return "\n\n".join([demo_of(*found), *(result.origin for result in found)]) if found else ""


def demo_of(*found: Result) -> str:
    """Return the runs of results, with the time that each took and how far its gap fluctuated."""
    rows = []
    for row in (row for result in found for row in result.rows):
        more: Row = {}
        if "seconds" in row:
            more["minutes"] = "{:.0f} min {:02.0f} s".format(*divmod(row["seconds"], 60))
        if "history" in row:
            gaps = [line["gap_percent"] for line in row["history"] if "gap_percent" in line]
            more["fluctuation"] = fluctuation(gaps)
        rows.append(row | more)
    return figures(DEMO, rows, 9)


def faults(result: Result) -> str:
    """Return each fault: its cost if guardrails watch and act, when it was noted, and the cause that they found."""
    columns = (
        ("class", "{class}"),
        ("fault", "{fault}"),
        ("pace", "{pace}"),
        ("held-out loss, watched", "{watched_change:+.2f} %"),
        ("acted on", "{final_loss_change:+.2f} %"),
        ("noted after", "{after} steps"),
        ("rule", "{rule}"),
        ("cause found", "{cause}"),
        ("layer found", "{layer}"),
        ("right", "{right}"),
    )
    rows = []
    for row in _struck(result):
        found = (
            {"after": row["detected_step"] - row["struck_step"]} if "detected_step" in row else {"rule": "not noted"}
        )
        rows.append({**row, **found, "right": "yes" if row["is_attributed"] else f"no: {row.get('expected', '')}"})
    return figures(columns, rows, 3)


def faults_summary(result: Result) -> str:
    """Return in words how many faults were noted and attributed, what acting cost, and what was not seen."""
    rows = [row for row in _struck(result) if "costs" in row]
    if not rows:
        return "*Not measured yet on a trained model.*"
    noted = [row for row in rows if row.get("costs") and row["is_noted"]]
    expected = [(row, *row["expected"].partition(" ")[::2]) for row in noted]
    in_layer = [(row, layer) for row, _, layer in expected if layer]
    both = [row for row in rows if row.get("watched_change") is not None and row["final_loss_change"] is not None]
    worse = max((row["final_loss_change"] - row["watched_change"] for row in both), default=0.0)
    ended = sum(bool(row.get("ended_acting")) and not row["ended_watching"] for row in rows)
    unseen = [row["fault"] for row in rows if "detected_step" not in row]
    clean = [row for row in result.rows if "alarms" in row]
    return (
        f"Of {len(rows)} faults {sum(row.get('costs', False) for row in rows)} cost more than 1 % of the held-out loss,"
        f" or ended the run. {len(noted)} of these were noted within 20 steps; the cause was right in"
        f" {sum(row['cause'] == cause for row, cause, _ in expected)}, the layer in"
        f" {sum(row['layer'] == layer for row, layer in in_layer)} of the {len(in_layer)} that have one. Acting ended"
        f" {ended} runs that watching did not, and was at most {worse:.2f} % worse. Not seen:"
        f" {', '.join(unseen) or 'none'}. Clean: {sum(row['alarms'] for row in clean)} alarms in"
        f" {sum(row['steps'] for row in clean):,} steps over {len(clean)} configurations."
    )


def _struck(result: Result) -> list[Row]:
    return [row for row in result.rows if row["fault"] and "error" not in row]


finetune = by_columns(
    (
        ("trained", "{method}"),
        ("task", "{task}"),
        ("seed", "{seed}"),
        ("FP8", "{fp8:.1f} ± {fp8_error:.1f} %"),
        ("BF16", "{bf16:.1f} ± {bf16_error:.1f} %"),
        ("difference", "{difference:+z.1f} ± {difference_error:.1f} %"),
        ("held-out answers", "{samples}"),
    ),
    names=3,
)
robustness = by_columns(
    (("class", "{class}"), ("tried", "{tried}"), ("survived", "{survived}"), ("named", "{named}")),
    names=1,
)


def localize(result: Result) -> str:
    """Return the agreement of predicted and measured loss changes, for single layers and random maps."""
    columns = (
        ("workload", "{workload}"),
        ("recipe", "{recipe}"),
        ("maps", "{maps}"),
        ("count", "{count}"),
        ("tokens to predict", "{probe_tokens:,}"),
        ("tokens to measure", "{heldout_tokens:,}"),
        ("rank correlation", "{rank_correlation:.3f}"),
    )
    rows = [
        {key: value for key, value in row.items() if key != "error"} for row in result.rows
    ]  # there a standard error
    return figures(columns, [row | {"count": len(row["predicted"])} for row in rows], 3)


EVIDENCE = (
    ("95 % over sequences", "gap_95", "± {:.3f} %"),
    ("tokens to equal loss", "tokens_ratio", "{:.3f}"),
    ("speed at equal loss", "loss_matched_speedup", "{:.2f}"),
    ("gradient cosine, start", "cosine_start", "{:.4f}"),
    ("worst matrix", "cosine_layer_start", "{:.4f}"),
    ("gradient cosine, end", "cosine_end", "{:.4f}"),
    ("worst matrix", "cosine_layer_end", "{:.4f}"),
)
"""Title, key of the row, format of the mean over the seeds."""


def parity(result: Result) -> str:
    """Return, per model, the held-out loss of every recipe and seed, and the gap to BF16 of the same seeds."""
    return parity_of(result.rows)


def parity_of(rows: Sequence[Row]) -> str:
    """Return the same from the rows alone."""
    groups = grouped(rows, "model", "tokens").items()
    return "\n\n".join(_parity_of(f"{model}, {tokens:,} tokens", of_model) for (model, tokens), of_model in groups)


def _parity_of(title: str, rows: Sequence[Row]) -> str:
    by_recipe = {recipe: of_recipe for (recipe,), of_recipe in grouped(rows, "recipe").items()}
    losses = {recipe: _by_seed(of_recipe) for recipe, of_recipe in by_recipe.items()}
    for recipe, of_recipe in by_recipe.items():
        for (seed,), repeated in grouped(of_recipe, "seed").items():
            if len(repeated) > 1:
                raise ConfigError(f"result of kind 'parity': {title}: {recipe}, seed {seed} stands twice.")
    bf16, seeds = losses.get(BF16, {}), sorted({row["seed"] for row in rows})
    shown = [column for column in EVIDENCE if any(column[1] in row for row in rows)]
    body = [
        (
            recipe,
            *_cells(by_seed, seeds),
            *(("", "") if recipe == BF16 else _gap(by_seed, bf16)),
            *(_evidence(by_recipe[recipe], key, form) for _, key, form in shown),
        )
        for recipe, by_seed in losses.items()
    ]
    header = ("recipe", *_seeds(seeds), "gap to BF16", "95 % over seeds", *(title for title, *_ in shown))
    pairs = [len(by_seed.keys() & bf16.keys()) for recipe, by_seed in losses.items() if recipe != BF16]
    said = f"{_spread(list(bf16.values()))} {_meaning(pairs, [key for _, key, _ in shown])}".strip()
    return f"**{title}**: held-out loss, nats per token\n\n{table(header, body)}\n\n{said}"


def tiers(result: Result) -> str:
    """Return one line per tier of optimizer states: held-out loss of each seed, and the gap to FP32 states."""
    return tiers_of(result.rows)


def tiers_of(rows: Sequence[Row]) -> str:
    """Return the same from the rows alone."""
    parts = []
    for (model, tokens), of_model in grouped(rows, "model", "tokens").items():
        seeds, body = sorted({row["seed"] for row in of_model}), []
        for (states,), of_states in grouped(of_model, "states").items():
            beside = [f"{100 * row['gap'] / row['heldout_loss']:+z.2f} %" for row in of_states if "gap" in row]
            within = _evidence(of_states, "gap_95", "± {:.3f} %")
            body.append((states, *_cells(_by_seed(of_states), seeds), ", ".join(beside), within))
        header = ("states", *_seeds(seeds), "gap to fp32, by seed", "95 % over sequences")
        first = [row["heldout_loss"] for row in of_model if row["states"] == of_model[0]["states"]]
        apart = f"The {len(first)} seeds of `{of_model[0]['states']}` lie {max(first) - min(first):.4f} apart."
        title = f"**{model}, {tokens:,} tokens**: held-out loss, nats per token"
        parts += [title, table(header, body), *([apart] if len(first) > 1 else [])]
    return "\n\n".join(parts)


def data_parallel(result: Result) -> str:
    """Return one line per recipe, seed and number of ranks: held-out loss beside that of one rank, and FP8's gaps."""
    return data_parallel_of(result.rows)


SHARDED = (
    "recipe",
    "seed",
    "ranks",
    "one rank",
    "all ranks",
    "difference, 95 % over sequences",
    "gap to BF16, one rank",
    "gap to BF16, all ranks",
)


def data_parallel_of(rows: Sequence[Row]) -> str:
    """Return the same from the rows alone."""
    parts = []
    for (model, tokens), of_model in grouped(rows, "model", "tokens").items():
        losses = {(row["recipe"], row["seed"], row["ranks"]): row["heldout_loss"] for row in of_model}
        body = []
        for row in (row for row in of_model if row["ranks"] > 1):
            recipe, seed, ranks = row["recipe"], row["seed"], row["ranks"]
            alone = losses[recipe, seed, 1]
            within = f" ± {100 * row['gap_95'] / alone:.2f} %" if "gap_95" in row else ""
            difference = f"{100 * row['gap'] / alone:+z.2f} %{within}"
            gaps = ["" if recipe == BF16 else _beside_bf16(losses, recipe, seed, count) for count in (1, ranks)]
            figures = (f"{alone:.4f}", f"{row['heldout_loss']:.4f}", difference)
            body.append((recipe, str(seed), str(ranks), *figures, *gaps))
        parts += [f"**{model}, {tokens:,} tokens**: held-out loss, nats per token", table(SHARDED, body)]
    return "\n\n".join(parts)


def _beside_bf16(losses: Mapping[tuple[str, int, int], float], recipe: str, seed: int, ranks: int) -> str:
    bf16 = losses.get((BF16, seed, ranks))
    return "" if bf16 is None else f"{100 * (losses[recipe, seed, ranks] / bf16 - 1):+z.2f} %"


def _by_seed(rows: Sequence[Row]) -> dict[int, float]:
    return {row["seed"]: row["heldout_loss"] for row in rows}


def _seeds(seeds: Sequence[int]) -> list[str]:
    return [*(f"seed {seed}" for seed in seeds), "mean"]


def _cells(losses: Mapping[int, float], seeds: Sequence[int]) -> list[str]:
    """Return the cells under `_seeds`."""
    return [*(f"{losses[seed]:.4f}" if seed in losses else "" for seed in seeds), f"{fmean(losses.values()):.4f}"]


def _gap(losses: Mapping[int, float], bf16: Mapping[int, float]) -> tuple[str, str]:
    """Return the mean gap over the seeds that both have, and half of its interval."""
    gaps = [100 * (loss / bf16[seed] - 1) for seed, loss in losses.items() if seed in bf16]
    if not gaps:
        return "BF16 not measured", ""
    found = over_seeds(gaps)
    return f"{found.mean:+z.2f} %", "" if found.half_width is None else f"± {found.half_width:.2f} %"


def _evidence(rows: Sequence[Row], key: str, form: str) -> str:
    values = [row[key] * (100 / row["heldout_loss"] if key == "gap_95" else 1) for row in rows if key in row]
    return form.format(fmean(values)) if values else ""


def _meaning(pairs: Sequence[int], shown: Sequence[str]) -> str:
    """Return how to read the intervals and ratios; `pairs`: the numbers of seeds that recipes share with BF16."""
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
    lie = f"The {len(bf16)} BF16 seeds lie {max(bf16) - min(bf16):.4f} apart ({_spread_percent(bf16):.2f} %)"
    return f"{lie}: a gap inside that spread cannot be told from chance."


def _spread_percent(losses: Sequence[float]) -> float:
    return 100 * (max(losses) - min(losses)) / fmean(losses)


def stress(result: Result) -> str:
    """Return, per case, the signal to noise of the three products by recipe: median row / worst row."""
    blocks = []
    for (case,), rows in grouped(result.rows, "case").items():
        body = [(row["recipe"], *(_stress_cell(row, name) for name in ("y", "dx", "dw"))) for row in rows]
        blocks.append(f"**{case}**\n\n{table(('recipe', 'Y', 'dX', 'dW'), body)}")
    return "\n\n".join(blocks)


def _stress_cell(row: Row, name: str) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    return cell(f"{{{name}_median_db:.1f}} / {{{name}_worst_db:.1f}} dB", row) or "not finite"


# --- speed -----------------------------------------------------------------------------------------------------------

PEER = "torchao tensorwise"
SUMMARY = (
    ("implementation", "{implementation}"),
    ("ms", "{ms:.1f}"),
    ("times BF16's speed", "{ratio_to_bf16:.2f}"),
    (f"times {PEER}", "{ratio_to_peer:.2f}"),
    ("peak GiB", "{peak_gib:.1f}"),
)
PARTS = (
    ("GEMM ms", "{gemm_ms:.1f}"),
    ("attention ms", "{attention_ms:.1f}"),
    ("element-wise ms", "{elementwise_ms:.1f}"),
    ("optimizer ms", "{optimizer_ms:.1f}"),
    ("communication ms", "{communication_ms:.1f}"),
    ("idle ms", "{idle_ms:.1f}"),
)
LIMITS = (
    ("mJ per token", "{mj_per_token:.2f}"),
    ("of BF16's datasheet peak", "{mfu_bf16:.2f}"),
    ("fraction of floor", "{fraction_of_floor:.2f}"),
)


def step(result: Result) -> str:
    """Return, per workload, the time of every implementation and of its parts, and its peak memory."""
    return "\n\n".join(_step(rows) + _session(rows[0]) for rows in grouped(result.rows, "workload").values())


def _step(rows: Sequence[Row]) -> str:
    peer = next((row["ms"] for row in rows if row["implementation"] == PEER and "ms" in row), None)
    if peer is not None:
        rows = [row | {"ratio_to_peer": peer / row["ms"]} if "ms" in row else row for row in rows]
    peers = dict.fromkeys(row["package"] for row in rows if "package" in row)
    beside = f"; beside {' and '.join(peers)}" if peers else ""
    columns = (*SUMMARY[:-1], *PARTS, SUMMARY[-1], *LIMITS)
    return f"**{rows[0]['workload']}**{_shape(rows[0])}{beside}\n\n{figures(columns, rows)}"


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
    """Return the notes of a session from its baseline: the machine's own rates, and its drift."""
    said = []
    if "rates" in baseline:
        rates = baseline["rates"]
        tflops = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates["tflops"].items())
        said.append(
            f"The machine's own rates in this session: copy {rates['copy_gb_per_s']:,.0f} GB/s; GEMM TFLOP/s: {tflops}."
        )
    if "drift" in baseline:
        said.append(f"BF16, timed again at the end: {100 * baseline['drift']:+z.1f} % of its time.")
    return "\n\n" + " ".join(said) if said else ""


def gemm(result: Result) -> str:
    """Return one table: a line per shape, a column per kernel; TFLOP/s, and times BF16's in brackets."""
    keys = ("kernel", "operands", "accumulate")
    columns = grouped(result.rows, *keys)
    titles = ("BF16" if kernel == BF16 else f"{scales}, {sums}: `{kernel}`" for kernel, scales, sums in columns)
    body = []
    for (shape,), rows in grouped(result.rows, "shape").items():
        cells = {key: _gemm_cell(of_kernel[0]) for key, of_kernel in grouped(rows, *keys).items()}
        body.append((shape.replace("x", " x "), *(cells.get(column, "") for column in columns)))
    return table(("M x N x K", *titles), body)


def _gemm_cell(row: Row) -> str:
    if "error" in row:
        return f"failed: {row['error']}"
    return f"{row['tflops']:,.0f}" + ("" if row["kernel"] == BF16 else f" ({row['ratio_to_bf16']:.2f})")


kernels = by_columns(
    (
        ("kernel", "{kernel}"),
        ("shape", "{shape}"),
        ("ms", "{ms:.3f}"),
        ("passes", "{passes}"),
        ("GB/s", "{gb_per_s:,.0f}"),
        ("of a copy's", "{ratio_to_copy:.2f}"),
    ),
    names=2,
)

host = by_columns(
    (
        ("implementation", "{implementation}"),
        ("mode", "{mode}"),
        ("host ms per block", "{ms_per_block:.2f}"),
        ("GPU ms per block", "{gpu_ms_per_block:.2f}"),
        ("launches per block", "{launches_per_block:.1f}"),
        ("copies per block", "{copies_per_block:.1f}"),
        ("compiled pieces per block", "{pieces_per_block:.1f}"),
    ),
    names=2,
)

hf = by_columns(
    (
        ("model", "{model}"),
        ("mode", "{mode}"),
        ("implementation", "{implementation}"),
        ("tokens/s", "{tokens_per_s:,.0f}"),
        ("times BF16's speed", "{ratio_to_bf16:.2f}"),
        ("peak GiB", "{peak_gib:.1f}"),
    ),
    names=3,
)

CLIENTS = (
    ("client", "{client}"),
    ("of", "{library} {version}"),
    ("lines", "{lines}"),
    ("layers in FP8", "{fp8_layers}"),
    ("loss beside BF16's", "{gap_percent:+z.2f} %"),
    ("resumed", "{resumed}"),
    ("graphs (BF16's)", "{graphs} ({bf16_graphs})"),
    ("graph breaks", "{graph_breaks}"),
)


def clients(directory: Path) -> str:
    """Return one line per client, from the result of a CPU where there is one, and the speed on each GPU."""
    found = results.latest_by_hardware("clients", directory)
    gpus = [result for result in found if result.hardware.startswith("nvidia")]
    rows: dict[str, Row] = {}
    for result in sorted(found, key=gpus.__contains__):  # those of a CPU first
        for row in result.rows:
            told = {None: "", True: "to the bit", False: "otherwise"}[row.get("resumes")]
            rows.setdefault(row["client"], {**row, "resumed": told})
            if result in gpus and "error" not in row:
                rows[row["client"]][result.hardware] = f"{row['ratio_to_bf16']:.2f}"
    speeds = [(f"times BF16's speed, {gpu.hardware}", f"{{{gpu.hardware}}}") for gpu in gpus]
    parts = [figures((*CLIENTS, *speeds), list(rows.values()), 2)] if rows else []
    return "\n\n".join([*parts, *(result.origin for result in found)])


PILOT = (
    ("model", "{model}"),
    ("seconds", "{seconds:.0f}"),
    ("recommended", "{recommended}"),
    ("speed-up expected", "{speedup:.2f}"),
    ("full measurement, times BF16's speed", "{measured}"),
    ("right", "{verdict}"),
)


def pilot(result: Result) -> str:
    """Return one line per model: the recommendation of a pilot of a few steps, and the full measurement."""
    rows = []
    for row in result.rows:
        if "error" not in row:
            full = ", ".join(f"`{name}` {speed:.2f}" for name, speed in row["full"].items())
            row = row | {"measured": full, "verdict": "yes" if row["right"] else "no"}
            row["recommended"] = f"`{row['recipe']}`" if row["adopts"] else "not yet"
        rows.append(row)
    return figures(PILOT, rows)


TELEMETRY = (
    ("workload", "{workload}"),
    ("on", "{device}"),
    ("tokens", "{tokens:,}"),
    ("tensors", "{tensors}"),
    ("ms without", "{ms:.2f}"),
    ("ms with", "{ms_watched:.2f}"),
    ("overhead", "{overhead_percent:+z.2f} %"),
    ("95 % interval", "{low_percent:+z.2f} to {high_percent:+z.2f} %"),
    ("own code", "{own_percent:.2f} %"),
)


def telemetry(directory: Path) -> str:
    """Return one line per workload, machine by machine: the cost of telemetry of every tensor in a step."""
    found = results.latest_by_hardware("telemetry", directory)
    shown = ((figures(TELEMETRY, result.rows, len(TELEMETRY)), result.origin) for result in found)
    return "\n\n".join(part for parts in shown for part in parts)


# --- memory ----------------------------------------------------------------------------------------------------------

optimizer = by_columns(
    (
        ("states", "{states}"),
        ("weight", "{weight}"),
        ("gradient", "{gradient}"),
        ("bytes per parameter", "{bytes_per_parameter:.2f}"),
        ("ms", "{ms:.2f}"),
        ("of fused AdamW's time", "{ratio_to_fused_adamw:.2f}"),
        ("ms with clipping", "{ms_clipped:.2f}"),
        ("GB/s", "{gb_per_s:,.0f}"),
        ("of a copy's", "{ratio_to_copy:.2f}"),
        ("update error, dB", "{update_error_db:.1f}"),
        ("held-out loss", "{heldout_loss:.4f}"),
    ),
    names=3,
)


def ablation(result: Result) -> str:
    """Return one line per choice of storage: held-out loss of each seed, or that it diverged, and the gap to FP32."""
    seeds = sorted({row["seed"] for row in result.rows})
    losses = {(row["states"], row["seed"]): row.get("heldout_loss", math.nan) for row in result.rows}
    first = result.rows[0]["states"]
    body = []
    for (states,), rows in grouped(result.rows, "states").items():
        found = [losses.get((states, seed), math.nan) for seed in seeds]
        gap = fmean(loss - losses[first, seed] for loss, seed in zip(found, seeds, strict=True))
        cells = [f"{loss:.4f}" if math.isfinite(loss) else "diverged" for loss in found]
        body.append((states, rows[0].get("about", ""), *cells, f"{gap:+z.4f}" if math.isfinite(gap) else ""))
    return table(("states", "storage", *(f"seed {seed}" for seed in seeds), f"gap to {first}"), body)


FLOOR, DECADE = 1e-3, 16
"""Nats where the bars of `ablation_figure` begin, and characters per factor of ten."""


def ablation_figure(result: Result) -> str:
    """Return the gaps to FP32 as bars on a logarithmic scale: of each choice the mean, and the range of its seeds."""
    exact = {row["seed"]: row["heldout_loss"] for row in result.rows if row["states"] == result.rows[0]["states"]}
    groups = grouped(result.rows[len(exact) :], "states")
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
        lines.append(
            f"{states:{width}}  {bar}{' ' if bar else ''}{gap:+z.4f}  ({min(gaps):+z.4f} to {max(gaps):+z.4f})"
        )
    return "\n".join(("```text", *lines, "```"))


MEMORY = (
    ("workload", "{workload}"),
    ("trained as", "{implementation}"),
    ("parameters", "{billions:.2f} B"),
    ("peak GiB", "{peak}"),
    ("predicted", "{predicted_gib:.2f}"),
    ("error", "{off:+z.1%}"),
    ("less than the first", "{less:.0%}"),
)


def memory(result: Result) -> str:
    """Return one line per workload and case: parameters, measured and predicted peak, and the forecast by kind."""
    columns, shown = (*MEMORY, *((kind, f"{{{kind}_gib:.2f}}") for kind in KINDS)), list[Row]()
    for rows in grouped(result.rows, "workload").values():
        first = next((row["peak_gib"] for row in rows if "error" not in row), None)
        for row in rows:
            about = {key: row[key] for key in ("workload", "implementation", "predicted_gib") if key in row}
            if "error" in row or first is None:
                shown.append(about | {"peak": "failed"})
                continue
            found = row | {"peak": f"{row['peak_gib']:.2f}", "off": row["predicted_gib"] / row["peak_gib"] - 1}
            found |= {"billions": row["parameters"] / 1e9} if "parameters" in row else {}
            shown.append(found | ({} if "largest" in row["workload"] else {"less": 1 - row["peak_gib"] / first}))
    return figures(columns, shown, len(columns))


# --- several GPUs ----------------------------------------------------------------------------------------------------

DISTRIBUTED = (
    ("layout", "{layout}"),
    ("implementation", "{implementation}"),
    ("tokens/s/GPU", "{tokens_per_s_per_gpu:,.0f}"),
    ("times BF16's speed", "{ratio_to_bf16:.2f}"),
    ("with a wait after each step", "{waited_ratio:.2f}"),
    ("peak GiB", "{peak_gib:.1f}"),
    ("GB on the wire", "{wire_gb:.1f}"),
    ("memory", "{less_memory:+z.0f} %"),
    ("wire", "{less_wire:+z.0f} %"),
    ("last loss", "{last_loss:.4f}"),
)


def distributed(result: Result) -> str:
    """Return one line per layout and implementation: speed, memory, bytes on the wire, loss, beside BF16."""
    return "\n\n".join(_of_workload(rows) for rows in grouped(result.rows, "workload", "ranks").values())


def _of_workload(rows: Sequence[Row]) -> str:
    shown = []
    for of_layout in grouped(rows, "layout").values():
        first = None
        for row in of_layout:
            if row["implementation"] == BF16:  # of this run: there may be several
                first = None if "error" in row else row
            shown.append(_beside(row, first))
    row = rows[0]
    how = "blocks compiled" if row["compiled"] else "eager"
    setting = f"{row['ranks']} GPUs, sequences of {row['shape']['sequence']:,} tokens, {how}"
    return f"**{row['workload']}**, {_model(row)}: {setting}\n\n{figures(DISTRIBUTED, shown, 2, every=True)}"


def _beside(row: Row, first: Row | None) -> Row:
    """Return a row with its figures in units of BF16's."""
    if "error" in row or first is None:
        return row
    more = {"wire_gb": row["wire_bytes"] / 1e9, "last_loss": row["losses"][-1]}
    if "waited_ms" in row:
        more["waited_ratio"] = first["waited_ms"] / row["waited_ms"]
    if row is not first:
        for name, key in (("less_memory", "peak_gib"), ("less_wire", "wire_bytes")):
            more |= {name: 100 * (row[key] / first[key] - 1)} if first[key] else {}
    return row | more


def _model(row: Row) -> str:
    shape = row["shape"]
    return f"{shape['layers']} layers, dim {shape['dim']:,}, vocabulary {shape['vocab']:,}"


RANK = (
    ("ranks", "{ranks}"),
    ("layout", "{layout}"),
    ("implementation", "{implementation}"),
    *SUMMARY[1:3],
    *PARTS,
    SUMMARY[-1],
)


def rank(result: Result) -> str:
    """Return one line per implementation and number of ranks: a step of one rank alone, and its parts."""
    groups = grouped(result.rows, "workload").values()
    return "\n\n".join(
        f"**{rows[0]['workload']}**, {_model(rows[0])}\n\n{figures(RANK, rows, names=3)}" for rows in groups
    )


def reduce(result: Result) -> str:
    """Return one line per scheme and collective: the error on each kind of gradient, time, and bytes sent per value."""
    kinds = list(dict.fromkeys(row["gradient"] for row in result.rows))
    header = ["ranks", "collective", "scheme", *(f"dB, {kind}" for kind in kinds), *(f"bias, {kind}" for kind in kinds)]
    body = []
    for (ranks, collective, scheme), rows in grouped(result.rows, "ranks", "collective", "scheme").items():
        by_kind = {row["gradient"]: row for row in rows if "error" not in row}
        decibels = [cell("{snr_db:.1f}", by_kind.get(kind, {})) or "failed" for kind in kinds]
        bias = [cell("{bias_percent:+z.3f} %", by_kind.get(kind, {})) for kind in kinds]
        any_row = next(iter(by_kind.values()), None)
        cost = (f"{any_row['ms']:.3f}", _sent(any_row)) if any_row else ("", "")
        body.append((str(ranks), collective, scheme, *decibels, *bias, *cost))
    return table((*header, "ms", "bytes sent a value"), body)


def _sent(row: Row) -> str:
    across = f", {row['across_bytes'] / row['elements']:.2f} of them across hosts" if "across_bytes" in row else ""
    return f"{row['wire_bytes'] / row['elements']:.2f}{across}"


moe = by_columns(
    (
        ("workload", "{workload}"),
        ("implementation", "{implementation}"),
        ("ms", "{ms:.2f}"),
        ("BF16 / this", "{ratio_to_bf16:.2f}"),
        ("activations kept, MiB", "{kept_mib:.0f}"),
        ("weight codes kept, MiB", "{kept_weight_codes_mib:.0f}"),
    ),
    names=2,
)


# --- the choice of a recipe ------------------------------------------------------------------------------------------

DEFAULT: str = signature(make_plan).parameters["recipe"].default
"""The default recipe of `octavo.convert`."""
WORKLOAD = "llama-8b-stack"
CHOICE = (
    ("recipe", "{named}"),
    ("gap to BF16, held-out", "{gap:+z.2f} %"),
    ("inside BF16's seed spread", "{inside}"),
    ("times BF16's speed", "{ratio_to_bf16:.2f}"),
    ("peak GiB", "{peak_gib:.1f}"),
    ("noisiest median row under stress", "{lowest:.1f} dB"),
)


def choice(directory: Path) -> str:
    """Return the table of the recipes that were trained to compare them, and the conclusion.

    The gap is that of the largest model, speed and memory those of the stack of 8B blocks; under stress it is the
    lowest signal to noise of the median row of a product in any case.

    Args:
        directory: of the results.
    """
    trained = _largest(_rows("parity", directory))
    bf16 = _by_seed([row for row in trained if row["recipe"] == BF16])
    if len(bf16) < 2:
        return ""
    spread = _spread_percent(list(bf16.values()))
    steps = [row for result in reversed(results.history("step", directory)) for row in result.rows]
    timed = {row["implementation"]: row for row in steps if row["workload"] == WORKLOAD}  # the newest of each
    rows = []
    for (recipe,), of_recipe in grouped(trained, "recipe").items():
        gaps = [100 * (loss / bf16[seed] - 1) for seed, loss in _by_seed(of_recipe).items() if seed in bf16]
        if recipe == BF16 or not gaps:
            continue
        row = {"recipe": recipe, "named": f"`{recipe}`" + (" (default)" if recipe == DEFAULT else "")}
        row |= {"gap": fmean(gaps), "inside": "yes" if abs(fmean(gaps)) <= spread else "no"}
        stressed = [row for row in _rows("stress", directory) if row["recipe"] == recipe]
        noise = [value for row in stressed for key, value in row.items() if key.endswith("_median_db")]
        speed = {k: v for k, v in timed.get(f"octavo {recipe}", {}).items() if k in ("ratio_to_bf16", "peak_gib")}
        rows.append(row | speed | ({"lowest": min(noise)} if noise else {}))
    return f"{figures(CHOICE, rows, every=True)}\n\n{_conclusion(rows, spread, trained[0], len(bf16))}"


def _conclusion(rows: Sequence[Row], spread: float, run: Row, seeds: int) -> str:
    inside = [row for row in rows if row["inside"] == "yes"]
    names = [row["recipe"] for row in inside]
    fastest = max((row for row in inside if row.get("ratio_to_bf16")), key=lambda r: r["ratio_to_bf16"], default=None)
    said = [
        f"{run['model']}, {run['tokens']:,} tokens; {seeds} BF16 seeds lie {spread:.2f} % apart."
        f" Inside that spread: {', '.join(f'`{name}`' for name in names) or 'none'}."
    ]
    if fastest is not None:
        said.append(f"The fastest of them is `{fastest['recipe']}`.")
    if DEFAULT in [row["recipe"] for row in rows] and DEFAULT not in names:
        said.append(f"The default, `{DEFAULT}`, is outside.")
    return " ".join(said)


def _rows(kind: str, directory: Path) -> Sequence[Row]:
    result = results.latest(kind, directory)
    return () if result is None else result.rows


def _largest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the model with the longest BF16 steps: the largest."""
    times = {row["model"]: row.get("step_ms", 0.0) for row in rows if row["recipe"] == BF16}
    return [row for row in rows if times and row["model"] == max(times, key=lambda model: times[model])]


TABLES: dict[str, Table] = {
    "parity": newest("parity", parity),
    "data-parallel": newest("data-parallel", data_parallel),
    "tiers": newest("tiers", tiers),
    "stress": newest("stress", stress),
    "faults": newest("faults", faults),
    "robustness": newest("robustness", robustness),
    "finetune": newest("finetune", finetune),
    "faults-summary": newest("faults", faults_summary),
    "localize": newest("localize", localize),
    "step": newest("step", step),
    "host": newest("host", host),
    "hf": newest("hf", hf),
    "pilot": newest("pilot", pilot),
    "gemm": newest("gemm", gemm),
    "kernels": newest("kernels", kernels),
    "moe": newest("moe", moe),
    "optimizer": newest("optimizer", optimizer),
    "memory": newest("memory", memory),
    "ablation": newest("ablation", ablation),
    "ablation-figure": newest("ablation", ablation_figure),
    "distributed": newest("distributed", distributed),
    "rank": newest("rank", rank),
    "reduce": newest("reduce", reduce),
    "choice": choice,
    "clients": clients,
    "demo": demo,
    "telemetry": telemetry,
}
"""By name. A new one is a function above and a line here."""
