"""Studies: runs of `octavo train` that are compared, each in a process of its own, one per GPU at a time.

`compare` trains one model by several recipes and seeds. Runs of one seed start from the same weights and see the same
batches, so that only the recipe differs; the spread between BF16's seeds says how much a difference means. `tiers`
trains one with every tier of optimizer states. Weights are kept in BF16 beside the optimizer's master; the last two
tiers keep everything in FP8: weights and gradients too. `data_parallel` trains one on one GPU and sharded over several.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cyclopts import Parameter

from octavo.errors import ConfigError, RunError
from octavo.models.factory import model_name
from octavo.recipes import load as load_recipe
from octavo.train.files import read_metrics
from octavo_bench.cli import TO_STDOUT, Names, Output, command_line, known, numbers
from octavo_bench.evidence import equal_loss, over_sequences, read_curve, stored_curve
from octavo_bench.measured import data_parallel_of, parity_of, tiers_of
from octavo_bench.results import Row


class Job(NamedTuple):
    """One run of a study."""

    name: str
    """Name of its directory, below the study's, and in messages."""
    flags: tuple[str, ...]
    """Flags of `octavo train`, beside those that all runs share."""
    ranks: int = 1
    """Processes of the run; several are started by torchrun and see every GPU."""

    @property
    def launcher(self) -> list[str]:
        """The Python arguments in front of `octavo`'s."""
        if self.ranks == 1:
            return ["-m"]
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks), "-m"]


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
) -> None:
    """Make every run, in the order of the list.

    Runs that `out` already holds, finished, are not made again: a study goes on where it stopped, or takes in more.

    Args:
        arguments: flags of `octavo train` that all runs share (`--preset`, `--steps`, ...).
        out: directory for the runs, one below it for each.
        slots: processes at a time; a run of one rank in slot i sees GPU i alone, or shares one if there are fewer.
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


def _claim(out: Path, arguments: Sequence[str]) -> None:
    """Record the shared flags of a directory's runs, or check that they are the same."""
    study = out / "study.json"
    if not study.exists():
        out.mkdir(parents=True, exist_ok=True)
        study.write_text(json.dumps(list(arguments)), encoding="utf-8")
    elif json.loads(study.read_text(encoding="utf-8")) != list(arguments):
        raise ConfigError(f"{out}: holds a study with other settings ({study}). Name another directory with --out.")


def _start(job: Job, slots: list[int], arguments: Sequence[str], out: Path) -> _Worker:
    run = out / job.name
    run.mkdir(parents=True, exist_ok=True)
    flags = [*job.flags, "--out", str(run), "--no-twin", "--overwrite"]
    with (run / "output.log").open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *job.launcher, "octavo", "train", *arguments, *flags],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(_one_gpu(slots[0]) if job.ranks == 1 else {})},
        )
    return _Worker(job=job, slots=slots, process=process, run=run)


def _one_gpu(slot: int) -> dict[str, str]:
    """Return the variable that shows a process one of the GPUs that this one sees."""
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
    summary, _ = read_run(worker.run)
    loss = summary.get("heldout_loss_fp8") or summary["heldout_loss_bf16"]
    return f"{worker.job.name}: held-out loss {loss:.4f} after {seconds:.0f} s"


def read_run(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the summary and the configuration of a finished run."""
    summary, config = (json.loads((run / name).read_text(encoding="utf-8")) for name in ("summary.json", "config.json"))
    return summary, config


def heldout_losses(run: Path, lane: str) -> list[float]:
    """Return a finished run's loss on each held-out sequence, nats per token."""
    losses: list[float] = json.loads((run / "heldout.json").read_text(encoding="utf-8"))[lane]
    return losses


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

    Args:
        arguments: flags of `octavo train` that all runs share (`--preset`, `--steps`, ...).
        out, slots, report: as for `run_all`.

    Raises:
        RunError, ConfigError: as `run_all`.
    """
    pairs = [(recipe, seed) for seed in seeds for recipe in recipes]
    jobs = [Job(f"{recipe}-{seed}", ("--recipe", recipe, "--seed", str(seed))) for recipe, seed in pairs]
    run_all(jobs, arguments, out=out, slots=slots, report=report)
    return [_parity_row(recipe, seed, out / job.name) for (recipe, seed), job in zip(pairs, jobs, strict=True)]


def _parity_row(recipe: str, seed: int, run: Path) -> Row:
    summary, lane = read_run(run)[0], "bf16" if recipe == "bf16" else "fp8"
    keys = ("tokens_per_second", "fp8_gemms", "unigram_entropy")
    more = {"perplexity": summary[f"perplexity_{lane}"], "corpus_tokens": summary["corpus"].get("train_tokens")}
    return {**_row(run, lane), "recipe": recipe, "seed": seed, **{key: summary[key] for key in keys}, **more}


def _row(run: Path, lane: str) -> Row:
    """Return the keys of every study's rows."""
    summary, config = read_run(run)
    return {
        "model": model_name(config["model"]["architecture"], summary["parameters"]),
        "tokens": summary["tokens"],
        "heldout_loss": summary[f"heldout_loss_{lane}"],
        "step_ms": summary[f"step_milliseconds_{lane}"],
        "fallbacks": summary["fallbacks"],
        "heldout_tokens": config["run"]["eval_tokens"],
    }


def _gap(losses: Sequence[float], reference: Sequence[float]) -> Row:
    """Return the held-out loss less the reference's, in nats, and half of its 95 % interval over sequences."""
    gap = over_sequences(losses, reference)
    return {"gap": gap.mean} | ({} if gap.half_width is None else {"gap_95": gap.half_width})


def add_evidence(
    rows: Sequence[dict[str, Any]], out: Path, *, report: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Return the rows of `run_parity` with the evidence on each recipe against BF16 of the same seed.

    Rows of BF16, and of seeds that BF16 was not trained with, stay as they are. The others take

        gap, gap_95                 held-out loss less BF16's, in nats; half of its 95 % interval over sequences
        tokens_ratio                tokens it needs for BF16's loss, in units of BF16's (`equal_loss`)
        loss_matched_speedup        time that BF16 needs for that loss, in units of its own
        cosine_...                  of gradients (`gradient_cosines`), measured once, with the first such seed

    Args:
        out: the directory of the runs.
    """
    bf16 = {row["seed"]: row for row in rows if row["recipe"] == "bf16"}
    compared = [row for row in rows if row["recipe"] != "bf16" and row["seed"] in bf16]
    cosines: dict[str, dict[str, Any]] = {}
    if compared:
        from octavo_bench.evidence import gradient_cosines

        seed = compared[0]["seed"]
        report(f"gradients at the weights of bf16 seed {seed}")
        cosines = dict(gradient_cosines(out / f"bf16-{seed}", list(dict.fromkeys(row["recipe"] for row in compared))))
    beside = {id(row): _beside(row, bf16[row["seed"]], out) | cosines[row["recipe"]] for row in compared}
    return [row | beside.get(id(row), {}) for row in rows]


def _beside(row: Row, bf16: Row, out: Path) -> Row:
    mine, reference = out / f"{row['recipe']}-{row['seed']}", out / f"bf16-{row['seed']}"
    equal = equal_loss(
        read_curve(read_metrics(mine / "metrics.jsonl"), "fp8"),
        read_curve(read_metrics(reference / "metrics.jsonl"), "bf16"),
    )
    return {
        **_gap(heldout_losses(mine, "fp8"), heldout_losses(reference, "bf16")),
        "equal_loss": equal.loss,
        "tokens_ratio": equal.tokens_ratio,
        "loss_matched_speedup": bf16["step_ms"] / row["step_ms"] / equal.tokens_ratio,
    }


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


def curves(out: Path, recipes: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the logged training loss of every run, one row each: recipe, seed, steps and losses."""
    rows = []
    for recipe, seed in product(recipes, seeds):
        key = "loss_bf16" if recipe == "bf16" else "loss_fp8"
        logged = read_metrics(out / f"{recipe}-{seed}" / "metrics.jsonl")
        points = [(line["step"], round(line[key], 4)) for line in logged if line.get(key) is not None]
        steps, loss = ([*column] for column in zip(*points, strict=True))
        rows.append({"recipe": recipe, "seed": seed, "steps": steps, "loss": loss})
    return rows


PEER = "fp32"
"""The baseline."""
_ALL_FP8 = ("--weights", "fp8", "--gradients", "fp8")
TIERS: dict[str, tuple[str, ...]] = {
    PEER: ("--weights", "bf16", "--states", "fp32"),
    "exact": ("--weights", "bf16", "--states", "exact"),
    "fp8-lm": ("--weights", "bf16", "--states", "fp8-lm"),
    "fp8": ("--weights", "bf16", "--states", "fp8"),
    "fp8-min": ("--weights", "bf16", "--states", "fp8-min"),
    "fp8, all": (*_ALL_FP8, "--states", "fp8"),
    "fp8-min, all": (*_ALL_FP8, "--states", "fp8-min"),
}
"""Flags of `octavo train` by name. `all`: weights and gradients in FP8, too."""


def run_tiers(
    arguments: Sequence[str],
    tiers: Sequence[str],
    seeds: Sequence[int],
    *,
    out: Path,
    slots: int = 1,
    report: Callable[[str], None] = print,
) -> list[Row]:
    """Run `octavo train` for every tier and seed and return one row each, as the result kind `tiers` has them.

    Rows of seeds that `fp32` was trained with, too, have `gap` and `gap_95`: held-out loss less its, in nats, and half
    of the 95 % interval over sequences.

    Args:
        arguments: flags of `octavo train` that all runs share (`--preset`, `--steps`, ...).
        tiers: names in `TIERS`.
        out, slots, report: as for `run_all`.

    Raises:
        ConfigError: an unknown tier, or as `run_all`.
        RunError: as `run_all`.
    """
    for name in tiers:
        known("--states", name, list(TIERS), "tier")
    pairs = [(tier, seed) for seed in seeds for tier in tiers]
    jobs = [Job(_folder(tier, seed), (*TIERS[tier], "--seed", str(seed))) for tier, seed in pairs]
    run_all(jobs, arguments, out=out, slots=slots, report=report)
    return [_tier_row(tier, seed, out) for tier, seed in pairs]


def _folder(tier: str, seed: int) -> str:
    return f"{tier.replace(', ', '-')}-{seed}"


def _tier_row(tier: str, seed: int, out: Path) -> Row:
    run, peer = out / _folder(tier, seed), out / _folder(PEER, seed)
    row = {**_row(run, "fp8"), "recipe": read_run(run)[1]["run"]["recipe"], "states": tier, "seed": seed}
    if tier == PEER or not (peer / "heldout.json").exists():
        return row
    return row | _gap(heldout_losses(run, "fp8"), heldout_losses(peer, "fp8"))


def run_data_parallel(
    arguments: Sequence[str],
    recipes: Sequence[str],
    seeds: Sequence[int],
    ranks: int,
    *,
    out: Path,
    slots: int = 1,
    report: Callable[[str], None] = print,
) -> list[Row]:
    """Run `octavo train` for every recipe and seed, by one rank and by several, and return one row each.

    All have the same weights and batches to begin with. Rows of several ranks have `gap` and `gap_95`: held-out loss
    less that of one rank, in nats, and half of the 95 % interval over sequences.

    Args:
        arguments: flags of `octavo train` that all runs share (`--preset`, `--steps`, ...).
        ranks: number of ranks of the sharded runs.
        out, slots, report: as for `run_all`.

    Raises:
        RunError, ConfigError: as `run_all`.
    """
    cases = [(recipe, seed, count) for seed in seeds for recipe in recipes for count in (1, ranks)]
    jobs = {
        case: Job("{}-{}-{}".format(*case), ("--recipe", case[0], "--seed", str(case[1])), case[2]) for case in cases
    }
    run_all(sorted(jobs.values(), key=lambda job: job.ranks), arguments, out=out, slots=slots, report=report)
    rows = []
    for recipe, seed, count in cases:
        run, lane = out / jobs[recipe, seed, count].name, "bf16" if recipe == "bf16" else "fp8"
        row = {**_row(run, lane), "recipe": recipe, "seed": seed, "ranks": count, "training_loss": _curve(run, lane)}
        if count > 1:
            alone = out / jobs[recipe, seed, 1].name
            row |= _gap(heldout_losses(run, lane), heldout_losses(alone, lane))
        rows.append(row)
    return rows


def _curve(run: Path, lane: str) -> list[float]:
    lines = [line.get(f"loss_{lane}") for line in read_metrics(run / "metrics.jsonl")]
    return stored_curve(torch.tensor([loss for loss in lines if loss is not None], dtype=torch.float64))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Flags of a study's runs."""

    seeds: str = "0,1"
    """Seeds, separated by commas. Runs of one seed share weights and batches."""
    preset: str = "parity-cuda"
    """The run that all share."""
    steps: int | None = None
    """Steps of each run, in place of the preset's."""
    slots: int | None = None
    """Processes at a time; by default one per GPU."""

    @property
    def shared(self) -> list[str]:
        """Flags of `octavo train` that all runs share."""
        return command_line(preset=self.preset, steps=self.steps or None).split()

    @property
    def at_a_time(self) -> int:
        """Runs at a time."""
        return self.slots or max(torch.cuda.device_count(), 1)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedRuns(Runs):
    """Flags of a study's runs on one GPU and on several."""

    seeds: str = "0"
    """Seeds, separated by commas. Runs of one seed share weights and batches."""
    preset: str = "parity-10m-cuda"
    """The run that all share."""


RUNS, SHARDED_RUNS = Runs(), ShardedRuns()


def compare(
    *,
    recipes: str = "bf16,folded,block,tensorwise",
    runs: Runs = RUNS,
    out: Path = Path("runs/parity"),
    output: Output = TO_STDOUT,
) -> int:
    """Train one model by several recipes and seeds, on the same batches, and compare held-out losses.

    Beside the losses: the gap to BF16 of the same seeds with its intervals, tokens and time to equal loss, and the
    cosine of FP8 gradients with BF16 gradients. OUT keeps runs, curves.json and report.txt.

    Examples:

        octavo bench compare
        octavo bench compare --recipes bf16,folded --seeds 0,1,2 --steps 1000
        octavo bench compare --preset parity-350m-cuda --recipes bf16,folded,block
        octavo bench compare --preset tiny

    Parameters
    ----------
    recipes
        Recipes, separated by commas.
    out
        Directory for the runs.
    """
    names, seeds = tuple(recipes.split(",")), numbers(runs.seeds)
    rows = run_parity(runs.shared, names, seeds, out=out, slots=runs.at_a_time, report=output.say)
    rows = add_evidence(rows, out, report=output.say)
    (out / "curves.json").write_text(json.dumps(curves(out, names, seeds)), encoding="utf-8")
    output.say(_parity_report(rows, out))
    line = command_line("octavo bench compare", "--recipes", recipes, "--seeds", runs.seeds, *runs.shared)
    return output.finish("parity", rows, line)


def _parity_report(rows: Sequence[Row], out: Path) -> str:
    """Return the tables of the study and its loss gaps over time; the same text is left in `report.txt`."""
    from octavo.train.plot import plot

    gaps, parts = gap_curves(out, rows), [parity_of(rows)]
    if gaps:
        parts += ["Training loss less BF16's, nats per token, by tokens:", plot(gaps, unit="tokens").plain]
    report = "\n\n".join(parts) + "\n"
    (out / "report.txt").write_text(report, encoding="utf-8")
    return report


def tiers(*, states: Names = (), runs: Runs = RUNS, out: Path = Path("runs/tiers"), output: Output = TO_STDOUT) -> int:
    """Train one model with every tier of optimizer states, on the same batches, and compare held-out losses.

    Examples:

        octavo bench tiers
        octavo bench tiers --states fp32 --states fp8 --seeds 0,1,2
        octavo bench tiers --preset tiny

    Parameters
    ----------
    states
        Tiers, and `fp8, all` and `fp8-min, all` for those with FP8 weights and gradients; all by default.
    out
        Directory for the runs.
    """
    names, seeds = states or tuple(TIERS), numbers(runs.seeds)
    rows = run_tiers(runs.shared, names, seeds, out=out, slots=runs.at_a_time, report=output.say)
    output.say(tiers_of(rows))
    line = command_line(command_line("octavo bench tiers", states=states, seeds=runs.seeds), *runs.shared)
    return output.finish("tiers", rows, line)


def data_parallel(
    *,
    recipes: str = "bf16,folded",
    ranks: int = 2,
    runs: ShardedRuns = SHARDED_RUNS,
    out: Path = Path("runs/data-parallel"),
    output: Output = TO_STDOUT,
) -> int:
    """Train one model on one GPU and sharded over several, on the same batches, and compare losses.

    The runs of several ranks are those of `torchrun`: FSDP2, each rank with its part of every batch. On GPUs forward and
    backward are replayed as a CUDA graph. Without GPUs the ranks are processes on the CPU.

    Examples:

        octavo bench data-parallel --write benchmarks/results
        octavo bench data-parallel --ranks 4 --steps 3000
        octavo bench data-parallel --preset tiny

    Parameters
    ----------
    recipes
        Recipes, separated by commas.
    ranks
        Ranks that share the model.
    out
        Directory for the runs.
    """
    if ranks < 2:
        raise ConfigError(f"--ranks: a sharded run needs two or more ranks, not {ranks}.")
    if 0 < torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"--ranks: {ranks} ranks need as many GPUs, and this machine has {torch.cuda.device_count()}."
        )
    names, seeds = [*dict.fromkeys(recipes.split(","))], numbers(runs.seeds)
    for name in names:
        load_recipe(name, "--recipes")
    graphs = ["--graph", "on"] if torch.cuda.is_available() else []  # by default runs of one GPU alone are replayed
    shared = [*runs.shared, *graphs]
    rows = run_data_parallel(shared, names, seeds, ranks, out=out, slots=runs.at_a_time, report=output.say)
    output.say(data_parallel_of(rows))
    line = command_line("octavo bench data-parallel", recipes=recipes, ranks=ranks, seeds=runs.seeds)
    return output.finish("data-parallel", rows, command_line(line, *runs.shared))
