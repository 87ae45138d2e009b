"""Run a function on several ranks, each a process of its own, and name the rank that fails.

    def check(rank: int, ranks: int, shift: float) -> torch.Tensor:    # of a test file
        ...                                                           # torch.distributed is ready: gloo, on the CPU

    results = run(check, 4, 0.5)                                       # one a rank

A rank that raises, dies or does not come back in time fails the test, with what it said; the others are ended.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

SOURCES = Path(__file__).parents[2] / "src"
LAST_WORDS = 3000
"""Characters of a rank's output that are shown."""


class RanksFailed(AssertionError):
    """What each rank that failed has to say."""


def refusal(kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> str:
    """Return what a call says that must raise one of these."""
    with pytest.raises(kinds) as error:
        call()
    return str(error.value)


def run(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 120) -> list[Any]:
    """Return `function(rank, ranks, *arguments)` of each rank.

    Args:
        function: at the top level of its file.
        arguments: tensors, numbers, texts, and lists and dicts of them; so are results.
        timeout: seconds for all of it, the start of the processes included.

    Raises:
        RanksFailed: a rank raised, died or was not done in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        torch.save(arguments, place / "arguments")
        name = f"{function.__code__.co_filename}::{function.__qualname__}"
        processes = [_start(name, rank, ranks, place, timeout) for rank in range(ranks)]
        try:
            _wait(processes, time.monotonic() + timeout)
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                process.kill()
                process.wait()
        failed = [_failure(rank, code, place, timeout) for rank, code in enumerate(codes) if code != 0]
        if failed:
            raise RanksFailed("\n".join(failed))
        return [torch.load(place / f"result{rank}") for rank in range(ranks)]


def _start(name: str, rank: int, ranks: int, place: Path, timeout: float) -> subprocess.Popen[bytes]:
    paths = [str(SOURCES), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    known = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, __file__, name, str(rank), str(ranks), str(place), str(timeout)]
    with (place / f"output{rank}").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=known)


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Wait until all are done, or one has failed and the others had two seconds to say what they think of it."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + 2)
        time.sleep(0.02)


def _failure(rank: int, code: int | None, place: Path, timeout: float) -> str:
    said = (place / f"output{rank}").read_text(errors="replace")[-LAST_WORDS:].rstrip()
    end = f"was not done when the others failed, or after {timeout:g} s" if code is None else f"ended with {code}"
    return f"--- rank {rank} {end}\n{said or '(no output)'}"


def _child(name: str, rank: int, ranks: int, place: Path, timeout: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(str(place / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    file, _, function_name = name.rpartition("::")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = getattr(module, function_name)(rank, ranks, *torch.load(place / "arguments"))
    torch.save(result, place / f"result{rank}")
    dist.barrier()  # none leaves while another still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    _child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), float(sys.argv[5]))
