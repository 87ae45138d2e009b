"""Collectives between the GPUs of this machine, in every dtype that Octavo sends: correct, and not hanging.

Each rank is a process with a time limit: a hang is a finding, and leaves no process behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from octavo.doctor.check import Finding, check, failure, ok
from octavo.doctor.subjects import Machine, a_gpu

TIMEOUT = 120.0
"""Seconds; PyTorch loads and NCCL connects in less."""


def _several_gpus(machine: Machine) -> str:
    return a_gpu(machine) or ("there is only one GPU" if torch.cuda.device_count() < 2 else "")


@check(
    "collectives",
    symptom="training on several GPUs hangs in its first step, or differs from one GPU",
    remedy=(
        "Run again with NCCL_DEBUG=INFO. Hangs that NCCL_P2P_DISABLE=1 fixes are caused by PCIe access control (ACS) "
        "or an IOMMU: disable it on the host."
    ),
    needs=_several_gpus,
)
def collectives(machine: Machine) -> Finding:
    """Start a process per GPU; sum, gather, scatter and exchange known numbers between them."""
    gpus = torch.cuda.device_count()
    return judge(connect(gpus, "nccl"), gpus)


def judge(errors: Sequence[str], ranks: int) -> Finding:
    """Return the finding for a list of errors."""
    if errors:
        return failure("; ".join(errors[:3]), wrong=list(errors), ranks=ranks)
    return ok(f"{ranks} GPUs sum, gather, scatter and exchange FP32, BF16 and bytes correctly", ranks=ranks)


def connect(
    ranks: int, backend: str, timeout: float = TIMEOUT, program: Sequence[str] = ("-m", "octavo.doctor.rank")
) -> list[str]:
    """Return the errors between some ranks of this machine.

    Args:
        program: Python arguments of each process, followed by rank, ranks, backend and a shared folder.
    """
    with tempfile.TemporaryDirectory() as place:
        commands = [[sys.executable, *program, str(rank), str(ranks), backend, place] for rank in range(ranks)]
        errors = [(Path(place) / f"{rank}.err").open("w+") for rank in range(ranks)]
        processes = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=error)
            for command, error in zip(commands, errors, strict=True)
        ]
        try:
            codes = _wait(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if died := [rank for rank, code in enumerate(codes) if code]:
            errors[died[0]].seek(0)
            return [f"rank {died[0]}: {(errors[died[0]].read().strip().splitlines() or ['it died'])[-1]}"]
        if hung := [rank for rank, code in enumerate(codes) if code is None]:
            return [f"no answer from rank {', '.join(map(str, hung))} in {timeout:g} seconds"]
        return [line for rank in range(ranks) for line in json.loads((Path(place) / f"{rank}.json").read_text())]


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    """Wait until all have exited or one has failed; return exit codes, None if still running."""
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > end:
            return codes
        time.sleep(0.05)
