"""Run a function on several ranks, each a process of its own, and name the rank that fails.

    def check(rank: int, ranks: int, shift: float) -> torch.Tensor:    # of a test file
        ...                                                           # torch.distributed is ready: gloo, on the CPU

    results = run(check, 4, 0.5)                                       # one a rank

A rank that raises, dies or does not come back in time fails the test, with what it said; the others are ended.

`launch` does the same under the agent of torchrun, with its environment, restarts and signals.

Importing PyTorch takes a rank longer than most tests. So there is one process that imports, and ranks are forks of it;
but not where there is a GPU, which survives no fork. A pool of ranks that stay alive between tests would save nothing
more: a fork is ready in less than a tenth of a second, and a second run in the same ranks takes as long as the first.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import judged  # noqa: F401  before octavo.conversion
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SOURCES = Path(__file__).parents[2] / "src"
LAST_WORDS = 3000
"""Characters of a rank's output that are shown."""
IMPORTED = ["judged", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.pipelining"]
IMPORTED += [
    "octavo.distributed",
    "octavo.lab.models.llama",
    "octavo.optim",
    "octavo.lab.cli.train",
    "octavo.lab.train.run",
    "octavo.lab.train.console",
    "octavo.lab.train.export",
]
IMPORTED += ["torch._inductor.compile_fx", "sharded", "ranks", "pytest", "warm"]
"""What ranks have imported when they begin."""
_processes = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")


class RanksFailed(AssertionError):
    """What each rank that failed has to say."""


def refusal(kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any]) -> str:
    """Return what a call says that must raise one of these."""
    with pytest.raises(kinds) as error:
        call()
    return str(error.value)


def run(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 240) -> list[Any]:
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
        processes = _start(function, ranks, place, timeout)
        try:
            _wait(processes, time.monotonic() + timeout)
        finally:
            codes = [process.exitcode for process in processes]
            for process in processes:
                process.kill()
                process.join()
        failed = [_failure(rank, code, place, timeout) for rank, code in enumerate(codes) if code != 0]
        if failed:
            raise RanksFailed("\n".join(failed))
        return [torch.load(place / f"result{rank}") for rank in range(ranks)]


@dataclass(frozen=True)
class Ended:
    """Exit code, seconds and output of a job of several ranks."""

    code: int
    seconds: float
    out: str
    errors: str

    def lines(self, *, of: str = "octavo: error:") -> list[str]:
        return [line for line in self.errors.splitlines() if line.startswith(of)]


def launch(function: Callable[..., None], ranks: int, *arguments: Any, restarts: int = 0) -> Ended:
    """Run `function(*arguments)` in ranks that the agent of torchrun starts, watches and restarts.

    `arguments` can be pickled. A function that calls `sys.exit` ends its rank with that code, as a program does.
    """
    with tempfile.TemporaryDirectory() as directory, _server(), _own_signals():
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=restarts, run_id=str(uuid.uuid4()),
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method=_processes.get_start_method(),
            logs_specs=DefaultLogsSpecs(log_dir=directory, redirects=Std.ALL),
        )  # fmt: skip
        started, code = time.monotonic(), 0
        try:
            elastic_launch(config, _launched)(function.__code__.co_filename, function.__qualname__, arguments)
        except ChildFailedError:
            code = 1
        seconds = time.monotonic() - started
        out, errors = (
            "".join(file.read_text(errors="replace") for file in sorted(Path(directory).rglob(name)))
            for name in ("stdout.log", "stderr.log")
        )
        return Ended(code, seconds, out, errors)


def _launched(file: str, function: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    getattr(_module(file), function)(*arguments)


def command(words: Sequence[str], log: str, ranks: int = 1) -> BaseProcess:
    """Start `octavo` with these words, as a program with its output in a file, in a process that need not import it.

    Several ranks are forks of it, started by the agent of torchrun.
    """
    with _server():
        process = _processes.Process(target=_command, args=([*words], log, ranks))
        process.start()
    return process


def start_processes(function: Callable[..., None], arguments: tuple[Any, ...], nprocs: int) -> None:
    """Stand for `torch.multiprocessing.spawn`: the processes need not import PyTorch."""
    with _server():
        torch.multiprocessing.start_processes(function, arguments, nprocs, start_method=_processes.get_start_method())


def _command(words: list[str], log: str, ranks: int) -> None:
    with Path(log).open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if ranks == 1:
        _main(words)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=str(uuid.uuid4()), start_method="fork",
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, logs_specs=DefaultLogsSpecs(),
    )  # fmt: skip
    elastic_launch(config, _main)(words)


def _main(words: list[str]) -> None:
    from octavo.lab.cli.main import main

    torch.set_num_threads(1)
    sys.argv = ["octavo", *words]
    sys.exit(main(words))


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the signal handlers of this process, which the agent replaces."""
    kept = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)


@contextmanager
def _server() -> Iterator[None]:
    """Start the process that ranks are forked from, unless it runs already."""
    paths = [str(SOURCES), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    known = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with patch.dict(os.environ, known):
        if _processes.get_start_method() == "forkserver":
            _processes.set_forkserver_preload(IMPORTED)
            forkserver.ensure_running()  # here, because it keeps the paths that it begins with
        yield


def _start(function: Callable[..., Any], ranks: int, place: Path, timeout: float) -> list[BaseProcess]:
    told = (function.__code__.co_filename, function.__qualname__)
    with _server():
        processes = [
            _processes.Process(target=_rank, args=(*told, rank, ranks, place, timeout)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
    return processes


def _wait(processes: list[BaseProcess], deadline: float) -> None:
    """Wait until all are done, or one has failed and the others had two seconds to say what they think of it."""
    while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + 2)
        time.sleep(0.02)


def _failure(rank: int, code: int | None, place: Path, timeout: float) -> str:
    said = (place / f"output{rank}").read_text(errors="replace")[-LAST_WORDS:].rstrip()
    end = f"was not done when the others failed, or after {timeout:g} s" if code is None else f"ended with {code}"
    return f"--- rank {rank} {end}\n{said or '(no output)'}"


def _rank(file: str, function: str, rank: int, ranks: int, place: Path, timeout: float) -> None:
    """Be one rank; what it says goes into a file."""
    with (place / f"output{rank}").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(str(place / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    result = getattr(_module(file), function)(rank, ranks, *torch.load(place / "arguments"))
    torch.save(result, place / f"result{rank}")
    dist.barrier()  # none leaves while another still talks to it
    dist.destroy_process_group()


def _module(file: str) -> ModuleType:
    """Import a file of tests by its path."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
