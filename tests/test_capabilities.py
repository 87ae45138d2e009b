"""The page of capabilities: every number once, its counts are right, and what it names is there and runs somewhere.

What a test skips by itself is seen in its text: a mark or a call without a condition, a GPU wanted and refused, a
package that no extra requires. Other conditions are taken to hold on some machine.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

import checks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/capabilities.md"
LEFT_OUT = {2, 41, 43, 65, 78, 103, 106, 162}


class Capability(NamedTuple):
    numbers: range
    state: str
    checks: list[str]


def capabilities() -> list[Capability]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| (\d+)(?:-(\d+))? \|.*\| (works|otherwise|open|not checked) \| (.*) \|$", line):
            first, last = int(row[1]), int(row[2] or row[1])
            found.append(Capability(range(first, last + 1), row[3], re.findall(r"`([^`]+)`", row[4])))
    return found


ROWS = capabilities()


def test_every_number_is_there_once() -> None:
    numbers = [number for row in ROWS for number in row.numbers]
    assert sorted([*numbers, *LEFT_OUT]) == list(range(1, 172))


def test_the_counts_are_those_of_the_rows() -> None:
    counts = Counter({"works": 0, "otherwise": 0, "open": 0, "not checked": 0})
    for row in ROWS:
        counts[row.state] += len(row.numbers)
    said = f"{counts['works']} work. Done otherwise: {counts['otherwise']}. Open: {counts['open']}."
    assert f"Of {counts.total()}: {said} Not checked: {counts['not checked']}." in PAGE.read_text(encoding="utf-8")


# --- what ran -------------------------------------------------------------------------------------------------------


def ran(row: Capability) -> bool:
    """Return whether a check of a row passed in the last recorded run of some machine, or is a result."""
    passed = checks.passed()
    return any(
        (not check.endswith(".py") and "::" not in check) or checks.name_of(check) in passed for check in row.checks
    )


def test_what_works_ran_and_what_ran_nowhere_is_not_checked() -> None:
    works = [row.numbers.start for row in ROWS if row.state == "works" and not ran(row)]
    assert works == [], "no check of these rows ran: record them (pytest --record MACHINE), or set 'not checked'"
    assert [row.numbers.start for row in ROWS if row.state == "not checked" and ran(row)] == [], "these rows work"


def test_the_checks_to_record_are_those_of_the_rows() -> None:
    assert checks.named() == {check for row in ROWS for check in row.checks if check.startswith("tests/")}


def test_a_check_is_recorded_by_folder_file_and_test() -> None:
    assert checks.name_of("tests/nn/test_linear.py::test_a[1-x]") == "nn/test_linear.py::test_a"
    assert checks.name_of("tests/lab/monitor/test_gap.py") == "monitor/test_gap.py"


def test_a_record_has_what_passed_and_keeps_what_did_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "RECORDS", tmp_path)
    monkeypatch.setattr(
        checks, "named", lambda: {f"tests/nn/test_a.py::test_{n}" for n in "abc"} | {"tests/nn/test_a.py"}
    )
    (tmp_path / "h200.json").write_text(
        '{"passed": ["nn/test_a.py::test_c", "nn/test_a.py::test_b", "gone/x.py::test_x"]}'
    )
    assert checks.Recorder("runs/now.json").path == Path("runs/now.json")
    recorder = checks.Recorder("h200")
    for test, when, outcome in (("a[1]", "call", "passed"), ("b", "setup", "skipped"), ("a[2]", "call", "passed")):
        recorder.pytest_runtest_logreport(_report(f"tests/nn/test_a.py::test_{test}", when, outcome))
    recorder.pytest_sessionfinish()
    assert {*checks.passed()} == {"nn/test_a.py", "nn/test_a.py::test_a", "nn/test_a.py::test_c"}
    recorder.pytest_runtest_logreport(_report("tests/nn/test_a.py::test_a[3]", "call", "failed"))
    recorder.pytest_sessionfinish()
    assert {*checks.passed()} == {"nn/test_a.py::test_c"}


@pytest.mark.parametrize(("now", "code"), [(["a", "b", "c"], 0), (["a", "c"], 1), (None, 1)])
def test_integration_fails_if_a_committed_check_did_not_pass(
    now: list[str] | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(ROOT / ".ci/checked.py"))["main"]
    committed, record = tmp_path / "cpu.json", tmp_path / "now.json"
    committed.write_text(json.dumps({"passed": ["a", "b"]}))
    if now is not None:
        record.write_text(json.dumps({"passed": now}))
    assert main(committed, record) == code
    said = capsys.readouterr()
    assert ("b: in cpu.json, and did not pass" in said.err) == (now == ["a", "c"])
    assert ("c: passed and is not in cpu.json yet" in said.out) == (now is not None)


def test_integration_records_from_nothing_and_compares_at_the_end() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert script.index('rm -f "$RECORD"') < script.index("make test") < script.index("checked.py")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert len(re.findall(r"-m pytest [^#]*?\$\(RECORDED\)", makefile)) == 2, "test and clients"


def _report(test: str, when: str, outcome: str) -> pytest.TestReport:
    return pytest.TestReport(test, ("", 0, ""), {}, outcome, None, when)  # type: ignore[arg-type]


def test_what_checks_them_is_there() -> None:
    assert [row.numbers for row in ROWS if not row.checks and row.state != "open"] == [], "nothing checks them"
    for state, check in [(row.state, check) for row in ROWS for check in row.checks]:
        file, _, test = check.partition("::")
        assert (ROOT / file).is_file(), check
        kinds = ("docs/",) if state == "otherwise" else ("tests/", "benchmarks/results/")
        assert file.startswith((*kinds, "tests/")), f"{check} is no check of something that is '{state}'"
        if file.endswith(".py"):
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {test or 'test_'}", text, re.M), check
            assert not test or re.search(rf"^def {test}\(", text, re.M), check


# --- what never runs ------------------------------------------------------------------------------------------------

NEEDS_NO_GPU = "torch.cuda.is_available()"


def packages() -> set[str]:
    """Names of what is imported from the requirements of the package and its extras, and of what they bring along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    named = {re.split(r"[\[<>=;! ]", entry, maxsplit=1)[0] for group in groups for entry in group}
    return {name.replace("-", "_") for name in named} | {"megatron", "octavo", "torch"}


def never_runs(text: str, test: str = "") -> str:
    """Return why a test of a file, or every test of it, is skipped on every machine; empty if it runs somewhere."""
    module = ast.parse(text)
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    tests = [node for node in functions if (node.name == test if test else node.name.startswith("test_"))]
    marks = [
        mark
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for mark in (node.value.elts if isinstance(node.value, ast.List) else [node.value])
    ]
    reasons = [_never(marks, module.body) or _never([*marks, *each.decorator_list], each.body) for each in tests]
    return "there is no test" if not tests else "" if "" in reasons else reasons[0]


def _never(marks: list[ast.expr], body: list[ast.stmt]) -> str:
    """Return why marks, or the statements of a body that always run, skip; empty if nothing always does."""
    said = [ast.unparse(mark).removeprefix("pytest.mark.") for mark in marks]
    refuses_gpu = [mark for mark in said if mark.startswith(f"skipif({NEEDS_NO_GPU}")]
    if "gpu" in said and refuses_gpu:
        return f"gpu and {refuses_gpu[0]}"
    for mark in said:
        if re.match(r"(skip\b|xfail\b|skipif\((True|1)\b)", mark):
            return mark
    for statement in body:
        value = getattr(statement, "value", None) if isinstance(statement, ast.Expr | ast.Assign) else None
        for call in ast.walk(value) if value else ():
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if name in ("pytest.skip", "pytest.xfail"):
                return ast.unparse(call)
            if name == "pytest.importorskip" and ast.literal_eval(call.args[0]).split(".")[0] not in packages():
                return f"{ast.unparse(call)}, which nothing installs"
    return ""


@pytest.mark.parametrize("row", [row for row in ROWS if row.state == "works"], ids=lambda row: str(row.numbers.start))
def test_what_works_is_checked_somewhere(row: Capability) -> None:
    reasons = []
    for check in row.checks:
        file, _, test = check.partition("::")
        reasons.append(never_runs((ROOT / file).read_text("utf-8"), test) if file.endswith(".py") else "")
    assert "" in reasons, f"all of {row.checks} are skipped everywhere: {reasons}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def test_a(): assert f()", ""),
        ("@pytest.mark.gpu\ndef test_a(): assert f()", ""),
        ("@pytest.mark.skipif(sys.platform == 'win32')\ndef test_a(): assert f()", ""),
        ("def test_a():\n if f(): pytest.skip('x')\n assert g()", ""),
        ("pytest.importorskip('transformers')\ndef test_a(): assert f()", ""),
        ("x = pytest.importorskip('octavo.kernels')\ndef test_a(): assert f()", ""),
        ("@pytest.mark.skip\ndef test_a(): assert f()\ndef test_ab(): assert f()", "skip"),
        ("@pytest.mark.skip(reason='x')\ndef test_a(): assert f()", "skip(reason='x')"),
        ("@pytest.mark.xfail\ndef test_a(): assert f()", "xfail"),
        ("@pytest.mark.skipif(True, reason='x')\ndef test_a(): assert f()", "skipif(True, reason='x')"),
        ("def test_a():\n pytest.skip('x')\n assert f()", "pytest.skip('x')"),
        ("pytest.skip('x', allow_module_level=True)\ndef test_a(): f()", "pytest.skip('x', allow_module_level=True)"),
        ("pytestmark = [pytest.mark.skip]\ndef test_a(): assert f()", "skip"),
        ("pytestmark = pytest.mark.gpu\n@pytest.mark.skipif(torch.cuda.is_available())\ndef test_a(): assert f()",
         "gpu and skipif(torch.cuda.is_available())"),
        ("a, b = pytest.importorskip('nowhere'), 1\ndef test_a(): f()",
         "pytest.importorskip('nowhere'), which nothing installs"),
        ("def test_b(): assert f()", "there is no test"),
    ],
)  # fmt: skip
def test_what_never_runs_is_noticed(text: str, reason: str) -> None:
    assert never_runs(text, "test_a") == reason
