"""`octavo` in a rank that fails: `faults.py FAULT RANK STEP train ...`, FAULT being kill, hang, raise or none.

After torchrun has started the ranks again, nothing fails.
"""

import os
import signal
import sys
import time

from octavo.cli.main import main
from octavo.train.lane import Lane


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(100)


def error():
    raise RuntimeError("a page of memory went missing")


FAULTS = {"kill": kill, "hang": hang, "raise": error, "none": None}


def failing(fault, rank, at):
    def step(self, *args, step, **kwargs):
        if os.environ["RANK"] == rank and step == at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            fault()
        return whole(self, *args, step=step, **kwargs)

    whole = Lane.step
    return step


if __name__ == "__main__":
    name, rank, at, *arguments = sys.argv[1:]
    if FAULTS[name] is not None:
        Lane.step = failing(FAULTS[name], rank, int(at))
    main(arguments)
