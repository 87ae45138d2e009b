from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.doctor.check import Finding, make
from octavo.doctor.machine import resources
from octavo.doctor.subjects import Machine


@pytest.mark.parametrize(
    ("judge", "value", "verdict"),
    [
        (resources.judge_shared, 0.0625, "warning"),
        (resources.judge_shared, 8.0, "ok"),
        (resources.judge_shared, None, "skipped"),
        (resources.judge_disk, 0.4, "failure"),
        (resources.judge_disk, 5.0, "warning"),
        (resources.judge_disk, 500.0, "ok"),
        (resources.judge_files, 256, "warning"),
        (resources.judge_files, 65536, "ok"),
        (resources.judge_files, -1, "ok"),
    ],
)
def test_limits(judge: Callable[[float | None], Finding], value: float | None, verdict: str) -> None:
    finding = judge(value)
    assert finding.verdict == verdict, finding


def test_a_folder_that_is_not_there_yet_lies_on_a_disk(tmp_path: Path) -> None:
    found = make(resources.disk, Machine(torch.device("cpu"), tmp_path / "runs" / "mine")).finding
    assert found.numbers["free_gib"] > 0


def test_the_remedy_of_a_small_shared_memory_is_a_flag_of_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_size", lambda place: 0.0625)
    result = make(resources.shared_memory, Machine(torch.device("cpu")))
    assert result.finding.seen == "/dev/shm has 0.06 GiB" and "--shm-size" in result.remedy
