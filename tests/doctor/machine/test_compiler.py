from __future__ import annotations

import pytest
import torch

from octavo.doctor.check import make
from octavo.doctor.machine import compiler
from octavo.doctor.subjects import Machine


def test_a_cpu_compiles_nothing_by_itself() -> None:
    assert make(compiler.compiler, Machine(torch.device("cpu"))).finding.verdict == "skipped"


@pytest.mark.gpu
def test_a_gpu_compiles() -> None:
    assert make(compiler.compiler, Machine(torch.device("cuda", 0))).finding.verdict == "ok"
