"""What the page may ask for. An answer is JSON, or arrays as `packing` lays them out; the server sends them one by one,
a report holds them all.
"""  # noqa: D205

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from octavo.dashboard.packing import pack, to_json
from octavo.dashboard.runs import Known
from octavo.dashboard.speed import speed
from octavo.dashboard.verdict import gap_of, loss_key, newest, verdict
from octavo.dashboard.window import outside, window
from octavo.errors import ConfigError, StoreError, did_you_mean
from octavo.monitor.store import ROLES, RunReader, config_difference

POINTS, BUCKETS = 1500, 300
EVENTS = 2000
"""Newest events that are sent."""
MOST = 5000
"""Points or buckets that may be asked for."""
RECENT = 200
"""Steps among which the newest value of a scalar is looked for."""
TOGETHER = 8
"""Runs that may stand side by side."""


class Answer(NamedTuple):
    """Bytes, and whether they are JSON or arrays."""

    body: bytes
    is_json: bool


class Query:
    """What was asked: names with one or several values.

    Raises:
        ConfigError: from any of its methods, where a value is missing or is not of its kind.
    """

    def __init__(self, values: Mapping[str, Sequence[str]]) -> None:
        self._values = values

    def text(self, name: str, among: Sequence[str] = ()) -> str:
        """Return a value that must be there; one of `among` if given."""
        found = self._values.get(name, ())
        if len(found) != 1:
            raise ConfigError(f"'{name}' is asked for once, as in ?{name}=...")
        if among and found[0] not in among:
            raise ConfigError(f"{name}={found[0]}: there are {', '.join(among)}.{did_you_mean(found[0], among)}")
        return found[0]

    def number(self, name: str, default: int) -> int:
        """Return a whole number between 1 and `MOST`."""
        found = self._values.get(name, ())
        if not found:
            return default
        if not found[0].isdecimal() or not 1 <= int(found[0]) <= MOST:
            raise ConfigError(f"{name}={found[0]}: a whole number from 1 to {MOST} is asked for.")
        return int(found[0])

    def several(self, name: str) -> list[str]:
        """Return the values of a name that may come several times."""
        return list(self._values.get(name, ()))


def runs(known: Known, query: Query) -> Answer:
    """All runs, newest first, with what tells them apart."""
    return Answer(to_json({"folder": known.title, "runs": [_entry(known, name) for name in known.names()]}), True)


def live(known: Known, query: Query) -> Answer:
    """A few numbers of one run that change when it goes on."""
    run = known.open(query.text("run"))
    return Answer(to_json({"version": run.version(), "step": run.last_step, "state": run.state()}), True)


def run(known: Known, query: Query) -> Answer:
    """What a run says of itself, and the verdict."""
    name = query.text("run")
    opened = known.open(name)
    found = verdict(opened)
    last = opened.last_step
    recent = opened.scalars(first=last - RECENT)
    body = {
        "id": name,
        "name": opened.name,
        "state": opened.state(),
        "step": last,
        "newest": {key: newest(series) for key, series in recent.items()},
        "heartbeat": opened.heartbeat,
        "verdict": {**found._asdict(), "findings": [finding._asdict() for finding in found.findings]},
        "sessions": [session._asdict() for session in opened.sessions],
        "stats": list(opened.stats),
        "roles": [role for role in ROLES if any(row.role == role for row in opened.tensors)],
        "layers": _layers(opened),
        "keys": opened.keys(),
        **{document: opened.document(document) for document in ("config", "env", "plan", "corpus", "summary")},
    }
    return Answer(to_json(body), True)


def scalars(known: Known, query: Query) -> Answer:
    """Scalars over steps: `key/x`, `key/y` for each `key` asked for; all without one."""
    opened = known.open(query.text("run"))
    series = opened.scalars(query.several("key") or None, points=query.number("points", POINTS))
    arrays: dict[str, Any] = {}
    for key, found in series.items():
        arrays[f"{key}/x"], arrays[f"{key}/y"] = found.points()
    return Answer(pack(arrays), False)


def heatmap(known: Known, query: Query) -> Answer:
    """One statistic of one role: `values` (layers, buckets), `first` and `last` step of each bucket."""
    opened = known.open(query.text("run"))
    stat, role = query.text("stat", opened.stats), query.text("role", ROLES)
    pool = query.text("pool", ("max", "min")) if query.several("pool") else "max"
    found = opened.heatmap(stat, role, pool=pool, buckets=query.number("buckets", BUCKETS))
    arrays: dict[str, Any] = {"values": found.values, "first": found.first, "last": found.last}
    return Answer(pack(arrays, {"layers": found.layers}), False)


def series(known: Known, query: Query) -> Answer:
    """One statistic of one layer, by role: `ROLE/x`, `ROLE/y`."""
    opened = known.open(query.text("run"))
    stat, points = query.text("stat", opened.stats), query.number("points", POINTS)
    arrays: dict[str, Any] = {}
    for role, found in opened.series_by_role(query.text("layer"), stat, points=points).items():
        arrays[f"{role}/x"], arrays[f"{role}/y"] = found.points()
    return Answer(pack(arrays), False)


def histograms(known: Known, query: Query) -> Answer:
    """The newest histogram of each role of a layer, with the window of its format and the noise of the step."""
    opened = known.open(query.text("run"))
    layer = _layer(opened, query)
    return Answer(to_json({role: _histogram(opened, layer, role) for role in _roles(opened, layer)}), True)


def events(known: Known, query: Query) -> Answer:
    """The newest events, oldest first."""
    found = known.open(query.text("run")).events()
    newest = [event._asdict() for event in found[-EVENTS:]]
    return Answer(to_json({"count": len(found), "events": newest}), True)


def performance(known: Known, query: Query) -> Answer:
    """Series of `speed`, with its facts in the header."""
    arrays, facts = speed(known.open(query.text("run")), points=query.number("points", POINTS))
    return Answer(pack(arrays, {"facts": facts}), False)


def compare(known: Known, query: Query) -> Answer:
    """What the configurations of some runs differ in, and where each stands."""
    names = query.several("run")[:TOGETHER]
    opened = [known.open(name) for name in names]
    differences = [difference._asdict() for difference in config_difference(opened)] if len(opened) > 1 else []
    keys = sorted({key for each in opened for key in each.keys()} - {"time"})  # noqa: SIM118 (a method of the reader)
    body = {"runs": [_entry(known, name) for name in names], "differences": differences, "keys": keys}
    return Answer(to_json(body), True)


ANSWERS: dict[str, Callable[[Known, Query], Answer]] = {
    answer.__name__: answer
    for answer in (runs, live, run, scalars, heatmap, series, histograms, events, performance, compare)
}
"""By the last part of their address."""


def _entry(known: Known, name: str) -> dict[str, Any]:
    """Return a line of the list of runs; a run that cannot be read says why."""
    try:
        opened = known.open(name)
        found = verdict(opened)
        last = opened.last_step
        recent = opened.scalars(first=last - RECENT)
    except StoreError as error:
        return {"id": name, "name": name, "error": str(error)}
    loop = opened.config.get("run")
    key = loss_key(recent)
    return {
        "id": name,
        "name": name if name != "." else opened.name,
        "state": opened.state(),
        "level": found.level,
        "verdict": found.text,
        "step": last,
        "steps": loop.get("steps") if isinstance(loop, dict) else None,
        "recipe": opened.plan.get("recipe"),
        "device": opened.env.get("device"),
        "parameters": opened.env.get("parameters"),
        "loss": newest(recent.get(key)) if key else None,
        "gap_percent": gap_of(opened, recent),
        "tokens_per_second": newest(recent.get("tokens_per_second")),
        "heldout_loss": opened.summary.get("heldout_loss_fp8"),
        "started": opened.sessions[0].started,
        "heartbeat": opened.heartbeat,
    }


def _layers(opened: RunReader) -> list[dict[str, Any]]:
    """Return the layers that are measured, in the order of the model, with how each role is quantised."""
    found: dict[str, dict[str, Any]] = {}
    for row in opened.tensors:
        layer = found.setdefault(row.layer, {"name": row.layer, "roles": {}})
        layer["roles"][row.role] = {"operand": row.operand, "shape": list(row.shape)}
    return list(found.values())


def _layer(opened: RunReader, query: Query) -> str:
    layer = query.text("layer")
    names = {row.layer for row in opened.tensors}
    if layer not in names:
        raise StoreError(f"this run measured no layer '{layer}'.{did_you_mean(layer, names)}")
    return layer


def _roles(opened: RunReader, layer: str) -> list[str]:
    measured = {row.role for row in opened.tensors if row.layer == layer}
    return [role for role in ROLES if role in measured]


def _histogram(opened: RunReader, layer: str, role: str) -> dict[str, Any] | None:
    found = opened.histogram(layer, role)
    if found is None:
        return None
    step, low, counts = found
    index = next(i for i, row in enumerate(opened.tensors) if (row.layer, row.role) == (layer, role))
    held = window(opened.tensors[index].operand)
    body: dict[str, Any] = {"step": step, "low": low, "counts": counts.tolist(), "window": held}
    body["sqnr"] = _sqnr(opened, step, index)
    if held is not None:
        body["below"], body["above"] = outside(counts, low, held)
    return body


def _sqnr(opened: RunReader, step: int, index: int) -> float:
    """Return the signal to quantisation noise of a tensor at a step, in dB; NaN where it was not measured."""
    try:
        _, values = opened.snapshot(step)
    except StoreError:
        return float("nan")
    return float(values[index, opened.stats.index("sqnr")]) if "sqnr" in opened.stats else float("nan")
