"""How long a step waits for a checkpoint: until it is on the disk, or for its copy in the host's memory only.

Both are those of `octavo train` (`run.checkpoint_write`): the same tensors, checks and files. Steps that run while a
checkpoint is being written are timed beside others.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from torch import Tensor

from octavo.errors import RunError
from octavo.lab.memory.forecast import GIB
from octavo.lab.train import checkpoint
from octavo.lab.train.background import BackgroundWriter
from octavo.lab.train.parallel import SINGLE_PROCESS
from octavo.lab.train.timing import milliseconds, synchronize, warm_up
from octavo.optim import flatten
from octavo_bench.implementations import implementations
from octavo_bench.kind import TO_STDOUT, Kind, Output, device_named, known, positive
from octavo_bench.results import Row
from octavo_bench.timing import attempt
from octavo_bench.workloads import WORKLOADS, Training, Workload, build

IMPLEMENTATION = "octavo rotated_fast + fp8 head, octavo.optim"
"""Weights in BF16, exact states."""
WAIT, FIRST, LATER = "until it is written", "for a copy, the first", "for a copy, later ones"
KIND = Kind(
    name="checkpoints",
    keys={"workload": str, "way": str, "gib": float, "waits_s": float, "written_s": float, "step_ms": float},
    columns=(
        ("workload", "{workload}"),
        ("a step waits", "{way}"),
        ("GiB", "{gib:.1f}"),
        ("it waits, s", "{waits_s:.3f}"),
        ("times as long", "{share:.3f}"),
        ("written after, s", "{written_s:.1f}"),
        ("ms of a step", "{step_ms:.1f}"),
        ("of one while it is written", "{step_ms_meanwhile:.1f}"),
    ),
    names=2,
    session=("hardware", "workload"),
)


def bench_checkpoints(workload: Workload, device: str, folder: Path, repeats: int) -> Iterator[Row]:
    """Yield a row per way to wait; without a result a row has `error`.

    `waits_s` and `written_s` are medians, in seconds from the end of a step: until the next may begin, and until the
    checkpoint is on the disk. `share` is relative to the first row.

    Args:
        workload: a whole model.
        folder: for checkpoints; one is kept and one is written at a time.
        repeats: checkpoints per way, besides the first in the background.
    """
    training = build(workload, implementations(head=True)[IMPLEMENTATION], device, compile=device == "cuda")
    warm_up(training.step, device)
    tensors = _tensors(training)
    about: Row = {
        "workload": workload.name,
        "gib": round(sum(tensor.nbytes for tensor in tensors.values()) / GIB, 3),
        "step_ms": round(statistics.median(milliseconds(training.step, device, 10)), 3),
    }
    waited = attempt(about | {"way": WAIT}, partial(_median, partial(_wait, tensors, device, folder), repeats))
    yield waited | {"share": 1.0}
    writer = BackgroundWriter(SINGLE_PROCESS)
    copy = partial(_copy, writer, tensors, training, device, folder)
    for way, count in ((FIRST, 1), (LATER, repeats)):
        row = attempt(about | {"way": way}, partial(_median, copy, count))
        if "waits_s" in row and "waits_s" in waited:
            row["share"] = round(row["waits_s"] / waited["waits_s"], 4)
        yield row


def _tensors(training: Training) -> dict[str, Tensor]:
    """Return what a checkpoint holds of a model in training, under names that are checked for NaNs."""
    if training.optimizer is None:
        raise RunError("bench checkpoints: the workload has no optimizer, whose states a checkpoint holds.")
    states = flatten(training.optimizer.state_dict())[0]
    named = {f"model.{name}": tensor for name, tensor in training.model.state_dict().items()}
    return named | {f"optimizer.{name}": tensor for name, tensor in states.items()}


def _median(measure: Callable[[], Row], repeats: int) -> Row:
    measured = [measure() for _ in range(repeats)]
    return {key: round(statistics.median(row[key] for row in measured), 4) for key in measured[0]}


_numbers = itertools.count(1)


def _save(save: Callable[..., object], tensors: Mapping[str, Tensor], device: str, folder: Path) -> float:
    """Check and save as a run does; return the seconds until a step may go on."""
    synchronize(device)
    begun = time.perf_counter()
    if fault := checkpoint.first_non_finite(tensors):
        raise RunError(f"bench checkpoints: {fault}.")
    save(folder, next(_numbers), {"fp8": tensors}, {}, keep=1)
    return time.perf_counter() - begun


def _wait(tensors: Mapping[str, Tensor], device: str, folder: Path) -> Row:
    seconds = _save(checkpoint.save, tensors, device, folder)
    return {"waits_s": seconds, "written_s": seconds}


def _copy(
    writer: BackgroundWriter, tensors: Mapping[str, Tensor], training: Training, device: str, folder: Path
) -> Row:
    """Copy a checkpoint, and train until a thread has written it."""
    begun = time.perf_counter()
    waits = _save(writer.save, tensors, device, folder)
    steps: list[float] = []
    while writer.ended() is None:
        started = time.perf_counter()
        training.step()
        synchronize(device)
        steps.append(1e3 * (time.perf_counter() - started))
    found = {"waits_s": waits, "written_s": time.perf_counter() - begun}
    return found | ({"step_ms_meanwhile": statistics.median(steps)} if steps else {})


def command(
    *,
    workload: str = "llama-1b",
    device: str = "auto",
    repeats: int = 3,
    folder: Annotated[Path | None, Parameter(negative=())] = None,
    output: Output = TO_STDOUT,
) -> int:
    """Time how long a step of training waits for a checkpoint, written while it waits or in the background.

    Examples:

        octavo bench checkpoints
        octavo bench checkpoints --workload tiny-model --device cpu --repeats 1

    Parameters
    ----------
    workload
        A whole model: llama-1b, 175b or tiny-model.
    device
        cuda or cpu; auto takes the GPU if there is one.
    repeats
        Checkpoints per way.
    folder
        Directory that checkpoints are written in, and removed from; by default a temporary one.
    """
    whole = [name for name, one in WORKLOADS.items() if one.vocab]
    chosen = WORKLOADS[known("--workload", workload, whole, "whole model")]
    device, repeats = device_named(device), positive("--repeats", repeats)
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        rows = bench_checkpoints(chosen, device, Path(directory), repeats)
        return output.finish(KIND, rows, device=device, workload=workload, repeats=repeats, folder=folder)
