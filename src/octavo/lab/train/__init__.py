"""Training: an FP8 model and its BF16 baseline on the same batches, with checkpoints that resume bit for bit.

A run, in the order in which it is set up and makes a step:

    config          run file, presets and flags, read strictly; `schedule`: learning rate by step
    parallel        ranks, mesh and collectives; `parallel_checks`: combinations that are refused; `sharding` of a model
    setup           text, models and plan of a run; `device`
    train_state     one model and its optimizer: forward, backward, update
                    (`loss_scale`, `param_groups`, `replay` of CUDA graphs, `pipelined` over several ranks)
    guarding        the state of a run, which makes its steps and guardrails roll back
    run             `train`: the loop over that state (`octavo.lab.loop`), put together
    parts           the parts of the loop, a duty each; `stopping`: signals
    evaluate        held-out losses

Files of a run:

    directory       lock of the run's directory, nothing overwritten by accident
    checkpoint      format of a checkpoint; `state_tensors`: a model in training as named tensors
    resume          content of a run's checkpoints, and how a run continues from one
    files           `metrics.jsonl` and JSON documents
    inputs          copies of the recipe and calibration files that it was given

What a run reports:

    events          from the loop to its reporters; `log` emits them, keeps totals, and writes the summary (`summary`)
    record          reporter that writes `run.sqlite`; `console`: terminal, with `plot`
    batches         drift of batches and of sources of the text

For other commands: `opening` (a run, a run file or a user's model: the one door to a `subject`; `own_model`),
`calibrate`, `memory` (forecast), `timing` and `profile`.

`RunConfig` needs no torch; the other names are loaded on first use, so that the command line starts quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo._util.lazy import lazy
from octavo.lab.train.config import RunConfig

if TYPE_CHECKING:
    from octavo.lab.train.loss_scale import LossScale
    from octavo.lab.train.run import train

__all__ = ["LossScale", "RunConfig", "train"]

__getattr__ = lazy(__name__, {"loss_scale": "LossScale", "run": "train"})
