"""Kill tests: of a run at a system call that changes one of its files, and of a rank in a step.

A killed run is resumed and must end bitwise equal to an undisturbed run, with the same log and a readable store. So
must one whose guardrails act, as none raises an alarm here; it also has to say what an alarm might change. A
trial takes a second: runs are forks of one process that has imported PyTorch, started with kill_at.c preloaded.

    python -m octavo_bench.crash     fork server: a JSON request per line of stdin, a JSON answer per line of stdout
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch

# Before any fork: a run would import them each time, a third of its seconds.
import octavo.distributed.storage
import octavo.lab.cli.train
import octavo.lab.train.console
import octavo.lab.train.export
import octavo.lab.train.run  # noqa: F401
from octavo.errors import ConfigError
from octavo.lab.cli.main import main
from octavo.lab.monitor.store import RunReader
from octavo.lab.train import checkpoint
from octavo.lab.train.files import read_metrics
from octavo.lab.train.train_state import TrainState
from octavo_bench.campaign import Outcome, Trial
from octavo_bench.command_line import SMALL_RUN, TEXT

SOURCE = Path(__file__).with_name("kill_at.c")
STEPS = 6
MODES = ("watch", "act")
"""Of guardrails; trials take turns."""
_RESUMED = "resume"
"""Rule of the event by which a resumed run says what an alarm might change."""
TIMEOUT = 2.0
"""Seconds (`parallel.timeout`) within which a lost rank must be named."""
_FOLDERS = (Path(__file__).parents[1], Path(__file__).parents[2] / "src")


def kills_of_runs(tried: int, seed: int) -> Iterator[Trial]:
    """Kill runs at random system calls, a third of them again when resumed; yield each trial.

    Modes of the guard take turns, and of every two runs of a mode one writes its checkpoints in the background.
    """
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder, _forks(Path(folder)) as fork:
        place = Path(folder)
        undisturbed = {mode: _undisturbed(place, fork, mode) for mode in MODES}
        for number in range(tried):
            draw, mode = Random(f"{seed} {number}"), MODES[number % len(MODES)]
            good, calls = undisturbed[mode]
            out = place / "killed"
            shutil.rmtree(out, ignore_errors=True)
            at = [draw.randint(1, calls)] + [draw.randint(1, calls) for _ in range(draw.random() < 1 / 3)]
            write = _write(number // len(MODES))
            arguments = _train(out, place, mode, *write)
            for nth in at:
                fork([arguments], nth=nth, below=str(out))
            is_told = mode == "act" and _goes_on(out)
            code, said, _ = fork([arguments])[0]
            fault = _unlike(good, out, code, said)
            if is_told and not fault and not _says_so(out):
                fault = "does not say what an alarm might change"
            about = f"{' '.join([mode, *write])}, system call {', then '.join(map(str, at))}"
            yield Trial("run", about, _outcome(fault), fault)


def kills_of_ranks(tried: int, seed: int) -> Iterator[Trial]:
    """Kill or stop one of two ranks, started without torchrun, in a random step; yield each trial."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder, _forks(Path(folder)) as fork:
        place = Path(folder)
        good = place / "good"
        fork([_train(good, place)] * 2)
        for number in range(tried):
            draw = Random(f"{seed} {number}")
            how, rank, step = draw.choice(("kill", "stop")), draw.randrange(2), draw.randint(1, STEPS)
            out = place / "struck"
            shutil.rmtree(out, ignore_errors=True)
            since = time.monotonic()
            arguments = _train(out, place, "watch", *_write(number))
            ended = fork([arguments] * 2, fault=(how, rank, step), waits_for=1 - rank)
            seconds, (code, said, _) = time.monotonic() - since, ended[1 - rank]
            is_named = f"rank {rank} of 2 is " in said and f"at step {step}." in said
            again = fork([arguments] * 2)
            fault = "does not end" if code in (0, None) else _unlike(good, out, *again[0][:2])
            is_named = is_named and seconds < 30
            about = f"{how} of rank {rank} in step {step}"
            outcome = "held" if is_named and not fault else _outcome(fault) if fault else "unclear"
            yield Trial("rank", about, outcome, fault or ("" if is_named else said[-300:]))


def _outcome(fault: str) -> Outcome:
    """Return the outcome of a kill: other values than those of an undisturbed run are silent."""
    return "held" if not fault else "silent" if fault.startswith(("other", "another")) else "lost"


def _unlike(good: Path, out: Path, code: int | None, said: str) -> str:
    """Return the difference between a run and the undisturbed one; empty if there is none."""
    if code != 0:
        return f"does not resume: {said.strip()[-300:]}"
    found, expected = (_digests(each) for each in (out, good))
    if unlike := [name for name in expected.keys() | found.keys() if found.get(name) != expected.get(name)]:
        return f"other bits: {sorted(unlike)}"
    lines = [[_untimed(line) for line in read_metrics(each / "metrics.jsonl")] for each in (out, good)]
    if lines[0] != lines[1]:
        return f"another log: {len(lines[0])} lines, {len(lines[1])} expected"
    stored = [_stored(RunReader(each)) for each in (out, good)]
    unlike = [key for key in stored[0].keys() | stored[1].keys() if stored[0].get(key) != stored[1].get(key)]
    return f"another store: {sorted(unlike)}" if unlike else ""


def _goes_on(run: Path) -> bool:
    """Return whether a run has a checkpoint to resume from, and steps left."""
    last = checkpoint.latest(run / "checkpoints")
    return last is not None and last.name != checkpoint.name_of(STEPS)


def _says_so(run: Path) -> bool:
    return any(event.rule == _RESUMED for event in RunReader(run).events())


def _digests(run: Path) -> dict[str, str]:
    """Return the hash of each file of the last checkpoint, and of each tensor of all ranks."""
    found = checkpoint.load(run / "checkpoints" / checkpoint.name_of(STEPS))
    files = {name: entry["sha256"] for name, entry in found.state["files"].items() if "/" not in name}
    named = ((f"{model} {name}", x) for model, tensors in found.tensors.items() for name, x in tensors.items())
    bits = {name: x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, x in named}
    return {**files, **{name: hashlib.sha256(content).hexdigest() for name, content in bits.items()}}


def _stored(run: RunReader) -> dict[str, Any]:
    """Return the events, and the steps and values of the scalars that do not depend on the clock."""
    known = {key: series for key, series in run.scalars().items() if key.startswith(("loss", "gradient", "heldout"))}
    scalars = {key: [series.first.tolist(), series.low.tolist()] for key, series in known.items()}
    events = sorted((event.step, event.rule, event.text) for event in run.events() if event.rule != _RESUMED)
    return {**scalars, "events": events}


def _untimed(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if not key.startswith(("milliseconds", "tokens_per"))}


def _undisturbed(place: Path, fork: Any, mode: str = "watch") -> tuple[Path, int]:
    """Make the undisturbed run; return its directory and its number of system calls."""
    good = place / f"good-{mode}"
    for out in (place / f"first-{mode}", good):  # the first one prepares the text
        ended = fork([_train(out, place, mode)], nth=0, below=str(out))
        if ended[0][0] != 0:
            raise RuntimeError(f"the undisturbed run ended with {ended[0]}")
    return good, ended[0][2]


def _train(out: Path, place: Path, mode: str = "watch", *flags: str) -> list[str]:
    return ["train", str(place / "run.toml"), "--guard.mode", mode, *flags, "--out", str(out)]


def _write(number: int) -> list[str]:
    """Return the flags of a trial: every other one writes its checkpoints in the background."""
    return ["--checkpoint-write", "background"] if number % 2 else []


@contextmanager
def _forks(place: Path) -> Iterator[Any]:
    """Yield a function that runs command lines in forks of one process; see `_answer` for its arguments."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        raise ConfigError("kills: need Linux and a C compiler, to build kill_at.c as a preloaded library.")
    library = place / "kill_at.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    _write_run(place)
    known = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    known["PYTHONPATH"] = os.pathsep.join(map(str, _FOLDERS))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-m", "octavo_bench.crash"], env=known, cwd=place, **pipes)

    def fork(ranks: Sequence[Sequence[str]], **settings: Any) -> list[tuple[int | None, str, int]]:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps({"ranks": ranks, **settings}) + "\n")
        server.stdin.flush()
        return [tuple(one) for one in json.loads(server.stdout.readline())]

    try:
        yield fork
    finally:
        server.communicate()


def _write_run(place: Path) -> None:
    """Write a run file and its text into a folder."""
    (place / "text.txt").write_text(TEXT, "utf-8")
    (place / "run.toml").write_text(_RUN.format(place=place, steps=STEPS, timeout=TIMEOUT), "utf-8")


_RUN = (
    SMALL_RUN
    + """\
[run]
steps = {steps}
batch = 2
eval_tokens = 64
eval_every = 2
log_every = 1
checkpoint_every = 1
keep = 2
baseline = false
device = "cpu"
[guard]
snapshot_every = 2
[parallel]
timeout = {timeout}
"""
)


# --- fork server -----------------------------------------------------------------------------------------------------


def _serve() -> None:
    for line in sys.stdin:
        print(json.dumps(_answer(**json.loads(line))), flush=True)


def _answer(
    ranks: Sequence[list[str]],
    nth: int = 0,
    below: str = "",
    fault: tuple[str, int, int] | None = None,
    waits_for: int | None = None,
) -> list[tuple[int | None, str, int]]:
    """Run a command line per rank; return exit code, output, and number of system calls that change files.

    Args:
        ranks: arguments of `octavo`; `--resume` or `--overwrite` is added if the directory has a run.
        nth: system call at which the process is killed; 0 for none.
        below: only calls for files in this folder count.
        fault: kind (`kill` or `stop`), rank and step; a stopped process does not end by itself.
        waits_for: rank after whose exit all others are killed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        logs = [Path(folder, str(rank)) for rank in range(len(ranks))]
        children = []
        for rank, (arguments, log) in enumerate(zip(ranks, logs, strict=True)):
            child = os.fork()
            if child == 0:
                if len(ranks) > 1:
                    known = {"RANK": rank, "WORLD_SIZE": len(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                    os.environ.update({name: str(value) for name, value in known.items()})
                own = fault if fault is not None and fault[1] == rank else None
                os._exit(_octavo(arguments, log, nth, below, own))
            children.append(child)
        first = len(ranks) - 1 if waits_for is None else waits_for
        codes: dict[int, int | None] = {}
        for rank in (first, *(rank for rank in range(len(ranks)) if rank != first)):
            if codes and waits_for is not None:
                os.kill(children[rank], signal.SIGKILL)
            codes[rank] = _ended(children[rank])
        return [(codes[rank], *_said(log)) for rank, log in enumerate(logs)]


def _ended(child: int, seconds: float = 60.0) -> int | None:
    """Wait for a process; return its exit code, None if it had to be killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _said(log: Path) -> tuple[str, int]:
    text = log.read_text("utf-8", errors="replace")
    said, _, calls = text.rpartition("calls made: ")
    return (said, int(calls)) if calls.strip().isdigit() and said else (text, 0)


def _octavo(arguments: list[str], log: Path, nth: int, below: str, fault: tuple[str, int, int] | None) -> int:
    """Run a command line in this process, log its number of system calls, and return its exit code."""
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(opened, number)
    out = Path(arguments[-1])
    if (out / "config.json").exists():
        arguments = [*arguments, "--resume" if checkpoint.latest(out / "checkpoints") else "--overwrite"]
    if fault is not None:
        _strike(fault[0], fault[2])
    library = ctypes.CDLL(None)
    library.kill_at(ctypes.c_long(nth), os.fsencode(below))
    code = 0
    try:
        main(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    sys.stdout.flush()
    os.write(opened, f"calls made: {library.calls_made()}".encode())
    return code


def _strike(how: str, at: int) -> None:
    whole = TrainState.step

    def step(self: TrainState, *arguments: Any, step: int, **settings: Any) -> Any:
        if step == at:
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        return whole(self, *arguments, step=step, **settings)

    TrainState.step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    _serve()
