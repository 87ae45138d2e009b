from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.doctor.machine import driver
from octavo.doctor.subjects import Machine

OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.mark.parametrize(
    ("state", "seen", "remedy"),
    [
        (("570.86.15", "13.0", False, None, OLD), "cannot use the GPU of driver 570.86.15: The NVIDIA driver", ""),
        (("570.86.15", None, False, None, ""), "for CPUs only", "built for CUDA"),
        (("570.86.15", "13.0", False, "", ""), "hides every GPU", "Unset CUDA_VISIBLE_DEVICES"),
        (("570.86.15", "13.0", False, "-1", ""), "hides every GPU", "Unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_a_failure(
    state: tuple[str | None, str | None, bool, str | None, str], seen: str, remedy: str
) -> None:
    found = driver.judge(*state)
    assert found is not None and found.verdict == "failure"
    assert seen in found.seen and remedy in found.remedy


@pytest.mark.parametrize("state", [(None, "13.0", False, None, ""), ("570.86.15", "13.0", True, "0", "")])
def test_no_gpu_or_one_that_works_is_none(state: tuple[str | None, str | None, bool, str | None, str]) -> None:
    assert driver.judge(*state) is None


def test_the_version_is_read_where_the_kernel_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver._driver_version(file) is None
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 12.3\n")
    assert driver._driver_version(file) == "580.95.05"


@pytest.mark.gpu
def test_a_gpu_adds_up() -> None:
    finding = driver.driver.look(Machine(torch.device("cuda", 0)))
    assert finding.verdict == "ok", finding
