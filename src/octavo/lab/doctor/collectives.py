"""Collectives between the GPUs of this machine, in every dtype that Octavo sends: correct, fast, and not hanging.

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
from typing import Any, NamedTuple

import torch

from octavo.lab.doctor.check import Finding, check, failure, ok, warning
from octavo.lab.doctor.hardware import Gpu
from octavo.lab.doctor.subjects import a_gpu

TIMEOUT = 120.0
"""Seconds; PyTorch loads and NCCL connects in less."""
LEAST = 0.4
"""Share of a link's nominal bandwidth below which a gather is slow. NCCL reaches 0.7 to 0.85 over NVLink."""


class Answers(NamedTuple):
    """Results of the ranks."""

    errors: list[str]
    gb_per_s: float = 0.0
    """Bandwidth of a gather, of the slowest rank."""


@check(
    "collectives",
    symptom="training on several GPUs hangs in its first step, or differs from one GPU",
    remedy=(
        "Run again with NCCL_DEBUG=INFO. Hangs that NCCL_P2P_DISABLE=1 fixes are caused by PCIe access control (ACS) "
        "or an IOMMU: disable it on the host."
    ),
    needs=lambda machine: a_gpu(machine) or ("there is only one GPU" if torch.cuda.device_count() < 2 else ""),
    read=lambda machine: (gpus := torch.cuda.device_count(), connect(gpus, "nccl"), Gpu.of(machine).link_gb_per_s()),
)
def collectives(read: tuple[int, Answers, float | None]) -> Finding:
    """Judge the collectives between one process per GPU, and a gather's bandwidth.

    The last reading is the nominal bandwidth of a GPU's links in one direction, GB/s; None if NVML does not say.
    """
    ranks, found, nominal = read
    if found.errors:
        return failure("; ".join(found.errors[:3]), wrong=list(found.errors), ranks=ranks)
    seen = f"{ranks} GPUs sum, gather, scatter and exchange FP32, BF16 and bytes correctly"
    seen += f"; a gather runs at {found.gb_per_s:.1f} GB/s" + (f" of {nominal:.0f} nominal" if nominal else "")
    numbers: dict[str, Any] = {"ranks": ranks, "gb_per_s": found.gb_per_s, "nominal_gb_per_s": nominal}
    if nominal and found.gb_per_s < LEAST * nominal:
        remedy = (
            "Look at the topology (nvidia-smi topo -m) and at what NCCL uses (NCCL_DEBUG=INFO): NCCL_P2P_DISABLE, links"
            " that are down, or another job on the same links."
        )
        return warning(seen, remedy=remedy, **numbers)
    return ok(seen, **numbers)


def connect(
    ranks: int, backend: str, timeout: float = TIMEOUT, program: Sequence[str] = ("-m", "octavo.lab.doctor.rank")
) -> Answers:
    """Return the errors between some ranks of this machine, and their bandwidth.

    Args:
        program: Python arguments of each process, followed by rank, ranks, backend and a shared folder.
    """
    with tempfile.TemporaryDirectory() as place:
        # Without -P each rank would import what the working directory has; `python -m octavo` does so itself.
        safe = [] if str(Path.cwd()) in sys.path else ["-P"]
        commands = [[sys.executable, *safe, *program, str(rank), str(ranks), backend, place] for rank in range(ranks)]
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
            last = (errors[died[0]].read().strip().splitlines() or ["it died"])[-1]
            return Answers([f"rank {died[0]}: {last}"])
        if hung := [rank for rank, code in enumerate(codes) if code is None]:
            return Answers([f"no answer from rank {', '.join(map(str, hung))} in {timeout:g} seconds"])
        told = [json.loads((Path(place) / f"{rank}.json").read_text()) for rank in range(ranks)]
        return Answers([line for each in told for line in each["errors"]], min(each["gb_per_s"] for each in told))


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    """Wait until all have exited or one has failed; return exit codes, None if still running."""
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes) or time.monotonic() > end:
            return codes
        time.sleep(0.05)
