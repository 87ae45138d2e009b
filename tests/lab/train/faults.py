"""`octavo` in a rank that fails: `faults.py FAULT RANK STEP train ...`; `FAULTS` names the faults.

A `nan` strikes what the rank has of a weight, once: the step that is made again is well. After torchrun has started the
ranks again, nothing fails.
"""

import os
import signal
import sys
import time

import torch

from octavo.lab.cli.main import main
from octavo.lab.train.train_state import TrainState
from octavo.tensor import local


def kill(_):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(_):
    time.sleep(100)


def term(_):
    os.kill(os.getpid(), signal.SIGTERM)


def error(_):
    raise RuntimeError("a page of memory went missing")


def nan(lane, struck=[]):  # noqa: B006
    if not struck:
        struck.append(lane)
        local(lane.parameters["norm.weight"].data).fill_(torch.nan)


FAULTS = {"kill": kill, "hang": hang, "raise": error, "term": term, "nan": nan, "none": None}


def failing(fault, rank, at):
    def step(self, *args, step, **kwargs):
        if os.environ["RANK"] == rank and step == at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            fault(self)
        return whole(self, *args, step=step, **kwargs)

    whole = TrainState.step
    return step


def octavo(fault, rank, at, *arguments):
    """Run `octavo ARGUMENTS` with this fault in one rank."""
    if FAULTS[fault] is not None:
        TrainState.step = failing(FAULTS[fault], rank, int(at))
    main(arguments)


if __name__ == "__main__":
    octavo(*sys.argv[1:])
