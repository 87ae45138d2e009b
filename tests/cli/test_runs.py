from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from octavo.cli.main import main

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
