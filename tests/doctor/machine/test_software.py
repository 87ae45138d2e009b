from __future__ import annotations

import pytest
import torch

from octavo.doctor.machine import software
from octavo.doctor.subjects import Machine

GOOD = {"octavo": "0.1.0", "python": "3.12.3", "torch": "2.11.0+cu130", "cuda": "13.0", "triton": "3.6.0"}


@pytest.mark.parametrize(
    ("versions", "verdict", "seen"),
    [
        ({}, "ok", "torch 2.11.0+cu130"),
        ({"triton": None}, "ok", "tested"),
        ({"torch": "2.10.2"}, "failure", "torch 2.10.2 lacks"),
        ({"torch": "2.14.0.dev20261101"}, "warning", "torch 2.14.0.dev20261101 was not tested"),
        ({"triton": "3.3.1"}, "failure", "triton 3.3.1 lacks"),
        ({"triton": "3.8.0"}, "warning", "triton 3.8.0 was not tested"),
        ({"python": "3.10.14"}, "failure", "too old"),
        ({"torch": "2.14.0", "triton": "3.3.1"}, "failure", "triton 3.3.1"),
    ],
)
def test_versions_are_held_against_what_is_known(versions: dict[str, str | None], verdict: str, seen: str) -> None:
    found = software.judge({**GOOD, **versions})
    assert found.verdict == verdict and seen in found.seen, found
    assert bool(found.remedy) == (verdict != "ok")


def test_the_fault_of_triton_that_octavo_avoids_is_known() -> None:
    assert any("11111" in row["known"] for row in software.judge(GOOD).rows)


def test_only_a_gpu_misses_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_version", lambda name: None)
    here, there = (software.packages.look(Machine(torch.device(kind))) for kind in ("cpu", "cuda"))
    assert here.verdict == "ok" and "tokenizers (BPE tokenizers)" in here.seen, here
    assert there.verdict == "warning" and there.remedy == "pip install triton; pip install 'octavo[energy]'.", there
