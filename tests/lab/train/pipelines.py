"""One rank of several runs, one after the other, started with the environment of torchrun.

plain       as it is
resumed     from the checkpoint after step 4 of `plain`
struck      a weight of the last stage becomes NaN in step 4
v           as it is
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

from faults import failing, nan

from octavo._util.config_reader import read_file
from octavo.lab.train import checkpoint, train
from octavo.lab.train.config import RunConfig, assemble
from octavo.lab.train.train_state import TrainState


def run_all(*names: str) -> None:
    for name in names:
        run(Path(name))


def run(file: Path) -> None:
    config = assemble((str(file), read_file(file)))
    resumes = file.stem == "resumed"
    if resumes and os.environ["RANK"] == "0":  # the other one waits for it before the run begins
        go_back(config, file.with_name("plain"), 4)
    step = failing(nan, "1", 4) if file.stem == "struck" else TrainState.step
    with mock.patch.object(TrainState, "step", step):
        train(config, resume=resumes)


def go_back(config: RunConfig, other: Path, step: int) -> None:
    """Make the directory of a run that of another one after a step."""
    shutil.copytree(other, config.run.out)
    for path in checkpoint.find(config.run.out / "checkpoints"):
        if path.name > f"step-{step:06d}":
            shutil.rmtree(path)
