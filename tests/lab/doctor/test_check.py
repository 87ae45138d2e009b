from __future__ import annotations

import pytest
import torch

from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.doctor.check import Check, Finding, Verdict, check, failure, ok, run_check, skipped, warning
from octavo.lab.doctor.examination import CHECKS
from octavo.lab.doctor.subjects import Machine


def looking(find: object) -> Check[object]:
    return check("name", symptom="it hurts", remedy="Do this.")(lambda subject: find)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("finding", "verdict", "remedy"),
    [
        (ok("well", number=3), "ok", ""),
        (warning("slow"), "warning", "Do this."),
        (failure("wrong", remedy="Do that."), "failure", "Do that."),
        (skipped("no GPU"), "skipped", ""),
    ],
)
def test_only_what_is_not_well_has_a_remedy(finding: Finding, verdict: str, remedy: str) -> None:
    found = run_check(looking(finding), None).to_dict()
    assert (found["check"], found["verdict"], found["remedy"]) == ("name", verdict, remedy)
    assert found["numbers"] == ({"number": 3} if verdict == "ok" else {})
    assert found["seen"] and found["seconds"] >= 0


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: misaligned\nmore"), UnsupportedError("no kernel")])
def test_what_a_check_raises_is_a_failure_that_names_it(error: Exception) -> None:
    def look(subject: object) -> Finding:
        raise error

    result = run_check(Check("driver", "", "Install another.", look), None)
    assert result.finding.verdict is Verdict.FAILURE
    assert result.finding.seen == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert result.remedy == "Install another."


def test_what_a_check_needs_is_asked_first() -> None:
    seen: list[object] = []

    def look(subject: object) -> Finding:
        seen.append(subject)
        return ok("well")

    made = check("name", symptom="it hurts", remedy="Do this.", needs=lambda subject: "" if subject else "nothing here")
    found = [run_check(made(look), subject).finding for subject in (0, 1)]
    assert found == [skipped("nothing here"), ok("well")] and seen == [1]


def test_a_need_that_raises_is_a_failure() -> None:
    finding = run_check(check("name", symptom="", remedy="", needs=lambda subject: subject.device)(ok), None).finding
    assert finding.verdict == "failure" and "AttributeError" in finding.seen, finding


@pytest.mark.parametrize("name", ["clocks", "memory errors", "triton kernels", "compiler", "collectives"])
def test_what_only_a_gpu_has_is_not_looked_for_on_a_cpu(name: str) -> None:
    result = run_check(next(check for check in CHECKS["machine"] if check.name == name), Machine(torch.device("cpu")))
    assert result.finding.verdict == "skipped" and "cpu" in result.finding.seen.lower(), result.finding


def test_a_wrong_question_is_not_an_answer() -> None:
    def look(subject: object) -> Finding:
        raise ConfigError("no such recipe")

    with pytest.raises(ConfigError):
        run_check(Check("any", "", "", look), None)


def test_every_check_says_what_its_fault_looks_like_and_what_to_do() -> None:
    checks = [check for of_kind in CHECKS.values() for check in of_kind]
    assert len({check.name for check in checks}) == len(checks)
    for each in checks:
        assert each.symptom and not each.symptom.endswith("."), each.name
        assert each.remedy.endswith((".", "--resume.")), each.name
        assert len(each.name) <= 14 and each.name == each.name.lower()
        assert each.look.__doc__
