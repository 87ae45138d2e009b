from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.calibration.scale_policy import FLUSHED, SATURATED
from octavo.lab.cli.calibrate import CalibrationFlags
from octavo.lab.cli.flags import field_docs
from octavo.lab.cli.main import main
from octavo.nn import calibration_file

TEXT = "\n".join(f"{i} apples and {i * i % 89} pears" for i in range(2000))


def run(*arguments: str) -> int:
    """Run a command in this process and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    places = {"--source": tmp_path / "text.txt", "--cache": tmp_path / "cache"}
    flags = [part for flag, path in places.items() for part in (flag, str(path))]
    return ["--preset", "tiny", "--device", "cpu", "-o", str(tmp_path / "a.json"), *flags]


def test_a_file_is_written_updated_and_undone(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    assert run("calibrate", *tiny, "--batches", "1", "--no-backward") == 0
    out, err = capsys.readouterr()
    assert "14 of 14 scales fit their tensors" in out and err == ""
    assert f"written to {path}, for the recipe 'static' (max, margin 1)" in out
    first = calibration_file.read(path)

    changed = ["--only", "layers.0.*", "--only", "layers.1.attention.wo", "--margin", "3", "--json", "--check"]
    assert run("calibrate", *tiny, "--batches", "1", "--no-backward", *changed) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["file"] == str(path) and len(content["scales"]) == 8
    second = calibration_file.read(path)
    grown = {name for name, entry in second.items() if entry.scale == 4 * first[name].scale}
    assert grown == {f"{row['layer']}.{row['role']}" for row in content["scales"]}

    assert run("calibrate", "--undo", str(path), "--only", "layers.0.*") == 0
    out = capsys.readouterr().out
    entry = "layers.0.attention.wq.input"
    assert f"{second[entry].scale:.4g} -> {first[entry].scale:.4g}" in out
    assert f"7 scales of {path} restored" in out
    assert run("calibrate", "--undo", str(path), "--json") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["scales"]] == ["layers.1.attention.wo.input"]
    assert calibration_file.read(path) == first


def test_a_run_keeps_its_file_in_its_directory(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, out = tiny[: tiny.index("-o")] + tiny[tiny.index("-o") + 2 :], tmp_path / "run"
    assert run("train", *flags, "--steps", "1", "--recipe", "delayed", "--no-baseline", "--out", str(out)) == 0
    capsys.readouterr()
    assert run("calibrate", str(out), "--batches", "1", "--no-backward") == 0
    assert f"written to {out / 'calibration.json'}, for the recipe 'delayed'" in capsys.readouterr().out
    entry = calibration_file.read(out / "calibration.json")["layers.0.attention.wq.input"]
    assert entry.origin is not None and "checkpoints/step-000001 on" in entry.origin.source
    assert run("calibrate", str(out / "config.json"), "-o", str(tmp_path / "new.json"), "--batches", "1") == 0
    entry = calibration_file.read(tmp_path / "new.json")["layers.0.attention.wq.input"]
    assert entry.origin is not None and entry.origin.source.startswith("new weights")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--margin", "9"], "margin = 9"),
        (["--batches", "0"], "Must be > 0"),
        (["--recipe", "folded"], "no layer of the model would store scales by the recipe 'folded'"),
        (["--only", "layrs.0.*"], "no layer or scale matches 'layrs.0.*'"),
        (["--undo", "none.json"], "none.json: cannot be read"),
        (["--undo", "none.json", "--choose", "mean"], "mean"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags(tiny: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run("calibrate", *tiny, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_scale_that_does_not_fit_fails_the_check(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    few = [
        "--batches",
        "1",
        "--no-backward",
        "--only",
        "layers.0.attention.wq",
        "--choose",
        "percentile",
        "--percentile",
        "50",
    ]
    for check, code in (([], 0), (["--check"], 1)):
        assert run("calibrate", *tiny, *few, "--margin", "0", *check) == code
        assert "0 of 1 scales fit" in capsys.readouterr().out


def test_without_a_model_the_message_says_what_to_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("calibrate") == 2
    assert "name a run file, a preset" in capsys.readouterr().err


def test_the_help_names_the_limits() -> None:
    said = f"flushes more than {100 * FLUSHED:g} % of its tensor, or saturates more than {100 * SATURATED:g} %"
    assert said in field_docs(CalibrationFlags)["check"]
