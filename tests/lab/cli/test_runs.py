from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.lab.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1] / "monitor"))
from synthetic import synthetic_run


def test_a_run_is_written_as_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic_run(tmp_path / "run", layers=1, steps=5)
    with pytest.raises(SystemExit) as exit:
        main(["dump", str(tmp_path / "run"), "--to", "csv", "--json"])
    assert exit.value.code == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert len(files) == 6 and all(Path(file).parent == tmp_path / "run" / "csv" for file in files)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [(["nowhere", "--to", "csv"], 1, "no run found"), (["x", "--to", "xml"], 2, "xml")],
)
def test_what_cannot_be_done(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(["dump", *arguments])
    assert exit.value.code == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("named", ["runs/one", "runs/one/checkpoints/step-000003", "."])
def test_an_export_of_a_checkpoint_is_in_the_directory_of_the_run(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, octavo: Callable[..., int]
) -> None:
    """Training removes older checkpoints, and what is in them."""
    place = tmp_path / "runs" / "one" / "checkpoints" / "step-000003"
    place.mkdir(parents=True)
    (place / "state.json").touch()
    monkeypatch.chdir(place if named == "." else tmp_path)
    asked: list[Path] = []
    result = SimpleNamespace(directory=Path(), to_json=lambda: "{}")
    monkeypatch.setattr("octavo.lab.train.export.export_run", lambda run, out, *_, **__: asked.append(out) or result)
    assert octavo(["export", named, "--json"]) == 0
    assert asked == [Path("../../export" if named == "." else "runs/one/export")]
