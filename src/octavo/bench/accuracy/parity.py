"""Parity: train one model by several recipes with several seeds and compare the held-out losses.

Each (recipe, seed) is a run of its own in a process of its own, one a GPU, as many at a time as there are GPUs. Runs
of one seed start from the same weights and see the same batches, so that the recipe is all that differs; the spread
between the seeds in BF16 says what a difference means. `add_evidence` sets the finished runs side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.accuracy.curves import equal_loss, read_curve
from octavo.bench.accuracy.paired import over_sequences
from octavo.errors import ConfigError, RunError
from octavo.train.files import read_metrics

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training run of a parity study."""

    recipe: str
    seed: int
    out: Path

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.recipe} seed {self.seed}"


@dataclass
class _Worker:
    job: Job
    slot: int
    process: subprocess.Popen[bytes]
    log: Path
    started: float = field(default_factory=time.monotonic)


def run_parity(
    arguments: Sequence[str],
    recipes: Sequence[str],
    seeds: Sequence[int],
    *,
    out: Path,
    slots: int = 1,
    report: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Run `octavo train` for every recipe and seed and return one row each, as the result kind `parity` has them.

    Runs that `out` already holds, finished, are not made again: a study goes on where it stopped, or takes in more
    seeds.

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
    jobs = [Job(recipe=recipe, seed=seed, out=out / f"{recipe}-{seed}") for seed in seeds for recipe in recipes]
    waiting = [job for job in jobs if not (job.out / "summary.json").exists()]
    running: list[_Worker] = []
    free = list(range(slots))
    try:
        while waiting or running:
            while waiting and free:
                running.append(_start(waiting.pop(0), free.pop(0), arguments))
                report(f"{running[-1].job.label}: started")
            time.sleep(0.5)
            for worker in [w for w in running if w.process.poll() is not None]:
                running.remove(worker)
                free.append(worker.slot)
                report(_finish(worker))
    finally:
        for worker in running:
            worker.process.terminate()
    return [_row(job) for job in jobs]


def _claim(out: Path, arguments: Sequence[str]) -> None:
    """Write down what the runs of this directory share, or see that it is the same."""
    study = out / "study.json"
    if not study.exists():
        out.mkdir(parents=True, exist_ok=True)
        study.write_text(json.dumps(list(arguments)), encoding="utf-8")
    elif json.loads(study.read_text(encoding="utf-8")) != list(arguments):
        raise ConfigError(f"{out}: holds a study with other settings ({study}). Name another directory with --out.")


def _start(job: Job, slot: int, arguments: Sequence[str]) -> _Worker:
    job.out.mkdir(parents=True, exist_ok=True)
    flags = [
        "--recipe",
        job.recipe,
        "--seed",
        str(job.seed),
        "--out",
        str(job.out),
        "--no-twin",
        "--overwrite",
    ]
    command = [sys.executable, "-m", "octavo", "train", *arguments, *flags]
    log = job.out / "output.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(slot)},
        )
    return _Worker(job=job, slot=slot, process=process, log=log)


def _finish(worker: _Worker) -> str:
    seconds = time.monotonic() - worker.started
    if worker.process.returncode:
        lines = worker.log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["(no output)"]
        raise RunError(f"{worker.job.label}: exit code {worker.process.returncode}. Its last line: {lines[-1]}")
    return f"{worker.job.label}: held-out loss {_row(worker.job)['heldout_loss']:.4f} after {seconds:.0f} s"


def _row(job: Job) -> dict[str, Any]:
    summary = json.loads((job.out / "summary.json").read_text(encoding="utf-8"))
    config = json.loads((job.out / "config.json").read_text(encoding="utf-8"))
    lane = "bf16" if job.recipe == "bf16" else "fp8"
    return {
        "model": model_name(config["model"]["architecture"], summary["parameters"]),
        "tokens": summary["tokens"],
        "recipe": job.recipe,
        "seed": job.seed,
        "heldout_loss": summary[f"heldout_loss_{lane}"],
        "perplexity": summary[f"perplexity_{lane}"],
        "step_ms": summary[f"step_milliseconds_{lane}"],
        "tokens_per_second": summary["tokens_per_second"],
        "fp8_gemms": summary["fp8_gemms"],
        "fallbacks": summary["fallbacks"],
        "unigram_entropy": summary["unigram_entropy"],
        "heldout_tokens": config["run"]["eval_tokens"],
        "corpus_tokens": summary["corpus"].get("train_tokens"),
    }


def add_evidence(
    rows: Sequence[dict[str, Any]], out: Path, *, report: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Return the rows of `run_parity` with what sets each recipe beside BF16 of the same seed.

    Rows of BF16, and of seeds that BF16 was not trained with, stay as they are. The others take

        gap, gap_95                 held-out loss less BF16's, in nats; half of its 95 % interval over sequences
        tokens_ratio                tokens it needs for BF16's loss, in units of what BF16 needs (`curves`)
        loss_matched_speedup        time that BF16 needs for that loss, in units of what it needs itself
        cosine_...                  of gradients (`gradients`), measured once, with the first such seed

    Args:
        out: the directory of the runs.
    """
    bf16 = {row["seed"]: row for row in rows if row["recipe"] == "bf16"}
    compared = [row for row in rows if row["recipe"] != "bf16" and row["seed"] in bf16]
    cosines: dict[str, dict[str, Any]] = {}
    if compared:
        from octavo.bench.accuracy.gradients import gradient_cosines

        seed = compared[0]["seed"]
        report(f"gradients at the weights of bf16 seed {seed}")
        cosines = dict(gradient_cosines(out / f"bf16-{seed}", list(dict.fromkeys(row["recipe"] for row in compared))))
    beside = {id(row): _beside(row, bf16[row["seed"]], out) | cosines[row["recipe"]] for row in compared}
    return [row | beside.get(id(row), {}) for row in rows]


def _beside(row: Row, bf16: Row, out: Path) -> Row:
    mine, reference = out / f"{row['recipe']}-{row['seed']}", out / f"bf16-{row['seed']}"
    gap = over_sequences(_heldout(mine, "fp8"), _heldout(reference, "bf16"))
    equal = equal_loss(
        read_curve(read_metrics(mine / "metrics.jsonl"), "fp8"),
        read_curve(read_metrics(reference / "metrics.jsonl"), "bf16"),
    )
    return {
        "gap": gap.mean,
        **({} if gap.half_width is None else {"gap_95": gap.half_width}),
        "equal_loss": equal.loss,
        "tokens_ratio": equal.tokens_ratio,
        "loss_matched_speedup": bf16["step_ms"] / row["step_ms"] / equal.tokens_ratio,
    }


def _heldout(run: Path, lane: str) -> list[float]:
    losses: list[float] = json.loads((run / "heldout.json").read_text(encoding="utf-8"))[lane]
    return losses


def gap_curves(out: Path, rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Return for each recipe how its smoothed training loss less that of BF16 goes, by tokens, with the first seed."""
    seeds = {row["recipe"]: row["seed"] for row in reversed(rows) if "gap" in row}
    gaps = {}
    for recipe, seed in reversed(seeds.items()):
        mine = read_curve(read_metrics(out / f"{recipe}-{seed}" / "metrics.jsonl"), "fp8")
        reference = read_curve(read_metrics(out / f"bf16-{seed}" / "metrics.jsonl"), "bf16")
        pairs = zip(mine.tokens, mine.loss, reference.loss, strict=False)
        gaps[recipe] = [(tokens, a - b) for tokens, a, b in pairs]
    return gaps


def model_name(architecture: str, parameters: int) -> str:
    """Return a short name of a model: `llama-129m`."""
    return (
        f"{architecture}-{round(parameters / 1e6)}m"
        if parameters >= 1e6
        else f"{architecture}-{round(parameters / 1e3)}k"
    )


def curves(out: Path, recipes: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the logged training loss of every run, one row each: recipe, seed, steps and losses."""
    rows = []
    for recipe in recipes:
        for seed in seeds:
            lines = (out / f"{recipe}-{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            logged = [line for line in map(json.loads, lines) if "step" in line]
            key = "loss_bf16" if recipe == "bf16" else "loss_fp8"
            points = [(line["step"], round(line[key], 4)) for line in logged if line.get(key) is not None]
            rows.append(
                {
                    "recipe": recipe,
                    "seed": seed,
                    "steps": [p[0] for p in points],
                    "loss": [p[1] for p in points],
                }
            )
    return rows
