from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.cli.doctor import doctor
from octavo.errors import ConfigError


def selfcheck(*, passed: bool) -> list[dict[str, Any]]:
    row = {"recipe": "folded", "gemm": "dgrad", "sqnr_db": 28.5, "passed": passed}
    return [{**row, "gemm": "fprop", "passed": True}, row]


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_a_failed_check_is_named_and_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], passed: bool, code: int
) -> None:
    monkeypatch.setattr("octavo.cli.findings.selfcheck", lambda device: selfcheck(passed=passed))
    assert doctor(device="cpu") == code
    shown = capsys.readouterr().out
    assert ("FAILED: folded dgrad." in shown) == (not passed)
    assert ("All checks passed." in shown) == passed


def test_this_machine_computes_correctly(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(device="cpu", json_output=True) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {
        "hardware",
        "versions",
        "packages",
        "kernels",
        "selfcheck",
        "passed",
        "failures",
    } == findings.keys()
    assert {row["recipe"] for row in findings["selfcheck"]} >= {"folded", "rowwise", "tensorwise", "block"}
    assert findings["versions"]["torch"]


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"run\.device"):
        doctor(device="tpu")
