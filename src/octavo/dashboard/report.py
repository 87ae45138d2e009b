"""The same page as one file: with its style, its scripts, Plotly's, and all data compressed. It asks no network."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlencode

from octavo.dashboard import page
from octavo.dashboard.answers import ANSWERS, Query
from octavo.dashboard.runs import Chosen, Known
from octavo.errors import StoreError
from octavo.monitor.store import OF_CODES

BUCKETS = 150
"""Stretches of time in a report's heat maps, from which it draws its layers too."""
POINTS = 800
"""Points of a report's series."""
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:; base-uri"
    " 'none'; form-action 'none'"
)

Asked = tuple[str, list[tuple[str, str]]]


def report(runs: Sequence[str | Path], output: str | Path) -> Path:
    """Write a report of one run, or of several side by side, and return its path.

    Raises:
        StoreError: a run is not there, or the file cannot be written.
        UnsupportedError: plotly is not installed.
    """
    script = page.plotly().read_text("utf-8")
    known = Chosen(runs)
    try:
        held = {_address(*asked): _answered(known, *asked) for asked in _asked(known)}
    finally:
        known.close()
    data = base64.b64encode(zlib.compress(json.dumps(held).encode(), 6)).decode()
    head = page.joined([
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<style>{page.text_of(page.STYLE)}</style>",
        f'<link rel="icon" href="{page.as_data(page.text_of(page.ICON), "image/svg+xml")}">',
        f"<script>{page.safe_in_script(script)}</script>",
    ])  # fmt: skip
    start = page.joined([
        f'<script type="application/octet-stream" id="held">{data}</script>',
        '<script type="module">import "octavo/app.js";</script>',
    ])  # fmt: skip
    html = page.page(head, {name: page.as_data(text) for name, text in page.scripts().items()}, start)
    return _written(Path(output), html)


def _asked(known: Known) -> Iterator[Asked]:
    """Yield what the page of a report may ask for."""
    names = known.names()
    yield "runs", []
    yield "compare", [("run", name) for name in names]
    for name in names:
        of = ("run", name)
        opened = known.open(name)
        for answer in ("live", "run", "events"):
            yield answer, [of]
        yield "scalars", [of, ("points", str(POINTS))]
        yield "performance", [of, ("points", str(POINTS))]
        for stat in opened.stats:
            for role in dict.fromkeys(row.role for row in opened.tensors):
                if role == "grad_weight" and stat in OF_CODES:
                    continue
                for pool in ("max", "min"):
                    yield "heatmap", [of, ("stat", stat), ("role", role), ("pool", pool), ("buckets", str(BUCKETS))]
        for layer in dict.fromkeys(row.layer for row in opened.tensors):
            yield "histograms", [of, ("layer", layer)]


def _answered(known: Known, name: str, parameters: list[tuple[str, str]]) -> dict[str, object]:
    values: dict[str, list[str]] = {}
    for key, value in parameters:
        values.setdefault(key, []).append(value)
    found = ANSWERS[name](known, Query(values))
    if found.is_json:
        return {"json": json.loads(found.body)}
    return {"arrays": base64.b64encode(found.body).decode()}


def _address(name: str, parameters: list[tuple[str, str]]) -> str:
    """Return how the page names an answer; how many points it asks for does not matter."""
    kept = [(key, value) for key, value in parameters if key not in ("points", "buckets")]
    return f"{name}?{urlencode(kept)}"


def _written(path: Path, text: str) -> Path:
    """Write a file whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, "utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}.") from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path
