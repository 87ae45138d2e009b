"""`octavo doctor` in a terminal of 80 columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.lab.cli.doctor import OutputFlags, doctor
from octavo.lab.doctor.check import Check, failure, ok, skipped, warning
from octavo.lab.doctor.examination import CHECKS

LONG = "a line that is too long for what is left of a terminal of eighty columns, and goes on below"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Check[object]]]:
    """Return the checks of the machine, to be filled in, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    made: list[Check[object]] = []
    monkeypatch.setitem(CHECKS, "machine", made)
    yield made


def of(name: str, finding: object) -> Check[object]:
    return Check(name, "it hurts", "Do this.", lambda machine: finding)  # type: ignore[arg-type, return-value]


def test_a_line_a_check_then_what_to_do(checked: list[Check[object]], capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"kernel": "norm", "cases": 3}]
    checked += [
        of("disk", ok("12 GiB free")),
        of("clocks", warning(LONG)),
        of("triton kernels", failure("7 bytes differ", remedy=f"Install {LONG}.", rows=rows)),
        of("collectives", skipped("one GPU")),
    ]
    assert doctor(device="cpu") == 1
    shown = capsys.readouterr().out
    lines = [line.rstrip() for line in shown.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[:3] == ["", "machine", "  ok     disk              12 GiB free"]
    assert lines[3].startswith("  warn   clocks            a line that is too long")
    assert lines[4].startswith(" " * 27) and lines[4].split()
    assert "  FAIL   triton kernels    7 bytes differ" in lines and "  -      collectives       one GPU" in lines
    todo = lines.index("remedies")
    assert lines[todo + 1] == "  ->     clocks            Do this."
    assert lines[todo + 2].startswith("  ->     triton kernels    Install a line")
    assert lines[-1] == "FAILED: triton kernels. (1 ok, 1 warning, 1 failure, 1 skipped)"
    assert "cases" not in shown  # only with --verbose


def test_details_on_demand(checked: list[Check[object]], capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"kernel": "norm", "available": True, "sqnr_db": 28.512345}]
    checked += [of("kernels", ok("fine", rows=rows)), of("disk", ok("12 GiB", free_gib=12.0))]
    assert doctor(device="cpu", output=OutputFlags(verbose=True)) == 0
    shown = capsys.readouterr().out
    assert "sqnr db" in shown and "28.51" in shown and "yes" in shown and "free_gib" in shown
    assert shown.rstrip().endswith("No check failed. (2 ok)")


def test_json_and_report_are_all_that_is_printed(
    checked: list[Check[object]], capsys: pytest.CaptureFixture[str]
) -> None:
    checked += [of("disk", warning("5 GiB free", free_gib=5.0))]
    assert doctor(device="cpu", output=OutputFlags(json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] and found["checks"][0]["numbers"] == {"free_gib": 5.0}
    assert found["checks"][0]["remedy"] == "Do this." and found["checks"][0]["of"] == "machine"
    assert doctor(device="cpu", output=OutputFlags(report=True)) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("### octavo doctor") and "| machine: disk | WARNING | 5 GiB free |" in printed


def test_this_machine_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("kernels", "arithmetic", "triton kernels", "driver")  # versions are whatever is installed
    assert doctor(device="cpu", only=names, output=OutputFlags(json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert {check["check"]: check["verdict"] for check in found["checks"]} == {
        "driver": "skipped",
        "kernels": "ok",
        "arithmetic": "ok",
        "triton kernels": "skipped",
    }


@pytest.mark.parametrize(
    "given",
    [
        {"output": OutputFlags(report=True, json=True)},
        {"target": Path("x.toml"), "preset": "tiny"},
        {"device": "tpu"},
    ],
)
def test_a_wrong_question(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        target = given.pop("target", None)
        doctor(target, **given)  # type: ignore[arg-type]
