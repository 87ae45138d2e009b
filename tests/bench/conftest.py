"""Paths of helpers that tests of the benchmarks share with others; runs of a study are forks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))  # `ranks`


class Fork:
    """Stands for the `subprocess.Popen` of a run: a program would import PyTorch for longer than it trains."""

    def __init__(self, words: list[str], stdout: Any, ranks: int) -> None:
        from ranks import command

        self._process = command(words, stdout.name, ranks)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()


def start(command: list[str], *, stdout: Any, **options: Any) -> Fork:
    launcher, words = command[: command.index("octavo")], command[command.index("octavo") + 1 :]
    ranks = int(launcher[-2]) if "torch.distributed.run" in launcher else 1
    return Fork(words, stdout, ranks)


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    if torch.cuda.is_available():  # which survives no fork
        yield
        return
    import ranks

    from octavo_bench import reduce, study

    with pytest.MonkeyPatch.context() as patch:
        known = {"Popen": staticmethod(start), "STDOUT": subprocess.STDOUT}
        patch.setattr(study, "subprocess", type("subprocess", (), known))
        patch.setattr(reduce, "spawn", ranks.start_processes)
        yield
