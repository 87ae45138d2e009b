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
        "triton",
        "triton_skipped",
        "passed",
        "failures",
        "remedies",
    } == findings.keys()
    assert {row["recipe"] for row in findings["selfcheck"]} >= {"folded", "rowwise", "tensorwise", "block"}
    assert findings["versions"]["torch"]
    assert findings["triton"] == [] and "cpu" in findings["triton_skipped"]  # which is no failure


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_a_kernel_that_is_compiled_wrongly_is_a_failure_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], passed: bool, code: int
) -> None:
    row = {"kernel": "transpose", "case": "257x16", "passed": passed, "detail": "" if passed else "7 bytes differ"}
    good = {"kernel": "rotary", "case": "2x3", "passed": True, "detail": "equal"}
    monkeypatch.setattr("octavo.cli.findings.selfcheck", lambda device: selfcheck(passed=True))
    monkeypatch.setattr("octavo.cli.findings.why_not", lambda device: None)
    monkeypatch.setattr("octavo.cli.findings.check_kernels", lambda device: [good, {**good, "case": "4x5"}, row])
    assert doctor(device="cpu") == code
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 of 2 passed" in shown
    assert ("7 bytes differ" in shown) == ("FAILED: kernel transpose." in shown) == (not passed)
    assert ("OCTAVO_TRITON=0" in shown) == (not passed)


def test_a_cpu_has_no_kernels_to_check_and_every_operation_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(device="cpu") == 0
    shown = capsys.readouterr().out
    assert "not made, it needs a GPU" in shown
    assert all(name in shown for name in ("quantize", "transpose", "activation", "norm", "rotary", "cross_entropy"))


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"run\.device"):
        doctor(device="tpu")
