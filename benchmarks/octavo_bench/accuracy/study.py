"""Runs of `octavo train` that are compared: each in a process of its own, one a GPU, as many at a time as there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from octavo.errors import ConfigError, RunError


class Job(NamedTuple):
    """One run of a study."""

    name: str
    """Of its directory, below the study's, and in messages."""
    flags: tuple[str, ...]
    """Of `octavo train`, beside those that all runs share."""


@dataclass
class _Worker:
    job: Job
    slot: int
    process: subprocess.Popen[bytes]
    run: Path
    started: float = field(default_factory=time.monotonic)


def run_all(
    jobs: Sequence[Job],
    arguments: Sequence[str],
    *,
    out: Path,
    slots: int = 1,
    report: Callable[[str], None] = print,
) -> None:
    """Make every run, in the order of the list.

    Runs that `out` already holds, finished, are not made again: a study goes on where it stopped, or takes in more.

    Args:
        arguments: flags of `octavo train` that all runs share (`--preset`, `--steps`, ...).
        out: directory for the runs, one below it for each.
        slots: runs at a time; slot i sees GPU i alone, where there are GPUs.
        report: called with a line of progress.

    Raises:
        RunError: a run failed; the message quotes the last line it printed. The others are stopped.
        ConfigError: `out` holds runs made with other arguments.
    """
    _claim(out, arguments)
    waiting = [job for job in jobs if not (out / job.name / "summary.json").exists()]
    running: list[_Worker] = []
    free = list(range(slots))
    try:
        while waiting or running:
            while waiting and free:
                running.append(_start(waiting.pop(0), free.pop(0), arguments, out))
                report(f"{running[-1].job.name}: started")
            time.sleep(0.5)
            for worker in [w for w in running if w.process.poll() is not None]:
                running.remove(worker)
                free.append(worker.slot)
                report(_finish(worker))
    finally:
        for worker in running:
            worker.process.terminate()


def _claim(out: Path, arguments: Sequence[str]) -> None:
    """Write down what the runs of this directory share, or see that it is the same."""
    study = out / "study.json"
    if not study.exists():
        out.mkdir(parents=True, exist_ok=True)
        study.write_text(json.dumps(list(arguments)), encoding="utf-8")
    elif json.loads(study.read_text(encoding="utf-8")) != list(arguments):
        raise ConfigError(f"{out}: holds a study with other settings ({study}). Name another directory with --out.")


def _start(job: Job, slot: int, arguments: Sequence[str], out: Path) -> _Worker:
    run = out / job.name
    run.mkdir(parents=True, exist_ok=True)
    flags = [*job.flags, "--out", str(run), "--no-twin", "--overwrite"]
    with (run / "output.log").open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "octavo", "train", *arguments, *flags],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(slot)},
        )
    return _Worker(job=job, slot=slot, process=process, run=run)


def _finish(worker: _Worker) -> str:
    seconds = time.monotonic() - worker.started
    if worker.process.returncode:
        log = (worker.run / "output.log").read_text(encoding="utf-8", errors="replace")
        last = (log.strip().splitlines() or ["(no output)"])[-1]
        raise RunError(f"{worker.job.name}: exit code {worker.process.returncode}. Its last line: {last}")
    summary, _ = read_run(worker.run)
    loss = summary.get("heldout_loss_fp8") or summary["heldout_loss_bf16"]
    return f"{worker.job.name}: held-out loss {loss:.4f} after {seconds:.0f} s"


def read_run(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the summary and the configuration of a finished run."""
    summary, config = (json.loads((run / name).read_text(encoding="utf-8")) for name in ("summary.json", "config.json"))
    return summary, config


def heldout_losses(run: Path, lane: str) -> list[float]:
    """Return a finished run's loss on each held-out sequence, nats a token."""
    losses: list[float] = json.loads((run / "heldout.json").read_text(encoding="utf-8"))[lane]
    return losses
