"""Paths of helpers that tests of the benchmarks share with others; runs of a study of one rank are forks."""

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
    """Stands for the `subprocess.Popen` of a run of one rank: a program would import PyTorch for longer than it trains.

    Runs of several ranks stay programs, under torchrun.
    """

    def __init__(self, words: list[str], stdout: Any) -> None:
        import ranks

        self._process = ranks.command(words, stdout.name)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()


def start(command: list[str], **options: Any) -> Any:
    if command[1:4] != ["-m", "octavo", "train"]:
        return subprocess.Popen(command, **options)
    return Fork(command[3:], options["stdout"])


@pytest.fixture(scope="session", autouse=True)
def forks_of_one_rank() -> Iterator[None]:
    from octavo_bench import study

    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():  # which survives no fork
            known = {"Popen": staticmethod(start), "STDOUT": subprocess.STDOUT}
            patch.setattr(study, "subprocess", type("subprocess", (), known))
        yield
