"""`octavo pilot` as a user meets it; what it measures is tested in tests/lab/pilot."""

from __future__ import annotations

import pytest

from octavo.errors import UnsupportedError
from octavo.lab.monitor.dashboard import page

MODEL = '{"vocab": 272, "dim": 64, "layers": 1, "heads": 2, "ffn": 128, "sequence": 32}'


def test_a_missing_package_is_named_before_anything_is_measured(octavo, tmp_path, monkeypatch):
    def missing(*packages: str) -> None:
        raise UnsupportedError(f"the dashboard needs {packages[0]}, which is not installed")

    monkeypatch.setattr(page, "require", missing)
    (tmp_path / "config.json").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("octavo.lab.pilot.run_pilot", lambda *given: pytest.fail("measured first"))
    with pytest.raises(UnsupportedError, match="needs plotly"):
        octavo(["pilot", "config.json", "--html", tmp_path / "report"])
