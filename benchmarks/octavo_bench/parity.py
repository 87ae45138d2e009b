"""`octavo bench parity`: pairs of runs in BF16 and by FP8 recipes, as specified in docs/explanation/parity-protocol.md.

A block is one seed of one size under one condition: BF16, BF16 with its weights moved by one ulp, and every recipe,
from the same weights on the same batches. A session reads the blocks in the result files, adds blocks until its
minutes are over, saves after each, and reports the results so far.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from cyclopts import Parameter
from torch import Tensor

from octavo.errors import ConfigError
from octavo.lab.memory.forecast import GIB
from octavo.lab.models.factory import model_name
from octavo_bench import bpe_text, ladder, registered, results, snapshots, spreads
from octavo_bench.evidence import stored_curve
from octavo_bench.installed_text import InstalledText, installed_text, tuning_texts
from octavo_bench.kind import TO_STDOUT, Kind, Output, command_line, known
from octavo_bench.ladder import FIRST_SEED, FRESH, PROTOCOL, SIZES, read_rows, report, under
from octavo_bench.lanes import (
    BF16,
    CONTROL,
    WARM,
    GraphMemory,
    Lane,
    Snapshot,
    Training,
    allow_many_compilations,
    policy_of,
    recipe_of,
    run_together,
    schedule_of,
    score_together,
    states_of,
)
from octavo_bench.results import Row

COMMITTED = Path(__file__).parents[1] / "results"
KIND = Kind(
    name=ladder.NAME,
    keys={
        "protocol": int, "model": str, "tokens": int, "condition": str, "recipe": str, "seed": int, "text": str,
        "machine": str, "heldout_loss": float,
    },
    tables={
        ladder.NAME: ladder.evidence,
        "parity-summary": ladder.summary_table,
        "parity-post-hoc": ladder.post_hoc_table,
        "parity-worth": ladder.worth_table,
        "parity-trend": ladder.trend_table,
        "parity-registered-results": registered.results_table,
        "parity-pilot": spreads.pilot_table,
        "parity-cost": spreads.cost_table,
    },
    session=ladder.RUN,
    measured_by="octavo bench parity",
)  # fmt: skip


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """Flags of a session."""

    minutes: float = 8.0
    """Wall time including preparation; a block is started only if it would finish in it."""
    pairs: int = 1000
    """Maximum number of blocks per size and condition, existing ones included."""
    until_verdict: bool = False
    """Add no pairs to a study in which every recipe passes or fails; the others get its time."""
    seeds: int = FIRST_SEED
    """First seed. Concurrent machines must take different ones."""
    device: str = "auto"
    """`cuda:INDEX`, `cpu`, or `auto`: every visible GPU, each with some arms of a large size."""
    compiled: bool = True
    """Compile each block; on a GPU only."""
    text_limit: int | None = None
    """Maximum bytes of training text per language, with an eighth of it for held-out text: for a trial."""
    text: Path | None = None
    """Tokenised text by `python -m octavo_bench.bpe_text`, for sizes of its vocabulary, in place of installed text."""

    keep: Path | None = None
    """Folder for BF16's shares of large blocks: a later session on this machine continues one that the end cut off."""


SESSION = Session()


@dataclass
class _Size:
    """A size under a condition, in a session."""

    name: str
    condition: str
    training: Training
    seeds: int
    memories: dict[torch.device, GraphMemory] = field(default_factory=dict)
    """Memory of the graphs of all arms of a GPU, if they run one by one."""
    spent: float = 0.0
    """Seconds of training in this session."""
    block: float | None = None
    """Seconds of a block with all arms; None if never measured."""

    @property
    def model(self) -> str:
        return model_name(self.training.model.architecture, self.training.parameters)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.condition}"


def command(
    *,
    sizes: str = "3m",
    conditions: str = "half,whole",
    recipes: str = "folded,folded_fast,block,tensorwise,rowwise",
    session: Session = SESSION,
    output: Output = TO_STDOUT,
) -> int:
    """Train pairs of small models, in BF16 and by FP8 recipes, and report the results so far.

    Blocks are added to those in the result files, until the minutes are over. `--minutes 0` only reports.

    Examples:

        octavo bench parity --minutes 0
        octavo bench parity --sizes 3m --minutes 8 --write benchmarks/results
        octavo bench parity --sizes 1m --conditions half,half+lr4,half+outliers --recipes folded
        octavo bench parity --sizes 1m --recipes folded,folded+wgrad.precision=bf16,folded+policy.memory=low
        octavo bench parity --sizes 1m --conditions half --recipes folded,folded+optimizer.states=fp8
        octavo bench parity --sizes moe-1m --conditions half --recipes folded,rowwise --until-verdict
        octavo bench parity --sizes tiny --minutes 1 --device cpu

    Parameters
    ----------
    sizes
        Sizes, separated by commas; each gets equal time under each condition. Mixtures of experts (`moe-1m`) are named
        by their active parameters.
    conditions
        `whole`: recipes from the first step. `half`, `quarter`, `tenth`: from that share of the steps on, BF16 before.
        Harder with `+`: `lr2`, `lr4`, `batch4`, `outliers`; cheaper: `short`, a quarter of the tokens; given twice, a
        sixteenth. `tuned`, `lora`: fine-tuning of one base model with BF16 weights, all of them or updates of rank 8.
    recipes
        FP8 recipes, separated by commas; `none`: BF16 alone. Changes follow a recipe after `+`: keys of the recipe;
        `policy.`: tensors saved for backward or layers left in BF16; `run.last_share=`: share of the last steps with
        fprop in BF16, or by the recipe of `run.last_recipe=`; `run.disabled=yes`: converted, all layers in BF16;
        `optimizer.states=`: tier of the moments. `*` is both operands of a GEMM: `rotated+fprop.*.rotation=64`.
    """
    names = [known("--sizes", name, [*SIZES], "size") for name in sizes.split(",")]
    own_recipes = [] if recipes == "none" else recipes.split(",")
    check_recipes(own_recipes)
    arms = [BF16, CONTROL, *own_recipes]
    found = read_rows(COMMITTED, *([output.write] if output.write else []))
    line = command_line(KIND.measured_by, sizes=sizes, conditions=conditions, recipes=recipes)
    added: list[Row] = []
    if session.minutes > 0:
        trained = [(name, condition) for name in names for condition in conditions.split(",")]
        study = Study(trained, arms, session, found, output.say)
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
        trained: Sequence[tuple[str, str]],
        arms: Sequence[str],
        session: Session,
        found: Sequence[Row],
        say: Callable[[str], None],
    ) -> None:
        from octavo.lab.train.device import resolve

        self._end = time.monotonic() + 60 * session.minutes
        self.device, self.arms, self.session, self._say = resolve(session.device), arms, session, say
        self.devices = every_gpu(self.device) if session.device == "auto" else [self.device]
        self._place = {arm: self.devices[number % len(self.devices)] for number, arm in enumerate(arms)}
        self.found = [*found]
        self.machine = machine(self.device)
        self.sizes = [_Size(name, how, under(how, SIZES[name]), session.seeds) for name, how in trained]
        self._made: dict[tuple[str, int, int, str, str], Lane] = {}
        self._compiled = session.compiled and self.device.type == "cuda"
        self._base_text: InstalledText | None = None
        self._bases: dict[str, dict[str, Tensor]] = {}
        for size in self.sizes:
            size.block = self._block_before(size)
        self._began = time.monotonic()

    def blocks(self) -> Any:
        """Yield the rows of each block; return when no further one would finish in time."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.set_float32_matmul_precision("high")
            warming = warm(self._jobs(), self.session.compiled)
        text = self._text()
        lengths = ", ".join(f"{name} {len(ids):,}" for name, ids in text.heldout.items())
        self.say(f"text {text.digest}: {len(text.train):,} tokens; held out: {lengths}")
        if on_gpu:
            self.say(f"kernels and graphs compiled ahead: {warming()}")
        text = text.on(self.device)  # other GPUs copy it from this one
        self._train_bases()
        with allow_many_compilations():
            while (size := self._next()) is not None:
                seed, arms = self._unmade(size, text.digest)
                if seed is None:
                    self.sizes.remove(size)
                elif rows := self._block(size, seed, arms, text):
                    self.found += rows
                    yield rows

    def _text(self) -> InstalledText:
        """Return the text of the session: of fine-tunings, that which their base models have not read.

        Raises:
            ConfigError: its ids are not those of a size's vocabulary, or fine-tunings are beside other conditions.
        """
        if len({bool(size.training.tuned) for size in self.sizes}) > 1:
            raise ConfigError("--conditions: tuned and lora read another text than the others. Give them a session.")
        named, limit = self.session.text, self.session.text_limit
        if any(size.training.tuned for size in self.sizes):
            self._base_text, text = tuning_texts(limit=limit)
        else:
            text = installed_text(limit=limit) if named is None else bpe_text.read(named)
        for size in self.sizes:
            if size.training.model.vocab != text.vocab:
                raise ConfigError(
                    f"--text: {named or 'installed text'} has {text.vocab} ids, but {size.name} has "
                    f"{size.training.model.vocab}. Sizes in BPE, such as 3m-bpe, take --text; the others do not."
                )
        return text

    def _train_bases(self) -> None:
        """Train the base model of each size that is fine-tuned, once for all its arms, seeds and conditions."""
        for size in [size for size in self.sizes if size.training.tuned]:
            training, began = size.training.base, time.monotonic()
            if size.name not in self._bases and self._base_text is not None:
                lane = Lane(BF16, training, self._base_text, self.device, compiled=self._compiled)
                run_together([lane], FIRST_SEED)
                self._bases[size.name] = lane.weights()
                loss = float(lane.losses[-round(FRESH * training.steps) :].mean())
                took = time.monotonic() - began
                self.say(f"{size.name}: base of {training.tokens:,} tokens, loss {loss:.4f}, after {took:.1f} s")

    def say(self, line: str) -> None:
        """Report a line with the seconds since the start."""
        self._say(f"{time.monotonic() - self._began:6.1f} s  {line}")

    def _next(self) -> _Size | None:
        """Return the size with the least time spent among those whose next block would finish in time."""
        left = self._end - time.monotonic()
        possible = [size for size in self.sizes if (size.block or 0.0) < left]
        if self.session.until_verdict:
            possible = [size for size in possible if not ladder.is_settled(self._own(size), self.arms)]
        return min(possible, key=lambda size: size.spent, default=None)

    def _own(self, size: _Size) -> list[Row]:
        """Return the runs of a size under its condition, of this session and in the result files."""
        study = (size.model, size.training.tokens, size.condition)
        return [row for row in self.found if (row["model"], row["tokens"], row["condition"]) == study]

    def _block_before(self, size: _Size) -> float | None:
        """Return the seconds of a block in earlier sessions on this machine, on its busiest GPU."""
        by_arm = {r["recipe"]: r["seconds"] for r in self._own(size) if r["machine"] == self.machine and "seconds" in r}
        spent: dict[torch.device, float] = {}
        for arm in self.arms:
            device = self._device_of(size, arm)
            spent[device] = spent.get(device, 0.0) + by_arm.get(arm, 0.0)
        return max(spent.values()) or None

    def _unmade(self, size: _Size, digest: str) -> tuple[int | None, list[str]]:
        """Return the next seed that lacks arms, and those; seeds started with another text or machine are skipped.

        So are those started from a BF16 run that this device would not repeat bitwise: backward of attention
        accumulates in any order on a GPU, and by the middle of a run such differences are percents.
        """
        own, repeats = self._own(size), self.device.type == "cpu" or not size.training.branch
        while size.seeds < self.session.seeds + self.session.pairs:
            seed, size.seeds = size.seeds, size.seeds + 1
            rows = [row for row in own if row["seed"] == seed]
            if not rows:
                return seed, [*self.arms]
            same = all((row["text"], row["machine"]) == (digest, self.machine) for row in rows)
            missing = [arm for arm in self.arms if arm not in [row["recipe"] for row in rows]]
            if same and missing and repeats:
                return seed, missing
        return None, []

    def _block(self, size: _Size, seed: int, arms: Sequence[str], text: InstalledText) -> list[Row]:
        lanes = self._lanes(size, [*dict.fromkeys([BF16, *arms])], text)  # recipes also score BF16's weights
        with ExitStack() as stack:
            for device in dict.fromkeys(lane.device for lane in lanes):
                stack.enter_context(turn(device))
            return [row for row in self._train(size, lanes, seed, text) if row["recipe"] in arms]

    def _train(self, size: _Size, lanes: list[Lane], seed: int, text: InstalledText) -> list[Row]:
        began, rows, finished = time.monotonic(), list[Row](), True
        if began + (size.block or 0.0) > self._end:  # time ran out while another session had its turn
            return []
        snapshot = self._kept_snapshot(size, seed, text)
        began_well = snapshot is not None or not size.training.branch
        before = {BF16: time.monotonic() - began}  # BF16's share of the run that all continue
        bf16 = next(lane for lane in lanes if lane.arm == BF16)
        for group in [lanes] if size.training.together else waves(lanes):
            start = time.monotonic()
            finished = began_well and run_together(group, seed, snapshot=snapshot, deadline=self._end)
            if not finished:
                self.say(f"{size.title} seed {seed}: stopped at the end of the session")
                break
            scores = score_together(group, bf16)
            each = (time.monotonic() - start) * len({lane.device for lane in group}) / len(group)
            for lane, by_language in zip(group, scores, strict=True):
                row = self._row(size, lane, seed, text, by_language)
                rows.append(row if "error" in row else row | {"seconds": round(before.get(lane.arm, 0.0) + each, 2)})
        took = time.monotonic() - began
        size.spent += took
        size.block = took * len(self.arms) / max(1, len(lanes)) if finished else size.block
        losses = ", ".join(f"{row['recipe']} {row['heldout_loss']:.5f}" for row in rows if "error" not in row)
        self.say(f"{size.title}, seed {seed}: {took:.1f} s; {losses}")
        return rows

    def _snapshot(self, size: _Size, seed: int, text: InstalledText) -> Snapshot | None:
        """Return the BF16 run that all arms of a block continue; None if there is none, or no time for it."""
        if not size.training.branch:
            return None
        source = self._lanes(size, [BF16], text)
        done = run_together(source, seed, until=size.training.first, deadline=self._end)
        return source[0].snapshot() if done else None

    def _kept_snapshot(self, size: _Size, seed: int, text: InstalledText) -> Snapshot | None:
        """Return `_snapshot`, of a file if an earlier session left one of this code, text and machine."""
        if self.session.keep is None or size.training.together or not size.training.branch:
            return self._snapshot(size, seed, text)
        study = f"{size.model} {size.training.tokens} {size.condition} {seed} {text.digest} {self.machine}"
        name = hashlib.blake2b(f"{study} {results.package_digest()}".encode(), digest_size=8).hexdigest()
        path = self.session.keep / f"{size.name}-{seed}-{name}.safetensors"
        if path.exists():
            self.say(f"{size.title}, seed {seed}: BF16's share is that of {path}")
            return snapshots.load(path, self.device)
        snapshot = self._snapshot(size, seed, text)
        if snapshot is not None:
            snapshots.save(snapshot, path)
        return snapshot

    def _lanes(self, size: _Size, arms: Sequence[str], text: InstalledText) -> list[Lane]:
        """Return the lanes of arms, made once per session.

        An arm that cannot be captured is reported and left out; the last recipe raises its error.
        Conditions of a size share lanes if they differ only in values that a lane reads from memory, not in the batch
        or the number of steps.
        """
        own = size.training
        places = {arm: (size.name, own.batch, own.steps, own.tuned, arm) for arm in arms}
        for arm in [arm for arm, place in places.items() if place not in self._made]:
            began = time.monotonic()
            on_gpu, device = self.device.type == "cuda", self._device_of(size, arm)
            if on_gpu and not size.training.together and device not in size.memories:
                size.memories[device] = GraphMemory(device)
            memory = size.memories.get(device)
            try:
                lane = Lane(arm, own, text, device, compiled=self._compiled, memory=memory)
            except Exception as error:
                rest = [other for other in self.arms if other != arm]
                if arm == BF16 or {*rest} <= {BF16, CONTROL}:
                    raise
                self.arms = rest
                self.say(f"{size.name}, {arm}: left out: {results.failure(error)}")
            else:
                lane.base = self._bases.get(size.name) if own.tuned else None
                self._made[places[arm]] = lane
                held = f", {torch.cuda.memory_reserved(device) / GIB:.1f} GiB of {device} held" if on_gpu else ""
                self.say(f"{size.name}, {arm}: ready after {time.monotonic() - began:.1f} s{held}")
        lanes = [self._made[place] for place in places.values() if place in self._made]
        for lane in lanes:
            lane.training = size.training
        return lanes

    def _device_of(self, size: _Size, arm: str) -> torch.device:
        """Return the device of an arm: those of a large size take the GPUs in turn."""
        return self.device if size.training.together else self._place[arm]

    def _jobs(self) -> list[Job]:
        """Return the arms to compile ahead: each per model and batch for its GPU; the control compiles as BF16."""
        sizes = {(own.training.model, own.training.batch, own.training.tuned): own for own in self.sizes}.values()
        jobs = [
            Job(BF16 if arm == CONTROL else arm, size.training, self._device_of(size, arm))
            for size in sizes
            for arm in self.arms
        ]
        return [*dict.fromkeys(jobs)]

    def _row(
        self, size: _Size, lane: Lane, seed: int, text: InstalledText, by_language: Mapping[str, dict[str, float]]
    ) -> Row:
        row: Row = {
            "protocol": PROTOCOL,
            "model": size.model,
            "tokens": size.training.tokens,
            "condition": size.condition,
            "recipe": lane.arm,
            "seed": seed,
            "text": text.digest,
            "machine": self.machine,
            "package": results.package_digest(),
        }
        losses = lane.losses
        if not bool(losses.isfinite().all()):
            return row | {"error": f"the loss was not finite at step {int((~losses.isfinite()).nonzero()[0])}"}
        heldout = {f"{name}_loss": fmean(own.values()) for name, own in by_language.items()}
        if not math.isfinite(heldout["heldout_loss"]):
            return row | {"error": "the held-out loss was not finite"}
        row |= {name: loss for name, loss in heldout.items() if math.isfinite(loss)}  # else: of BF16's weights
        if size.training.tokens <= len(text.train):  # one pass: no run has seen these windows before
            row["fresh_loss"] = float(losses[-round(FRESH * len(losses)) :].mean())
        if blocks := lane.rotations:
            row["rotations"] = blocks
        if text.bytes_per_token != 1:
            row["bytes_per_token"] = round(text.bytes_per_token, 6)
        row["by_language"] = {language: round(loss, 6) for language, loss in by_language["heldout"].items()}
        row["training_loss"] = stored_curve(losses)
        return row


def machine(device: torch.device) -> str:
    """Return device and software of a run: only runs in which they are equal are paired."""
    versions = {name: version for name, version in results.versions().items() if name in ("torch", "triton")}
    return ", ".join([results.hardware(str(device)), *(f"{name} {version}" for name, version in versions.items())])


@contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """Wait until no other session trains a block on this GPU.

    Concurrent sessions prepare in parallel, and the seconds of a block remain those of an exclusive GPU.
    """
    if device.type != "cuda":
        yield
        return
    with (Path(tempfile.gettempdir()) / f"octavo-parity-{gpu_of(device)}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU; its index counts only those visible to the process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def save(rows: Sequence[Row], directory: Path, command: str, device: str) -> Path:
    """Merge the rows into the file of the day, which is in the directory or among the committed results."""
    new = results.made_today(KIND.name, rows, command, device=device)
    committed = COMMITTED / new.file_name
    if committed.exists() and not (directory / new.file_name).exists():
        new = results.merge(results.load(committed), new)
    return results.write(new, directory)


def every_gpu(first: torch.device) -> list[torch.device]:
    """Return all visible GPUs in order; without a GPU the device itself."""
    if first.type != "cuda":
        return [first]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def waves(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Return lanes in groups that run concurrently, with at most one lane per device."""
    by_device: dict[torch.device, list[Lane]] = {}
    for lane in lanes:
        by_device.setdefault(lane.device, []).append(lane)
    return [[lane for lane in wave if lane is not None] for wave in zip_longest(*by_device.values())]


class Job(NamedTuple):
    """An arm of a size to compile ahead."""

    arm: str
    training: Training
    device: torch.device


def warm(jobs: Sequence[Job], compiled: bool) -> Callable[[], str]:
    """Compile arms concurrently, in processes that leave kernels in the caches on disk.

    Returns:
        A function that waits for them and returns their time and failures as text.
    """
    began = time.monotonic()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    devices = {job.device for job in jobs}
    at_once = 12 if all(job.training.together for job in jobs) else 2 * len(devices)  # memory holds few large models
    pool = ProcessPoolExecutor(min(len(jobs), at_once), mp_context=multiprocessing.get_context("spawn"))
    futures = [pool.submit(_warm, *job, compiled) for job in jobs]

    def wait() -> str:
        failed = [str(future.exception()) for future in futures if future.exception() is not None]
        pool.shutdown()
        return f"{time.monotonic() - began:.1f} s" + "".join(f"; failed: {error[:200]}" for error in failed)

    return wait


def _warm(arm: str, training: Training, device: torch.device, compiled: bool) -> None:
    torch.set_float32_matmul_precision("high")
    ids = torch.arange(4 * training.batch * training.model.sequence, dtype=torch.int16) % 256
    text = InstalledText(ids, {"none": ids[: 2 * training.model.sequence + 1]}, "")
    with allow_many_compilations():
        Lane(arm, training.of_steps(WARM), text.on(device), device, compiled=compiled)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def check_recipes(names: Sequence[str]) -> None:
    """Raise `ConfigError` unless all recipes compute in FP8 and keep no state between steps."""
    for name in names:
        recipe = recipe_of(name)
        policy_of(name)
        schedule_of(name, 1)
        states_of(name)
        if not recipe.is_fp8:
            raise ConfigError(f"--recipes: '{name}' has no FP8 GEMM: BF16 is trained in any case.")
        if recipe.has_stored_scales:
            raise ConfigError(
                f"--recipes: '{name}' keeps scales between steps, which one seed would pass on to the next. "
                "Train it with `octavo train`, which has one run to a process."
            )
