"""`octavo bench parity`: pairs of runs in BF16 and by FP8 recipes, as docs/explanation/parity-protocol.md has them.

A block is one seed of one size: BF16, BF16 with its weights moved by one ulp, and every recipe, from the same weights
on the same batches. A session reads which blocks the result files hold, adds blocks until its minutes are over, saves
after each, and says what is known by then.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from cyclopts import Parameter
from torch import Tensor

from octavo import recipes as recipe_names
from octavo.errors import ConfigError
from octavo.models.factory import model_name
from octavo_bench import results
from octavo_bench.cli import TO_STDOUT, Output, command_line, known
from octavo_bench.installed_text import InstalledText, installed_text
from octavo_bench.ladder import KIND, PROTOCOL, SIZES, read_rows, report
from octavo_bench.lanes import BF16, NULL, Lane, Training, allow_many_compilations, run_together
from octavo_bench.results import Row

POINTS = 40
"""Points of a stored curve of training loss, each the mean of its part of the run."""
COMMITTED = Path(__file__).parents[1] / "results"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Flags of a session."""

    minutes: float = 8.0
    """Wall time, with all preparation; no block is begun that would not end in it."""
    pairs: int = 1000
    """Largest number of blocks per size, with those that are there already."""
    seeds: int = 0
    """First seed. Machines that work at the same time take different ones."""
    device: str = "auto"
    """`cuda`, `cpu` or `auto`."""
    compiled: bool = True
    """Compile each block; on a GPU only."""
    text_limit: int | None = None
    """Bytes of training text per language at most, and an eighth of it of held-out text: for a trial."""


SESSION = Session()


@dataclass
class _Size:
    """A size in a session."""

    name: str
    training: Training
    seeds: int
    lanes: dict[str, Lane] = field(default_factory=dict)
    pool: Any = None
    """Memory pool of the graphs of all arms, if they run one by one."""
    spent: float = 0.0
    """Seconds of training in this session."""
    block: float | None = None
    """Seconds of a block with all arms; None where it was never measured."""

    @property
    def model(self) -> str:
        return model_name(self.training.model.architecture, self.training.parameters)


def parity(
    *,
    sizes: str = "1m,3m",
    recipes: str = "folded,folded_fast,block,tensorwise,rowwise",
    session: Session = SESSION,
    output: Output = TO_STDOUT,
) -> int:
    """Train pairs of small models, in BF16 and by FP8 recipes, and say what they show by now.

    Blocks are added to those in the result files, until the minutes are over. `--minutes 0` only reports.

    Examples:

        octavo bench parity --minutes 0
        octavo bench parity --sizes 3m --minutes 8 --write benchmarks/results
        octavo bench parity --sizes tiny --minutes 1 --device cpu

    Parameters
    ----------
    sizes
        Sizes, separated by commas; they get equal time.
    recipes
        FP8 recipes, separated by commas.
    """
    names = [known("--sizes", name, [*SIZES], "size") for name in sizes.split(",")]
    check_recipes(recipes.split(","))
    arms = [BF16, NULL, *recipes.split(",")]
    found = read_rows(COMMITTED, *([output.write] if output.write else []))
    line = command_line("octavo bench parity", sizes=sizes, recipes=recipes, minutes=session.minutes)
    added: list[Row] = []
    if session.minutes > 0:
        study = Study(names, arms, session, found, output.say)
        for rows in study.blocks():
            added += rows
            if output.write is not None:
                save(added, output.write, line, session.device)
    output.say(report([*found, *added]))
    return int(any("error" in row for row in added))


class Study:
    """The blocks of a session."""

    def __init__(
        self,
        names: Sequence[str],
        arms: Sequence[str],
        session: Session,
        found: Sequence[Row],
        say: Callable[[str], None],
    ) -> None:
        from octavo.train.device import resolve

        self._end = time.monotonic() + 60 * session.minutes
        self.device, self.arms, self.session, self.found, self._say = resolve(session.device), arms, session, found, say
        self.machine = machine(self.device)
        self.sizes = [_Size(name, SIZES[name], session.seeds) for name in names]
        for size in self.sizes:
            size.block = self._block_before(size)
        self._began = time.monotonic()

    def blocks(self) -> Any:
        """Yield the rows of each block; return when no other would end in time."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.set_float32_matmul_precision("high")
            warming = warm([size.training for size in self.sizes], self.arms, self.device, self.session.compiled)
        text = installed_text(limit=self.session.text_limit)
        lengths = ", ".join(f"{name} {len(ids):,}" for name, ids in text.heldout.items())
        self.say(f"text {text.digest}: {len(text.train):,} tokens; held out: {lengths}")
        if on_gpu:
            self.say(f"kernels and graphs compiled ahead: {warming()}")
        text = text.on(self.device)
        with allow_many_compilations():
            while (size := self._next()) is not None:
                seed, arms = self._unmade(size, text.digest)
                if seed is None:
                    self.sizes.remove(size)
                elif rows := self._block(size, seed, arms, text):
                    yield rows

    def say(self, line: str) -> None:
        """Report a line with the seconds since the start."""
        self._say(f"{time.monotonic() - self._began:6.1f} s  {line}")

    def _next(self) -> _Size | None:
        """Return the size with the least time spent of those whose next block would end in time."""
        left = self._end - time.monotonic()
        possible = [size for size in self.sizes if (size.block or 0.0) < left]
        return min(possible, key=lambda size: size.spent, default=None)

    def _own(self, size: _Size) -> list[Row]:
        """Return the runs of a size in the result files."""
        return [row for row in self.found if (row["model"], row["tokens"]) == (size.model, size.training.tokens)]

    def _block_before(self, size: _Size) -> float | None:
        """Return the seconds of a block of earlier sessions on this machine."""
        by_arm = {r["recipe"]: r["seconds"] for r in self._own(size) if r["machine"] == self.machine and "seconds" in r}
        return sum(by_arm.get(arm, 0.0) for arm in self.arms) or None

    def _unmade(self, size: _Size, digest: str) -> tuple[int | None, list[str]]:
        """Return the next seed that lacks arms, and those; a seed begun with other text or machine is left alone."""
        own = self._own(size)
        while size.seeds < self.session.seeds + self.session.pairs:
            seed, size.seeds = size.seeds, size.seeds + 1
            rows = [row for row in own if row["seed"] == seed]
            if not rows:
                return seed, [*self.arms]
            same = all((row["text"], row["machine"]) == (digest, self.machine) for row in rows)
            missing = [arm for arm in self.arms if arm not in [row["recipe"] for row in rows]]
            if same and missing:
                return seed, missing
        return None, []

    def _block(self, size: _Size, seed: int, arms: Sequence[str], text: InstalledText) -> list[Row]:
        lanes = self._lanes(size, arms, text)
        began, rows = time.monotonic(), []
        for group in [lanes] if size.training.together else [[lane] for lane in lanes]:
            start = time.monotonic()
            if not run_together(group, seed, deadline=self._end):
                self.say(f"{size.name} seed {seed}: stopped at the end of the session")
                break
            trained = time.monotonic() - start
            rows += [self._row(size, lane, seed, text.digest, trained / len(group)) for lane in group]
        took = time.monotonic() - began
        size.spent += took
        size.block = took * len(self.arms) / max(1, len(arms)) if len(rows) == len(lanes) else size.block
        losses = ", ".join(f"{row['recipe']} {row['heldout_loss']:.5f}" for row in rows if "error" not in row)
        self.say(f"{size.name} seed {seed}: {took:.1f} s; {losses}")
        return rows

    def _lanes(self, size: _Size, arms: Sequence[str], text: InstalledText) -> list[Lane]:
        """Return the lanes of arms, made once per session. An arm that cannot be captured is reported and left out."""
        for arm in [arm for arm in arms if arm not in size.lanes]:
            began = time.monotonic()
            on_gpu = self.device.type == "cuda"
            if on_gpu and not size.training.together and size.pool is None:
                size.pool = torch.cuda.graph_pool_handle()
            compiled = self.session.compiled and on_gpu
            try:
                size.lanes[arm] = Lane(arm, size.training, text, self.device, compiled=compiled, pool=size.pool)
            except Exception as error:
                if arm == BF16:
                    raise
                self.arms = [other for other in self.arms if other != arm]
                self.say(f"{size.name} {arm}: left out: {results.failure(error)}")
            else:
                self.say(f"{size.name} {arm}: ready after {time.monotonic() - began:.1f} s")
        return [size.lanes[arm] for arm in arms if arm in size.lanes]

    def _row(self, size: _Size, lane: Lane, seed: int, digest: str, seconds: float) -> Row:
        row: Row = {
            "protocol": PROTOCOL,
            "model": size.model,
            "tokens": size.training.tokens,
            "recipe": lane.arm,
            "seed": seed,
            "text": digest,
            "machine": self.machine,
        }
        began = time.monotonic()
        losses = lane.losses
        if not bool(losses.isfinite().all()):
            return row | {"error": f"the loss was not finite at step {int((~losses.isfinite()).nonzero()[0])}"}
        by_language = {name: lane.heldout(name) for name in lane.evaluations}
        row |= {f"{name}_loss": fmean(own.values()) for name, own in by_language.items()}
        row["by_language"] = {language: round(loss, 6) for language, loss in by_language["heldout"].items()}
        row["training_loss"] = curve(losses)
        return row | {"seconds": round(seconds + time.monotonic() - began, 2)}


def curve(losses: Tensor) -> list[float]:
    """Return the training loss as `POINTS` means of equal parts of the run, or as it is if it has fewer steps."""
    return [round(float(part.mean()), 5) for part in losses.tensor_split(min(POINTS, len(losses)))]


def machine(device: torch.device) -> str:
    """Return device and software of a run: only runs with the same are paired."""
    versions = {name: version for name, version in results.versions().items() if name in ("torch", "triton")}
    return ", ".join([results.hardware(str(device)), *(f"{name} {version}" for name, version in versions.items())])


def save(rows: Sequence[Row], directory: Path, command: str, device: str) -> Path:
    """Write the rows to the file of the day, with those that it holds, here or among the committed results."""
    new = results.made_today(KIND, rows, command, device=device)
    committed = COMMITTED / new.file_name
    if committed.exists() and not (directory / new.file_name).exists():
        new = results.merge(results.load(committed), new)
    return results.write(new, directory)


def warm(trainings: Sequence[Training], arms: Sequence[str], device: torch.device, compiled: bool) -> Callable[[], str]:
    """Compile all arms beside each other, in processes that leave kernels in the caches on disk.

    Returns:
        A function that waits for them and says how long they took.
    """
    began = time.monotonic()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    jobs = [(arm, training, device, compiled) for training in trainings for arm in arms if arm != NULL]
    at_once = 12 if all(training.together for training in trainings) else 2  # of large models memory holds few
    pool = ProcessPoolExecutor(min(len(jobs), at_once), mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(_warm, *job) for job in jobs]

    def wait() -> str:
        failed = [str(future.exception()) for future in futures if future.exception() is not None]
        pool.shutdown()
        return f"{time.monotonic() - began:.1f} s" + "".join(f"; failed: {error[:200]}" for error in failed)

    return wait


def _warm(arm: str, training: Training, device: torch.device, compiled: bool) -> None:
    torch.set_float32_matmul_precision("high")
    ids = torch.arange(4 * training.batch * training.model.sequence, dtype=torch.int16) % 256
    text = InstalledText(ids, {"none": ids[: 2 * training.model.sequence + 1]}, "")
    short = replace(training, tokens_per_parameter=8 * training.batch * training.model.sequence / training.parameters)
    with allow_many_compilations():
        Lane(arm, short, text.on(device), device, compiled=compiled)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def check_recipes(names: Sequence[str]) -> None:
    """Raise `ConfigError` unless all recipes compute in FP8."""
    for name in names:
        if not recipe_names.load(name).is_fp8:
            raise ConfigError(f"--recipes: '{name}' has no FP8 GEMM: BF16 is trained in any case.")
