"""Studies: comparisons of runs of `octavo train`, each in its own process, one per GPU at a time.

Runs of one seed start from the same weights and see the same batches, so that only the variable of the study differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from cyclopts import Parameter

from octavo.errors import ConfigError, RunError
from octavo.lab.models.factory import model_name
from octavo.lab.train.files import read_metrics
from octavo_bench.evidence import over_sequences, stored_curve
from octavo_bench.implementations import BF16
from octavo_bench.results import Row


class Job(NamedTuple):
    """One run of a study."""

    keys: Row
    """Keys of its row that identify it, and of which its directory's name is made."""
    flags: tuple[str, ...]
    """Flags of `octavo train`, besides those shared by all runs."""
    beside: str = ""
    """Name of the reference run."""
    ranks: int = 1
    """Processes of the run; several are started by torchrun and see every GPU."""

    @property
    def name(self) -> str:
        """Name of its directory, below the study's, and in messages."""
        return "-".join(str(value).replace(", ", "-") for value in self.keys.values())

    @property
    def launcher(self) -> list[str]:
        """Python arguments before those of `octavo`."""
        if self.ranks == 1:
            return ["-m"]
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks), "-m"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Flags of a study's runs."""

    seeds: str = "0,1"
    """Seeds, separated by commas. Runs of one seed share weights and batches."""
    preset: str = "parity-cuda"
    """Preset of all runs."""
    steps: int | None = None
    """Steps of each run, in place of the preset's."""
    slots: int | None = None
    """Processes at a time; by default one per GPU."""

    @property
    def given(self) -> Row:
        """Flags that repeat the measurement."""
        return {"seeds": self.seeds, "preset": self.preset, "steps": self.steps}

    def rows(self, jobs: Sequence[Job], out: Path, report: Callable[[str], None]) -> list[Row]:
        """Make every run and return its row."""
        shared = ["--preset", self.preset, *(["--steps", str(self.steps)] if self.steps else [])]
        return run_all(jobs, shared, out=out, slots=self.slots or max(torch.cuda.device_count(), 1), report=report)


RUNS = Runs()


@dataclass
class _Worker:
    job: Job
    slots: list[int]
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
) -> list[Row]:
    """Make every run, those of one rank first, as they run concurrently; return their rows in the order of `jobs`.

    Finished runs in `out` are not repeated: a study resumes where it stopped, or is extended.

    Args:
        arguments: flags of `octavo train` shared by all runs (`--preset`, `--steps`, ...).
        out: directory for the runs, with a subdirectory for each.
        slots: concurrent processes; a run of one rank in slot i sees only GPU i, or shares one if there are fewer.
        report: called with a line of progress.

    Raises:
        RunError: a run failed; the message quotes its last line of output. The others are stopped.
        ConfigError: `out` holds runs made with other arguments.
    """
    _claim(out, arguments)
    unmade = (job for job in jobs if not (out / job.name / "summary.json").exists())
    waiting = sorted(unmade, key=lambda job: job.ranks)
    running: list[_Worker] = []
    free = list(range(slots))
    try:
        while waiting or running:
            while waiting and len(free) >= (wanted := min(waiting[0].ranks, slots)):
                running.append(_start(waiting.pop(0), free[:wanted], arguments, out))
                del free[:wanted]
                report(f"{running[-1].job.name}: started")
            time.sleep(0.5)
            for worker in [w for w in running if w.process.poll() is not None]:
                running.remove(worker)
                free += worker.slots
                report(_finish(worker))
    finally:
        for worker in running:
            worker.process.terminate()
    return [_row(job, out) for job in jobs]


def _claim(out: Path, arguments: Sequence[str]) -> None:
    """Record the shared flags of a directory's runs, or check that they are unchanged."""
    study = out / "study.json"
    if not study.exists():
        out.mkdir(parents=True, exist_ok=True)
        study.write_text(json.dumps(list(arguments)), encoding="utf-8")
    elif json.loads(study.read_text(encoding="utf-8")) != list(arguments):
        raise ConfigError(f"{out}: holds a study with other settings ({study}). Name another directory with --out.")


def _start(job: Job, slots: list[int], arguments: Sequence[str], out: Path) -> _Worker:
    run = out / job.name
    run.mkdir(parents=True, exist_ok=True)
    flags = [*job.flags, "--out", str(run), "--no-baseline", "--overwrite"]
    with (run / "output.log").open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *job.launcher, "octavo", "train", *arguments, *flags],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(_one_gpu(slots[0]) if job.ranks == 1 else {})},
        )
    return _Worker(job=job, slots=slots, process=process, run=run)


def _one_gpu(slot: int) -> dict[str, str]:
    """Return the environment that restricts a process to one of the GPUs visible to this one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count()))) or "0"
    names = visible.split(",")
    return {"CUDA_VISIBLE_DEVICES": names[slot % len(names)]}


def _finish(worker: _Worker) -> str:
    seconds = time.monotonic() - worker.started
    if worker.process.returncode:
        log = (worker.run / "output.log").read_text(encoding="utf-8", errors="replace")
        lines = log.strip().splitlines() or ["(no output)"]
        last = next((line for line in lines if line.startswith("octavo: error")), lines[-1])  # torchrun's come after it
        raise RunError(f"{worker.job.name}: exit code {worker.process.returncode}. Its last line: {last}")
    summary, _ = _read(worker.run)
    loss = summary.get("heldout_loss_fp8") or summary["heldout_loss_bf16"]
    return f"{worker.job.name}: held-out loss {loss:.4f} after {seconds:.0f} s"


def _read(run: Path) -> tuple[Row, Row]:
    """Return the summary and the configuration of a finished run."""
    summary, config = (json.loads((run / name).read_text(encoding="utf-8")) for name in ("summary.json", "config.json"))
    return summary, config


def _heldout(run: Path) -> list[float]:
    """Return a finished run's loss on each held-out sequence, nats per token."""
    [losses] = json.loads((run / "heldout.json").read_text(encoding="utf-8")).values()
    return list(losses)


def _row(job: Job, out: Path) -> Row:
    """Return the row of a finished run.

    `gap` and `gap_95`, if the reference run exists: held-out loss minus that of the reference, in nats, and half width
    of the 95 % interval over sequences.
    """
    run = out / job.name
    summary, config = _read(run)
    recipe = config["run"]["recipe"]
    lane = BF16 if recipe == BF16 else "fp8"
    lines = [line.get(f"loss_{lane}") for line in read_metrics(run / "metrics.jsonl")]
    row = {
        "model": model_name(config["model"]["architecture"], summary["parameters"]),
        "tokens": summary["tokens"],
        "recipe": recipe,
        **job.keys,
        "heldout_loss": summary[f"heldout_loss_{lane}"],
        "perplexity": summary[f"perplexity_{lane}"],
        "step_ms": summary[f"step_milliseconds_{lane}"],
        **{key: summary[key] for key in ("tokens_per_second", "fp8_gemms", "fallbacks", "unigram_entropy")},
        "heldout_tokens": config["run"]["eval_tokens"],
        "corpus_tokens": summary["corpus"].get("train_tokens"),
        "training_loss": stored_curve(torch.tensor([x for x in lines if x is not None], dtype=torch.float64)),
    }
    if not (job.beside and (out / job.beside / "heldout.json").exists()):
        return row
    gap = over_sequences(_heldout(run), _heldout(out / job.beside))
    return row | {"gap": gap.mean} | ({} if gap.half_width is None else {"gap_95": gap.half_width})


# --- parts of the tables ---------------------------------------------------------------------------------------------


def by_seed(rows: Sequence[Row]) -> dict[int, float]:
    """Return the held-out losses of rows by seed."""
    return {row["seed"]: row["heldout_loss"] for row in rows}


def seed_titles(seeds: Sequence[int]) -> list[str]:
    """Return the titles of `seed_cells`."""
    return [*(f"seed {seed}" for seed in seeds), "mean"]


def seed_cells(losses: Mapping[int, float], seeds: Sequence[int]) -> list[str]:
    """Return the losses of each seed, and their mean."""
    return [*(f"{losses[seed]:.4f}" if seed in losses else "" for seed in seeds), f"{fmean(losses.values()):.4f}"]


def mean_cell(rows: Sequence[Row], key: str, form: str) -> str:
    """Return the mean of a key over the rows that have it; `gap_95` is in percent of their loss."""
    values = [row[key] * (100 / row["heldout_loss"] if key == "gap_95" else 1) for row in rows if key in row]
    return form.format(fmean(values)) if values else ""
