"""Tables of a result of kind `scaling`: steps as bars, figures, bytes on the wire, assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from octavo.lab.cli.flags import field_docs
from octavo_bench import results
from octavo_bench.assumptions import PEER, Assumptions, Scheme
from octavo_bench.kind import Kind, by_result
from octavo_bench.layouts import Layout
from octavo_bench.render import figures, grouped, table
from octavo_bench.results import Row

CHECK = ("8B", 4, 4 * 8192, Layout(tensor=1, stages=1, shard=4, replicas=1, sequences=1))
"""The measured point: model, GPUs, tokens, and layout."""
CHECKED_BY = ("llama-3-8b", "data")
"""Workload and layout of its rows of kind `distributed`."""
WIDTH = 50
"""Characters of the longest bar."""


def bars(rows: Sequence[Row]) -> str:
    """Return, for each model, a bar per scheme and number of GPUs: the GPU time of a step by part."""
    drawn = "\n\n".join(_bars(model, own) for (model,), own in grouped(_points(rows), "model").items())
    legend = "█ GEMMs, attention and all else that computes   ░ pipeline bubble   ▒ communication that is not hidden"
    return f"```text\n{drawn}\n\n{legend}\n```"


def _bars(model: str, rows: Sequence[Row]) -> str:
    longest = max((row["ms"] * row["gpus"] for row in rows if "ms" in row), default=1.0)
    lines = [f"{model}: GPU time of a step, all GPUs together"]
    for row in rows:
        name = f"{row['gpus']:>5}  {row['scheme']:<15}"
        if "error" in row:
            lines.append(f"{name} {row['error']}")
            continue
        scale = WIDTH * row["gpus"] / longest
        ends = [0.0]
        for part in ("compute_ms", "bubble_ms", "exposed_ms"):
            ends.append(ends[-1] + row[part] * scale)
        parts = zip("█░▒", ends, ends[1:], strict=False)
        lines.append(f"{name} {''.join(mark * (round(end) - round(start)) for mark, start, end in parts)}")
    return "\n".join(lines)


COLUMNS = (
    ("model", "{model}"),
    ("GPUs", "{gpus}"),
    ("scheme", "{scheme}"),
    ("layout", "{layout}"),
    ("ms", "{ms:,.0f}"),
    ("computing", "{compute_ms:,.0f}"),
    ("bubble", "{bubble_ms:,.0f}"),
    ("communicating", "{communication_ms:,.0f}"),
    ("of it not hidden", "{exposed_ms:,.0f}"),
    ("tokens/s/GPU", "{tokens_per_s_per_gpu:,.0f}"),
    ("times BF16's speed", "{ratio_to_bf16:.2f}"),
    ("in BF16's layout", "{ratio_in_its_layout:.2f}"),
    ("peak GiB", "{peak_gib:.0f}"),
)


def fastest(rows: Sequence[Row]) -> str:
    """Return, for each model, a line per scheme and number of GPUs: the fastest layout that fits, and its figures."""
    return "\n\n".join(
        f"**{model}**, {own[0]['batch_tokens']:,} tokens per step\n\n{figures(COLUMNS[1:], own, 2, every=True)}"
        for (model,), own in grouped(_points(rows), "model").items()
    )


def wire(rows: Sequence[Row]) -> str:
    """Return the GB sent per GPU and step at the 4-GPU point, by scheme, and relative to BF16's."""
    checked, schemes, body = _checked(rows), _assumed(rows)["schemes"], list[Sequence[str]]()
    if not checked:
        return ""
    peer = next(row for row in checked if row["scheme"] == PEER)
    for row in checked:
        sent = row["sent_gb"]
        less = f"{100 * (row['wire_gb'] / peer['wire_gb'] - 1):+z.0f} %" if row is not peer else ""
        numbers = (f"{sent['weights']:.1f}", f"{sent['gradients']:.1f}", f"{row['wire_gb']:.1f}")
        body.append((row["scheme"], schemes[row["scheme"]]["about"], *numbers, less))
    header = ("scheme", "what it is", "weights, GB", "gradients, GB", "both", f"against `{PEER}`")
    return table(header, body)


def check(directory: Path) -> str:
    """Return the computed 4-GPU point, beside results of kind `distributed` of one machine."""
    machines: dict[str, dict[str, Row]] = {}
    for result in results.newest("distributed", directory):
        for row in result.rows:
            if (row["workload"], row["layout"], row["ranks"]) == (*CHECKED_BY, CHECK[1]) and "error" not in row:
                machines.setdefault(result.hardware, {}).setdefault(row["implementation"], row)
    return by_result("scaling", partial(_beside_measured, machines))(directory)


def _beside_measured(machines: Mapping[str, Mapping[str, Row]], rows: Sequence[Row]) -> str:
    """Return the table for the machine with the most measured schemes; rows of different machines are incomparable."""
    checked, schemes, body = _checked(rows), _assumed(rows)["schemes"], list[Sequence[str]]()
    if not checked:
        return ""
    names = {schemes[row["scheme"]]["measured_as"] for row in checked}
    machine = max(machines, key=lambda name: len(names & machines[name].keys()), default=None)
    measured = {} if machine is None else machines[machine]
    for row in checked:
        real = measured.get(schemes[row["scheme"]]["measured_as"], {})
        pairs = [("tokens_per_s_per_gpu", "{:,.0f}"), ("ratio_to_bf16", "{:.2f}"), ("peak_gib", "{:.1f}")]
        cells = [(form.format(row[key]), form.format(real[key]) if key in real else "") for key, form in pairs]
        body.append((row["scheme"], *(cell for pair in cells for cell in pair)))
    titles = ("tokens/s/GPU", "times BF16's speed", "peak GiB")
    header = ("scheme", *(name for title in titles for name in (f"{title}, computed", "measured")))
    return "\n\n".join([table(header, body), f"Measured on {machine}." if machine else "Not measured yet."])


def assumptions(rows: Sequence[Row]) -> str:
    """Return every assumption with its value: those of all, then those of each scheme."""
    known = _assumed(rows)
    docs = field_docs(Assumptions)
    body = [(f"`{key}`", _value(known[key]), _one_line(docs[key])) for key in docs if key not in ("models", "schemes")]
    models = [(name, *(_value(shape[key]) for key in _SHAPE)) for name, shape in known["models"].items()]
    schemes, told = known["schemes"], field_docs(Scheme)
    of_schemes = [
        (f"`{key}`", *(_value(scheme[key]) for scheme in schemes.values()), _one_line(told.get(key, "In words.")))
        for key in Scheme.__dataclass_fields__
    ]
    parts = (
        table(("assumption", "value", "meaning"), body),
        table(("model", *_SHAPE), models),
        table(("of a scheme", *(f"`{name}`" for name in schemes), "meaning"), of_schemes),
    )
    return "\n\n".join(parts)


_SHAPE = ("architecture", "layers", "dim", "ffn", "heads", "kv_heads", "vocab", "sequence")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _assumed(rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = next(row["assumptions"] for row in rows if "assumptions" in row)
    return found


def _checked(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if (row["model"], row["gpus"]) == CHECK[:2]]


def _points(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row not in _checked(rows)]


KIND = Kind(
    name="scaling",
    keys={"model": str, "gpus": int, "scheme": str, "ms": float, "peak_gib": float, "wire_gb": float},
    columns=COLUMNS,
    names=3,
    show=fastest,
    tables={
        "scaling-bars": by_result("scaling", bars),
        "scaling-wire": by_result("scaling", wire),
        "scaling-check": check,
        "scaling-assumptions": by_result("scaling", assumptions),
    },
)
