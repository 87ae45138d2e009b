"""Versions, packages, variables and the driver."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from octavo.lab.doctor import software
from octavo.lab.doctor.check import Verdict, run_check
from octavo.lab.doctor.software import SLOW, DriverReadings, driver, variables
from octavo.lab.doctor.subjects import Machine

ROOT = Path(__file__).parents[3]
_ANY = (0,)
GOOD = {"octavo": "0.1.0", "python": "3.12.3", "torch": "2.11.0+cu130", "cuda": "13.0", "triton": "3.6.0"}


@pytest.mark.parametrize(
    ("versions", "verdict", "seen"),
    [
        ({}, "ok", "torch 2.11.0+cu130"),
        ({"triton": None}, "ok", "tested"),
        ({"torch": "2.10.2"}, "failure", "torch 2.10.2 is too old"),
        ({"torch": "2.99.0.dev20261101"}, "warning", "torch 2.99.0.dev20261101 was not tested"),
        ({"triton": "3.3.1"}, "failure", "triton 3.3.1 is too old"),
        ({"triton": "3.98.0"}, "warning", "triton 3.98.0 was not tested"),
        ({"python": "3.10.14"}, "failure", "too old"),
        ({"torch": "2.14.0", "triton": "3.3.1"}, "failure", "triton 3.3.1"),
    ],
)
def test_versions_are_held_against_what_is_known(versions: dict[str, str | None], verdict: str, seen: str) -> None:
    found = software.software.look(({**GOOD, **versions}, True))
    assert found.verdict == verdict and seen in found.seen, found
    assert bool(found.remedy) == (verdict != "ok")


def test_without_a_gpu_no_triton_is_warned_of() -> None:
    found = software.software.look(({**GOOD, "triton": "3.99.0"}, False))
    assert found.verdict == "ok" and "triton 3.99.0" in found.seen
    assert "triton" not in software.software.look(({**GOOD, "torch": "2.99.0", "triton": "3.99.0"}, False)).seen
    seen = run_check(
        software.software, Machine(torch.device("cpu"))
    ).finding.seen  # of these versions, whatever they are
    assert "triton" not in seen or seen.endswith("tested")


def test_the_list_of_tested_versions_has_what_these_tests_run_with_at_least_once_they_passed() -> None:
    """`make latest` adds newer ones; the pinned ones are there."""
    pinned = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and pinned[1] in software.TESTED["torch"]
    for package, versions in software.TESTED.items():
        assert versions == sorted(versions, key=lambda v: [*map(int, v.split("."))]), package
        above = software._after(package)
        assert software._is_between(software.Known(package, _ANY, above, Verdict.OK, "", ""), versions[-1])
        assert not software._is_between(
            software.Known(package, _ANY, above, Verdict.OK, "", ""), f"{above[0]}.{above[1]}"
        )


def test_versions_that_passed_are_added_in_order() -> None:
    spec = importlib.util.spec_from_file_location("tested", ROOT / ".ci" / "tested.py")
    assert spec is not None and spec.loader is not None
    tested = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tested)
    now = tested.added({"torch": ["2.9", "2.13"], "triton": ["3.6"]}, {"torch": "2.14.1+cpu"})
    assert now == {"torch": ["2.9", "2.13", "2.14"], "triton": ["3.6"]}
    assert tested.added(now, {"torch": "2.13.0"}) == now


def test_the_fault_of_triton_that_octavo_avoids_is_known() -> None:
    assert any("11111" in row["known"] for row in software.software.look((GOOD, True)).rows)


def test_only_a_gpu_misses_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "version_of", lambda name: None)
    here, there = (software.packages.look(Machine(torch.device(kind))) for kind in ("cpu", "cuda"))
    assert here.verdict == "ok" and "tokenizers (BPE tokenizers)" in here.seen, here
    assert there.verdict == "warning" and there.remedy == 'pip install triton; pip install "octavo[energy]".', there


@pytest.mark.parametrize("name", SLOW)
def test_a_variable_that_makes_a_run_slow_is_named_with_the_reason(name: str) -> None:
    found = variables.look({name: SLOW[name][0][0], "HOME": "/home/me"})
    assert found.verdict == "warning" and found.seen.startswith(f"{name}=") and SLOW[name][1] in found.seen, found
    assert f"unset {name}" in found.remedy


def test_other_values_and_other_variables_are_well() -> None:
    finding = variables.look({"OCTAVO_TRITON": "1", "CUDA_LAUNCH_BLOCKING": "0", "HOME": "/home/me"})
    assert finding.verdict == "ok", finding
    assert variables.look({}).seen == "none relevant"


OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.mark.parametrize(
    ("read", "seen", "remedy"),
    [
        (DriverReadings("570.86.15", "13.0", False, None, OLD), "driver 570.86.15: The NVIDIA driver on your", ""),
        (DriverReadings("570.86.15", None, False), "for CPUs only", "built for CUDA"),
        (DriverReadings("570.86.15", "13.0", False, ""), "hides every GPU", "Unset CUDA_VISIBLE_DEVICES"),
        (DriverReadings("570.86.15", "13.0", False, "-1"), "hides every GPU", "Unset CUDA_VISIBLE_DEVICES"),
        (DriverReadings("570.86.15", "13.0", True, total=499_499.0), "computes 499499 as the sum", "defective"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_failure(read: DriverReadings, seen: str, remedy: str) -> None:
    found = driver.look(read)
    assert found.verdict == "failure"
    assert seen in found.seen and remedy in found.remedy


@pytest.mark.parametrize(
    ("read", "verdict"),
    [
        (DriverReadings(None, "13.0", False), "skipped"),
        (DriverReadings("570.86.15", "13.0", True, "0", total=499_500.0), "ok"),
        (DriverReadings(None, "13.0", True, total=499_500.0), "ok"),
    ],
)
def test_no_gpu_or_one_that_works_is_well(read: DriverReadings, verdict: str) -> None:
    assert driver.look(read).verdict == verdict


def test_the_version_is_read_where_the_kernel_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert software._driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 12.3\n")
    assert software._driver_version(file) == "580.95.05"


@pytest.mark.gpu
def test_a_gpu_adds_up() -> None:
    finding = run_check(driver, Machine(torch.device("cuda", 0))).finding
    assert finding.verdict == "ok", finding
