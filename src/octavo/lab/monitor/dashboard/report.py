"""The page as one file with its style, scripts, Plotly and all data, compressed. It needs no network."""

from __future__ import annotations

import base64
import json
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from urllib.parse import urlencode

from octavo._util.files import write_text
from octavo.errors import StoreError
from octavo.lab.monitor.dashboard import page
from octavo.lab.monitor.dashboard.answers import answer
from octavo.lab.monitor.dashboard.runs import RunCollection, runs_named
from octavo.lab.monitor.store import OF_CODES

BUCKETS = 150
"""Buckets of a report's heat maps, from which its layer pages are drawn too."""
POINTS = 800
"""Points per series of a report."""
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:; base-uri"
    " 'none'; form-action 'none'"
)

Request = tuple[str, Mapping[str, Sequence[str]]]
"""Name and parameters, as `answer` takes them."""


def report(runs: Sequence[str | Path], output: str | Path) -> Path:
    """Write a report of one run, or of several side by side, and return its path.

    A run that cannot be read is an entry with its error, and a warning.

    Raises:
        StoreError: no run can be read, or the file cannot be written.
        UnsupportedError: plotly is not installed.
    """
    script = page.plotly().read_text("utf-8")
    known = runs_named(*runs)
    try:
        held = {_request_key(*request): _answer(known, *request) for request in _requests(known, _readable(known))}
    finally:
        known.close()
    data = base64.b64encode(zlib.compress(json.dumps(held).encode(), 6)).decode()
    head = "\n".join([
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<style>{page.text_of(page.STYLE)}</style>",
        f'<link rel="icon" href="{page.as_data(page.text_of(page.ICON), "image/svg+xml")}">',
        f"<script>{page.safe_in_script(script)}</script>",
    ])  # fmt: skip
    start = "\n".join([
        f'<script type="application/octet-stream" id="held">{data}</script>',
        '<script type="module">import "octavo/app.js";</script>',
    ])  # fmt: skip
    html = page.page(head, {name: page.as_data(text) for name, text in page.scripts().items()}, start)
    path = Path(output)
    if path.is_dir():
        raise StoreError(f"{path}: cannot be written: it is a directory. Name a file in it.")
    write_text(path, html, StoreError, mkdir=True)
    return path


def _readable(known: RunCollection) -> list[str]:
    """Return the names of the runs that can be read, and warn of the others.

    Raises:
        StoreError: none can be read.
    """
    readable, failures = [], []
    for name in known.names():
        try:
            known.open(name)
            readable.append(name)
        except StoreError as error:
            failures.append(error)
    if not readable:
        raise failures[0]
    for failure in failures:
        warnings.warn(f"{failure} The report shows this message instead.", stacklevel=3)
    return readable


def _requests(known: RunCollection, readable: Sequence[str]) -> Iterator[Request]:
    """Yield the requests that the page of a report can make."""
    yield "runs", {}
    yield "compare", {"run": known.names()}
    for name in readable:
        run = {"run": [name]}
        opened = known.open(name)
        for request in ("live", "run", "events", "console", "samples"):
            yield request, run
        for request in ("scalars", "performance"):
            yield request, {**run, "points": [str(POINTS)]}
        roles = dict.fromkeys(row.role for row in opened.tensors)
        for stat, role, pool in product(opened.stats, roles, ("max", "min")):
            if role != "grad_weight" or stat not in OF_CODES:
                values = {"stat": [stat], "role": [role], "pool": [pool], "buckets": [str(BUCKETS)]}
                yield "heatmap", {**run, **values}
        for layer in dict.fromkeys(row.layer for row in opened.tensors):
            yield "histograms", {**run, "layer": [layer]}


def _answer(known: RunCollection, name: str, values: Mapping[str, Sequence[str]]) -> dict[str, object]:
    found = answer(known, name, values)
    return {"arrays": base64.b64encode(found).decode()} if isinstance(found, bytes) else {"json": found}


def _request_key(name: str, values: Mapping[str, Sequence[str]]) -> str:
    """Return the page's key of an answer, independent of the number of points.

    As the page's URLSearchParams writes it, which escapes '~' and not '*'.
    """
    kept = {key: value for key, value in values.items() if key not in ("points", "buckets")}
    return f"{name}?{urlencode(kept, doseq=True, safe='*')}".replace("~", "%7E")
