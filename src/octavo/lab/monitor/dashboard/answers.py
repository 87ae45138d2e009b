"""Answers to the page's requests, as JSON or packed arrays. The server sends them one by one; a report holds all."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from octavo._util.checksums import check_regular
from octavo._util.config_reader import blaming
from octavo._util.terminal import printable
from octavo.errors import ConfigError, StoreError, did_you_mean
from octavo.lab.monitor.console import FILE as CONSOLE
from octavo.lab.monitor.console import newest as newest_lines
from octavo.lab.monitor.dashboard.packing import pack, pack_curves
from octavo.lab.monitor.dashboard.runs import RunCollection
from octavo.lab.monitor.dashboard.speed import speed
from octavo.lab.monitor.dashboard.verdict import SHARE, gap_limit, gap_of, loss_key, newest, verdict
from octavo.lab.monitor.samples import FILE as SAMPLES
from octavo.lab.monitor.samples import parse
from octavo.lab.monitor.store import ROLES, RunReader, Series, config_difference
from octavo.lab.monitor.store.writer import plain

POINTS, BUCKETS = 1500, 300
EVENTS = 2000
"""Number of newest events sent."""
MAX_POINTS = 5000
"""Maximum number of points or buckets per request."""
CONSOLE_BYTES = 256 * 2**10
"""Bytes of the newest console lines sent."""
SAMPLES_BYTES = 256 * 2**10
"""Bytes of the newest samples sent."""
NOTE_BYTES = 64 * 2**10
"""Bytes of a note that are read for its first line."""
RECENT = 200
"""Steps searched for the newest value of a scalar."""
MAX_COMPARED = 8
"""Maximum number of runs to compare."""


Answer = dict[str, Any] | bytes
"""JSON, or packed arrays."""


class Query:
    """Parameters of a request, each with one or several values.

    Raises:
        ConfigError: from any method, if a value is missing or invalid.
    """

    def __init__(self, values: Mapping[str, Sequence[str]]) -> None:
        self._values = values

    def text(self, name: str, among: Sequence[str] = ()) -> str:
        """Return a required value; one of `among` if given."""
        found = self._values.get(name, ())
        if len(found) != 1:
            raise ConfigError(f"'{name}' is required once, as in ?{name}=...")
        if among and found[0] not in among:
            raise ConfigError(f"{name}={found[0]}: expected one of {', '.join(among)}.{did_you_mean(found[0], among)}")
        return found[0]

    def number(self, name: str, default: int) -> int:
        """Return a whole number between 1 and `MAX_POINTS`."""
        found = self._values.get(name, ())
        if not found:
            return default
        if not found[0].isdecimal() or not 1 <= int(found[0]) <= MAX_POINTS:
            raise ConfigError(f"{name}={found[0]}: expected a whole number from 1 to {MAX_POINTS}.")
        return int(found[0])

    def several(self, name: str) -> list[str]:
        """Return all values of a name."""
        return list(self._values.get(name, ()))


def runs(known: RunCollection, query: Query) -> Answer:
    """All runs, newest first, with their main properties."""
    return {"folder": known.title, "runs": [_entry(known, name) for name in known.names()]}


def live(known: RunCollection, query: Query) -> Answer:
    """Progress of one run: a few numbers that change with each write."""
    run = known.open(query.text("run"))
    return {"version": run.version(), "step": run.last_step, "state": run.state()}


def run(known: RunCollection, query: Query) -> Answer:
    """Documents, layers and verdict of a run."""
    name = query.text("run")
    opened = known.open(name)
    found = verdict(opened)
    last = opened.last_step
    recent = opened.scalars(first=last - RECENT)
    return {
        "id": name,
        "name": opened.name,
        "state": opened.state(),
        "step": last,
        "newest": {key: newest(series) for key, series in recent.items()},
        "heartbeat": opened.heartbeat,
        "pauses": opened.pauses,
        "gap_limit": gap_limit(opened) if last else None,
        "verdict": {**found._asdict(), "findings": [finding._asdict() for finding in found.findings]},
        "sessions": [session._asdict() for session in opened.sessions],
        "stats": list(opened.stats),
        "roles": [role for role in ROLES if any(row.role == role for row in opened.tensors)],
        "layers": _layers(opened),
        "keys": opened.keys(),
        **{document: opened.document(document) for document in ("config", "env", "plan", "corpus", "summary")},
    }


def scalars(known: RunCollection, query: Query) -> Answer:
    """Scalars over steps: `key/x`, `key/y` for each requested `key`; by default all."""
    opened = known.open(query.text("run"))
    found = opened.scalars(query.several("key") or None, points=query.number("points", POINTS))
    return pack_curves({key: series.points() for key, series in found.items()})


def heatmap(known: RunCollection, query: Query) -> Answer:
    """One statistic of one role: `values` (layers, buckets), `first` and `last` step of each bucket.

    `newest` (layers, 1) is that of the last tenth of the run, which does not depend on the number of buckets.
    """
    opened = known.open(query.text("run"))
    stat, role = query.text("stat", opened.stats), query.text("role", ROLES)
    pool = query.text("pool", ("max", "min")) if query.several("pool") else "max"
    found = opened.heatmap(stat, role, pool=pool, buckets=query.number("buckets", BUCKETS))
    since = int((1 - SHARE) * opened.last_step) + 1
    late = opened.heatmap(stat, role, pool=pool, first=since, buckets=1).values
    steps = {"first": found.first, "last": found.last}
    return pack({"values": found.values, **steps, "newest": late}, {"layers": found.layers})


def series(known: RunCollection, query: Query) -> Answer:
    """One statistic of one layer, by role: `ROLE/x`, `ROLE/y`."""
    opened = known.open(query.text("run"))
    stat, points = query.text("stat", opened.stats), query.number("points", POINTS)
    found = opened.series_by_role(query.text("layer"), stat, points=points)
    return pack_curves({role: series.points() for role, series in found.items()})


def histograms(known: RunCollection, query: Query) -> Answer:
    """The newest histogram of each role of a layer, with the range of its format and the SQNR of that step."""
    opened, layer = known.open(query.text("run")), query.text("layer")
    rows = opened.rows_of(layer)
    return {role: _histogram(opened, rows[role]) for role in ROLES if role in rows}


def events(known: RunCollection, query: Query) -> Answer:
    """The newest events, oldest first."""
    opened = known.open(query.text("run"))
    newest = [event._asdict() for event in opened.events(newest=EVENTS)]
    return {"count": opened.event_count(), "events": newest}


def console(known: RunCollection, query: Query) -> Answer:
    """The newest lines of what a run printed, and the number of bytes before them; `text` is None if it kept none."""
    with _beside(known.open(query.text("run")), CONSOLE) as file:
        text, before = (None, 0) if file is None else newest_lines(file, CONSOLE_BYTES)
    return {"text": text, "before": before}


def samples(known: RunCollection, query: Query) -> Answer:
    """The newest texts that the models of a run wrote, oldest first, whether there are more, and damaged lines."""
    with _beside(known.open(query.text("run")), SAMPLES) as file:
        text, before = ("", 0) if file is None else newest_lines(file, SAMPLES_BYTES)
    found, damaged = parse(text)
    return {"samples": found, "more": before > 0, "damaged": damaged}


def performance(known: RunCollection, query: Query) -> Answer:
    """Curves of `speed`, with its facts in the header."""
    curves, facts = speed(known.open(query.text("run")), points=query.number("points", POINTS))
    return pack_curves(curves, {"facts": facts})


def compare(known: RunCollection, query: Query) -> Answer:
    """Configuration differences of some runs, and the state of each."""
    names = query.several("run")[:MAX_COMPARED]
    entries = [_entry(known, name) for name in names]
    opened = [known.open(entry["id"]) for entry in entries if "error" not in entry]
    differences = [difference._asdict() for difference in config_difference(opened)] if len(opened) > 1 else []
    keys = sorted({key for each in opened for key in each.keys()} - {"time"})  # noqa: SIM118 (a method of the reader)
    return {"runs": entries, "differences": differences, "keys": keys}


_ALL = (runs, live, run, scalars, heatmap, series, histograms, events, console, samples, performance, compare)
ANSWERS: dict[str, Callable[[RunCollection, Query], Answer]] = {answer.__name__: answer for answer in _ALL}
"""Answers by the last part of their URL."""


def answer(known: RunCollection, name: str, values: Mapping[str, Sequence[str]]) -> Answer:
    """Return the answer `name` to a request.

    Raises:
        ConfigError: a value of the request is missing or invalid.
        StoreError: there is no such answer or run, or it cannot be read, or is damaged.
    """
    if name not in ANSWERS:
        raise StoreError(f"unknown request '{name}'")
    with blaming(", ".join(values.get("run", ["the folder"])), StoreError):
        found = ANSWERS[name](known, Query(values))
        return found if isinstance(found, bytes) else dict(plain(found))


def _entry(known: RunCollection, name: str) -> dict[str, Any]:
    """Return an entry of the list of runs; for an unreadable run, with the error."""
    try:
        with blaming(name, StoreError):
            return _described(known.open(name), name)
    except StoreError as error:
        return {"id": name, "name": name, "error": printable(error)}


def _described(opened: RunReader, name: str) -> dict[str, Any]:
    found = verdict(opened)
    last = opened.last_step
    recent = opened.scalars(first=last - RECENT)
    loop = opened.settings("run")
    key = loss_key(recent)
    return {
        "id": name,
        "name": name if name != "." else opened.name,
        "state": opened.state(),
        "level": found.level,
        "verdict": found.text,
        "step": last,
        "steps": loop.get("steps"),
        "recipe": opened.plan.get("recipe") or loop.get("recipe"),
        "device": opened.env.get("device"),
        "parameters": opened.env.get("parameters"),
        "loss": newest(recent.get(key)) if key else None,
        "gap_percent": gap_of(opened, recent),
        "tokens_per_second": newest(recent.get("tokens_per_second")),
        "heldout_loss": _heldout(opened, recent),
        "losses": _sparkline(opened, key),
        "model": _model_of(opened),
        "note": _note(opened),
        "started": opened.sessions[0].started,
        "heartbeat": opened.heartbeat,
        "pauses": opened.pauses,
        "duration": opened.duration,
    }


SPARK = 40
"""Points of the small curve in the list of runs."""


def _sparkline(opened: RunReader, key: str | None) -> list[float | None]:
    """Return the main loss over the run, minimum and maximum of each bucket of steps; None where it is not finite."""
    if key is None:
        return []
    _, values = opened.scalar(key, points=SPARK).points()
    return [float(value) if math.isfinite(value) else None for value in values]


def _heldout(opened: RunReader, recent: Mapping[str, Series]) -> float | None:
    """Return the held-out loss of the main model: at the end, before that the newest; None without one."""
    for name in ("heldout_loss_fp8", "heldout_loss_bf16"):
        found = opened.summary.get(name)
        found = newest(recent.get(name)) if found is None else float(found)
        if math.isfinite(found):
            return found
    return None


def _model_of(opened: RunReader) -> str:
    """Return the architecture and the size of a run's model, as far as they are recorded."""
    kind, count = str(opened.settings("model").get("architecture", "")), opened.env.get("parameters")
    size = ""
    if isinstance(count, int | float):
        unit, letter = next((pair for pair in ((1e9, "B"), (1e6, "M")) if count >= pair[0]), (1e3, "k"))
        size = f"{count / unit:.1f} {letter}"
    return " ".join(part for part in (kind, size) if part)


def _note(opened: RunReader) -> str:
    """Return the first line of notes.md in the run's directory."""
    with _beside(opened, "notes.md") as file:
        lines = [] if file is None else file.read(NOTE_BYTES).decode(errors="replace").splitlines()
    return next((line.lstrip("# ").strip() for line in lines if line.strip()), "")


@contextlib.contextmanager
def _beside(opened: RunReader, name: str) -> Iterator[BinaryIO | None]:
    """Open a file of a run's directory; None if there is none, or a link, which may lead to files of another folder."""
    path = opened.path.with_name(name)
    try:
        check_regular(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    with os.fdopen(descriptor, "rb") as file:
        yield file


def _layers(opened: RunReader) -> list[dict[str, Any]]:
    """Return the measured layers in model order, with the quantisation of each role."""
    found: dict[str, dict[str, Any]] = {}
    for row in opened.tensors:
        layer = found.setdefault(row.layer, {"name": row.layer, "roles": {}})
        layer["roles"][row.role] = {"operand": row.operand, "shape": list(row.shape)}
    return list(found.values())


def _histogram(opened: RunReader, index: int) -> dict[str, Any] | None:
    """Return the newest histogram of the tensor in a row of snapshots; None without one."""
    row = opened.tensors[index]
    found = opened.histogram(row.layer, row.role)
    if found is None:
        return None
    step, low, counts = found
    held = format_range(row.operand)
    body: dict[str, Any] = {"step": step, "low": low, "counts": counts.tolist(), "window": held}
    body["sqnr"] = math.nan
    if "sqnr" in opened.stats:
        with contextlib.suppress(StoreError):  # no snapshot that early
            body["sqnr"] = float(opened.snapshot(step)[1][index, opened.stats.index("sqnr")])
    if held is not None:
        body["below"], body["above"] = outside(counts, low, held)
    return body


RANGES = {"e4m3": (448.0, 2.0**-6, 2.0**-9), "e5m2": (57344.0, 2.0**-14, 2.0**-16)}
"""Largest, smallest normal and smallest subnormal value of a format (OFP8 1.0, table 1), as in
`octavo.numerics.formats`, which needs torch; a test compares the two."""


def format_range(operand: str) -> dict[str, Any] | None:
    """Return the representable range of a quantised tensor, as exponents of 2 of |x| / scale.

    Magnitudes from `lowest` to `highest` have a code, from `normal` with the full mantissa. Histograms count |x| /
    scale too, so that a tensor of many scales has one range. None for an unknown format, or no quantisation.
    """
    name = next((name for name in RANGES if name in operand.lower()), None)
    if name is None:
        return None
    largest, normal, subnormal = RANGES[name]
    return {
        "format": name,
        "lowest": math.log2(subnormal) - 1,  # larger values round up to the smallest code
        "normal": math.log2(normal),
        "highest": math.log2(largest),
    }


def outside(counts: NDArray[np.uint32], low: int, held: dict[str, Any]) -> tuple[float, float]:
    """Return the shares of elements below and above a range, by whole bins: bin i is [2^(low+i), 2^(low+i+1))."""
    total = float(counts.sum())
    if not total:
        return 0.0, 0.0
    starts = low + np.arange(len(counts))
    below = counts[starts + 1 <= held["lowest"]].sum()
    above = counts[starts >= held["highest"]].sum()
    return float(below) / total, float(above) / total
