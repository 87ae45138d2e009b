"""A pilot as text, as JSON, and as one HTML file with plots, which needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo._util.terminal import columns, quantity
from octavo.lab.monitor.dashboard import page
from octavo.lab.monitor.store.writer import plain
from octavo.lab.pilot.judging import Pilot, advise, shown_gap

_COLUMNS: dict[str, tuple[str, str]] = {
    "step_ms": ("step ms", ".2f"),
    "tokens_per_s": ("{unit}s/s", ",.0f"),
    "tflops": ("TFLOP/s", ".0f"),
    "joules_per_token": ("J/{unit}", ".2e"),
    "pj_per_flop": ("pJ/FLOP", ".2f"),
    "peak_gib": ("peak GiB", ".2f"),
    "decode_ms": ("decode ms", ".2f"),
    "decode_batch_ms": ("batch decode ms", ".2f"),
}
"""Columns of the table: title and format of each field."""
Rows = list[tuple[str, ...]]


def to_dict(pilot: Pilot) -> dict[str, Any]:
    """Return everything as data of strict JSON, None for NaN and infinities: measurements and recommendation."""
    about = {key: value for key, value in vars(pilot).items() if key not in ("measured", "plans", "rates")}
    measured = [
        {
            **asdict(found),
            "speedup": round(pilot.speedup(name), 3),
            "speedups": {kind: round(ratio, 3) for kind, ratio in pilot.speedups(name).items()},
            "loss_gap_percent": pilot.gap(name),
        }
        for name, found in pilot.measured.items()
    ]
    chosen = {"adopts": pilot.adopts, "recipe": pilot.best, "advice": [advice._asdict() for advice in advise(pilot)]}
    plans = {name: json.loads(plan.to_json()) for name, plan in pilot.plans.items()}
    found: dict[str, Any] = plain({**about, "measured": measured, "recommendation": chosen, "plans": plans})
    return found


def to_text(pilot: Pilot) -> str:
    """Return the report for a terminal."""
    lines = [*_header(pilot), ""]
    for rows in (speed_rows(pilot), phase_rows(pilot)):
        lines += [*columns(rows, range(1, len(rows[0]))), ""] if len(rows) > 1 else []
    lines += [*_notes(pilot), "", "recommendation"]
    for advice in advise(pilot):
        lines += [
            f"  {advice.about}: {advice.decision}",
            f"    because       {advice.reason}",
            f"    changes with  {advice.changes}",
        ]
    return "\n".join(lines)


def to_html(pilot: Pilot, output: Path) -> Path:
    """Write the text of the report and plots as one file, and return its path.

    Raises:
        UnsupportedError: plotly is not installed.
    """
    script = page.safe_in_script(page.plotly().read_text("utf-8"))
    figures = list(_figures(pilot))
    plots = "".join(f'<div id="plot{number}"></div>' for number in range(len(figures)))
    drawn = page.safe_in_script(json.dumps(figures))
    call = "FIGURES.forEach((f, i) => Plotly.newPlot('plot' + i, f.data, f.layout, {responsive: true}))"
    body = [
        f"<h1>FP8 pilot: {html.escape(pilot.workload)}</h1>",
        f"<pre>{html.escape(to_text(pilot))}</pre>",
        plots,
        f"<script>{script}</script><script>const FIGURES = {drawn}; {call}</script>",
    ]
    head = f"<title>FP8 pilot</title><style>{_STYLE}</style>"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(f'<!doctype html><meta charset="utf-8">{head}{"".join(body)}', "utf-8")
    return output


_STYLE = "body{font:15px/1.5 system-ui;max-width:70em;margin:2em auto;padding:0 1em}pre{white-space:pre-wrap}"


def _header(pilot: Pilot) -> list[str]:
    size = (
        f"{pilot.parameters / 1e6:,.1f} M parameters, {pilot.samples} x {pilot.tokens // pilot.samples} {pilot.unit}s"
    )
    where = f"losses on {pilot.device}, times and memory predicted for {pilot.predicted_for.upper()}"
    return [f"{pilot.workload}: {size} per step, {pilot.data}", where if pilot.predicted_for else f"on {pilot.device}"]


def _notes(pilot: Pilot) -> Iterator[str]:
    """Yield notes on the tables."""
    if pilot.predicted_for:
        yield "not known on this machine: data loading, communication, energy, decoding, fallbacks"
    if pilot.elsewhere is None:
        also = ", nor time and memory on the GPU" if pilot.predicted_for else ""
        yield f"FLOPs are not known{also}: the model cannot be traced without values"
    else:
        yield f"{1 - pilot.elsewhere:.0%} of the FLOPs are in linear layers; the rest, such as attention, gains nothing"
    for name, found in pilot.measured.items():
        if found.failed:
            yield f"{name} failed: {found.failed}"
        if found.fallbacks:
            yield f"{name}: {quantity(len(found.fallbacks), 'GEMM')} fell back, first {found.fallbacks[0]}"


def speed_rows(pilot: Pilot) -> Rows:
    """Return the table of precisions: titles, then one row each; columns without a value are left out."""
    keys = [key for key in _COLUMNS if any(getattr(found, key) is not None for found in pilot.measured.values())]
    titles = ("precision", *(_COLUMNS[key][0].format(unit=pilot.unit) for key in keys), "speed", "loss", "gap to BF16")
    rows = [titles]
    for name, found in pilot.measured.items():
        gap = pilot.gap(name) if name != "bf16" else None
        said = "-" if gap is None else shown_gap(gap)
        loss = f"{found.losses[-1]:.4f}" if found.losses else "-"
        values = (_shown(getattr(found, key), _COLUMNS[key][1]) for key in keys)
        rows.append((name, *values, _shown(pilot.speedup(name) or None, ".2f"), loss, said))
    return rows


def phase_rows(pilot: Pilot) -> Rows:
    """Return the table of phases in milliseconds per step, with the speed-up of each for the recommended recipe."""
    names = [name for name, found in pilot.measured.items() if found.phases or found.parts]
    kinds = dict.fromkeys(kind for name in names for kind in pilot.measured[name].times)
    best = pilot.best if pilot.best in names else None
    gained = pilot.speedups(best) if best else {}
    rows: Rows = [("ms per step", *names, *(("speed-up",) if best else ()))]
    for kind in kinds:
        times = (_shown(pilot.measured[name].times.get(kind), ".2f") for name in names)
        rows.append((kind, *times, *((_shown(gained.get(kind), ".2f"),) if best else ())))
    return rows


def _shown(value: float | None, how: str) -> str:
    if value is None:
        return "-"
    return format(value, ".2g" if how == ".2f" and 0 < abs(value) < 0.1 else how)  # a small time is no 0.00


def _figures(pilot: Pilot) -> Iterator[dict[str, Any]]:
    """Yield plots as Plotly takes them: time by phase or kind, losses, errors per layer."""
    for title, field in (("Milliseconds per step, by phase", "phases"), ("By kind of kernel", "parts")):
        times = {name: ms for name, found in pilot.measured.items() if (ms := getattr(found, field))}
        kinds = dict.fromkeys(kind for ms in times.values() for kind in ms if kind not in ("idle", "communication"))
        bars = [
            {"type": "bar", "name": kind, "x": list(times), "y": [ms.get(kind) for ms in times.values()]}
            for kind in kinds
        ]
        if bars:
            yield {"data": bars, "layout": {"title": {"text": title}, "barmode": "stack"}}
    curves = [{"name": name, "y": found.losses} for name, found in pilot.measured.items() if found.losses]
    if curves:
        yield {"data": curves, "layout": {"title": {"text": "Loss by step, on the same batches"}}}
    errors = [
        {"type": "bar", "name": name, "x": list(found.layer_errors), "y": list(found.layer_errors.values())}
        for name, found in pilot.measured.items()
        if found.layer_errors
    ]
    if errors:
        yield {
            "data": errors,
            "layout": {"title": {"text": "Relative error of each layer's output"}, "barmode": "group"},
        }
