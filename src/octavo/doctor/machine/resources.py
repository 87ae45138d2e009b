"""What a run needs beside a processor: shared memory, a disk, open files."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from octavo.doctor.check import Finding, check, failure, ok, skipped, warning
from octavo.doctor.subjects import Machine

GIB = 2**30
SHARED_GIB = 1.0
"""Below this NCCL, and workers that load data, run out. Containers often have 64 MiB."""
DISK_GIB = (1.0, 10.0)
"""Below the first a run cannot be written, below the second it may not."""
FILES = 1024
"""Open files that a run on eight GPUs stays below."""


@check(
    "shared memory",
    symptom="'Bus error', or NCCL says 'unhandled system error', in a container",
    remedy="Start the container with more: docker run --shm-size=8g, or --ipc=host.",
)
def shared_memory(machine: Machine) -> Finding:
    """Look at the size of /dev/shm."""
    return judge_shared(_size(Path("/dev/shm")))


def judge_shared(total: float | None) -> Finding:
    """Return the finding for so many GiB in all; None where there is no such place."""
    if total is None:
        return skipped("there is no /dev/shm")
    found = warning if total < SHARED_GIB else ok
    return found(f"/dev/shm has {total:.2f} GiB", total_gib=total)


@check(
    "disk",
    symptom="a run stops when it writes a checkpoint",
    remedy="Free some space, or write runs elsewhere: --out DIR.",
)
def disk(machine: Machine) -> Finding:
    """Look at what is free where runs are written."""
    folder = next(path for path in (machine.folder.absolute(), *machine.folder.absolute().parents) if path.exists())
    return judge_disk(shutil.disk_usage(folder).free / GIB)


def judge_disk(free: float) -> Finding:
    """Return the finding for so many GiB that are free."""
    found = failure if free < DISK_GIB[0] else warning if free < DISK_GIB[1] else ok
    return found(f"{free:.1f} GiB free where runs are written", free_gib=free)


@check(
    "open files",
    symptom="'Too many open files' on several GPUs",
    remedy=f"Raise the limit before you start: ulimit -n {16 * FILES}.",
)
def open_files(machine: Machine) -> Finding:
    """Look at how many files a process may open."""
    return judge_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def judge_files(limit: int) -> Finding:
    """Return the finding for a limit; -1 is none."""
    if limit == resource.RLIM_INFINITY:
        return ok("no limit")
    return (warning if limit < FILES else ok)(f"a process may open {limit}", limit=limit)


def _size(place: Path) -> float | None:
    return shutil.disk_usage(place).total / GIB if place.exists() else None
