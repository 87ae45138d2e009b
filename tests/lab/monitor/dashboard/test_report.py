"""A report is one file that holds what the page asks for."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import StoreError
from octavo.lab.monitor.dashboard.report import _request_key, report

pytest.importorskip("plotly")


def held_by(path: Path) -> dict[str, Any]:
    """Return the answers that a report holds."""
    packed = re.search(r'id="held">([^<]*)</script>', path.read_text("utf-8"))
    assert packed is not None
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed[1])))
    return found


def test_it_holds_every_answer(folder: Path, tmp_path: Path) -> None:
    held = held_by(report([folder / "first"], tmp_path / "a" / "report.html"))
    maps = [key for key in held if key.startswith("heatmap?")]
    assert len(maps) == (10 * 3 + 5) * 2
    assert "heatmap?run=first&stat=amax&role=input&pool=max" in held
    assert held["run?run=first"]["json"]["verdict"]["level"] == "healthy"
    assert len([key for key in held if key.startswith("histograms?")]) == 21


def test_answers_are_found_by_the_addresses_of_the_page() -> None:
    found = _request_key("run", {"run": ["r~1 *-._é/!'()&"], "points": ["9"]})
    assert found == "run?run=r%7E1+*-._%C3%A9%2F%21%27%28%29%26"  # String(new URLSearchParams(...))


def test_it_asks_nobody_for_anything(folder: Path, tmp_path: Path) -> None:
    html = report([folder / "first"], tmp_path / "report.html").read_text("utf-8")
    outside = re.sub(
        r"<script>.*?</script>", "", html, count=1, flags=re.DOTALL
    )  # Plotly's own, which names its licence
    assert not re.search(r"https?://", outside)
    assert not re.search(r'(?:src|href)="/', outside)
    assert "default-src 'none'" in html and "connect-src" not in html


def test_runs_side_by_side(folder: Path, tmp_path: Path) -> None:
    held = held_by(report([folder / "first", folder / "sweep" / "tensorwise"], tmp_path / "report.html"))
    compared = held["compare?run=first&run=tensorwise"]["json"]
    assert [run["id"] for run in compared["runs"]] == ["first", "tensorwise"]
    assert any(each["key"] == "run.recipe" for each in compared["differences"])


def test_what_cannot_be_written_is_said_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run found"):
        report([tmp_path], tmp_path / "report.html")
    (tmp_path / "report.html").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        report([folder / "first"], tmp_path / "report.html")
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_the_command(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    command = [sys.executable, "-m", "octavo", "report"]
    done = subprocess.run(
        [*command, str(folder / "first"), "-o", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and str(path) in done.stdout and path.stat().st_size > 4e6
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "name one" in wrong.stderr
