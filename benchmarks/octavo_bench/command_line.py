"""Malformed files and command lines: each must end in the right result, or in one line that names the fault.

Commands run in this process, in a workspace with a tiny run.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from octavo_bench.campaign import Outcome, Trial
from octavo_bench.malformed import ESCAPE, damage

TEXT = "\n\n".join(f"{i} apples and {i * i % 89} pears\nand {i % 7} plums" for i in range(1500))
SECONDS = 60
"""Seconds after which a command counts as hanging."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class _TooSlow(BaseException):
    """Ends a command that hangs; no handler of `Exception` catches it."""


@dataclass(frozen=True)
class Ended:
    """Outcome of a command."""

    code: int
    out: str
    error: str

    @property
    def fault(self) -> str:
        """Fault of the outcome; empty for a result, or an error in one line."""
        lines = self.error.splitlines()
        errors = [line for line in lines if line.startswith("octavo: error: ")]
        if self.code < 0:
            return "hangs"
        if "Traceback" in self.error or "(unexpected;" in self.error:
            return "unexpected"
        if found := _CONTROL.search(self.out + self.error):
            return f"a control character reaches the terminal: {found[0]!r}"
        if self.code and len(errors) != 1 and not self.out:
            return "no error in one line"
        return "" if not errors or errors[-1] == lines[-1] else "the error is not the last line"


def run(arguments: Sequence[str], *, seconds: int = SECONDS) -> Ended:
    """Run a command line in this process, with captured output; code -1 if it takes longer than `seconds`."""
    from octavo.lab.cli.main import main

    out, error = io.StringIO(), io.StringIO()

    def stop(*_: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            main(list(arguments))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except _TooSlow:
        code = -1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return Ended(code, out.getvalue(), error.getvalue())


# --- malformed files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileKind:
    """A file that the command line reads."""

    name: str
    path: str
    """Path in the workspace."""
    commands: tuple[str, ...]
    """Command lines that read it, in the workspace; one is drawn."""


_CHECKPOINT = "run/checkpoints/step-000002"
_EVAL, _RESUME = "eval run --tokens 64 --device cpu", "train run/config.json --resume --steps 3 --device cpu"
_EXPORT = "export run --out served --overwrite"
FILES = (
    FileKind("run file, TOML", "run.toml", ("plan run.toml", "train run.toml --dry-run")),
    FileKind("run file, JSON", "run/config.json", ("plan run/config.json", _RESUME, "doctor run --only loss")),
    FileKind("recipe, TOML", "recipe.toml", ("recipes recipe.toml", "plan --preset tiny --recipe recipe.toml")),
    FileKind("recipe, JSON", "recipe.json", ("recipes recipe.json --json", "plan --preset tiny --recipe recipe.json")),
    FileKind("calibration", "scales.json", (
        "calibrate --undo scales.json",
        "train run.toml --recipe static --scales scales.json --steps 1 --out other --device cpu",
    )),
    FileKind("checkpoint state", f"{_CHECKPOINT}/state.json", (_EVAL, _RESUME, _EXPORT)),
    FileKind("checkpoint tensors", f"{_CHECKPOINT}/fp8.safetensors", (_EVAL, _RESUME, _EXPORT)),
    FileKind("checkpoint generators", f"{_CHECKPOINT}/random.safetensors", (_RESUME,)),
    FileKind("metrics", "run/metrics.jsonl", (_RESUME,)),
    FileKind("plan", "run/plan.json", (_EVAL, _EXPORT)),
    FileKind("summary", "run/summary.json", (_EVAL,)),
    FileKind("store", "run/run.sqlite", (
        "report run", "dump run --to csv", "dump run --to tensorboard", "doctor run --only events", _RESUME,
    )),
    FileKind("token files, metadata", "tokens/meta.json", (_EVAL, _RESUME)),
    FileKind("token files, ids", "tokens/heldout.bin", (_EVAL,)),
    FileKind("tokenizer", "tokenizer.json", ("plan run.toml --tokenizer tokenizer.json",)),
    FileKind("text", "text.txt", ("eval run --data text.txt --tokens 64 --device cpu",)),
    FileKind("text, JSON lines", "text.jsonl", ("eval run --data text.jsonl --tokens 64 --device cpu",)),
    FileKind("exported model", "served/config.json", ("eval served --data text.txt --tokens 64 --device cpu",)),
    FileKind("exported weights", "served/model.safetensors", ("eval served --data text.txt --tokens 64 --device cpu",)),
)  # fmt: skip


def workspace(place: Path) -> None:
    """Create a valid file for each of `FILES` in an empty folder, from a tiny run of two steps."""
    (place / "text.txt").write_text(TEXT, "utf-8")
    (place / "text.jsonl").write_text(
        "".join(json.dumps({"text": part}) + "\n" for part in TEXT.split("\n\n")), "utf-8"
    )
    (place / "run.toml").write_text(_RUN.format(place=place), "utf-8")
    (place / "recipe.toml").write_text(_RECIPE, "utf-8")
    (place / "recipe.json").write_text('{"base": "delayed", "history": {"length": 4}, "modules": {"*.w1": "bf16"}}')
    for arguments in (
        "train run.toml --device cpu",
        "calibrate run --recipe static --batches 1 -o scales.json",
        "calibrate run --recipe static --batches 2 -o scales.json",
        _EXPORT,
    ):
        with contextlib.chdir(place):
            ended = run(arguments.split())
        if ended.code:
            raise RuntimeError(f"octavo {arguments}: {ended.error}")
    from octavo.lab.data.bpe import BPETokenizer

    BPETokenizer.train([TEXT], 272).save(place / "tokenizer.json")
    (found,) = (place / "cache").iterdir()
    (place / "tokens").symlink_to(found.relative_to(place))


SMALL_RUN = """\
[model]
dim = 32
layers = 1
heads = 2
ffn = 64
[data]
source = "{place}/text.txt"
cache = "{place}/cache"
heldout = 0.2
sequence = 32
"""
"""Model and data of a run file, `text.txt` in {place}; other tables follow it."""
_RUN = f"""\
{SMALL_RUN}[optimizer]
lr = 1e-3
betas = [0.9, 0.95]
[run]
steps = 2
batch = 2
eval_tokens = 64
log_every = 1
out = "run"
baseline = false
[guard]
mode = "watch"
"""
_RECIPE = """\
base = "folded"
[wgrad]
precision = "bf16"
[modules]
"layers.0.*" = "bf16"
[modules."layers.1.*"]
base = "tensorwise"
"""


def _judged(kind: str, about: str, ended: Ended, is_named: bool, fault: str = "") -> Trial:
    """Return the trial of a command: with `fault`, it should have been refused."""
    fault = ended.fault or fault or ("" if is_named else "not named")
    outcome: Outcome = "refused" if ended.code else "held"
    if fault:
        outcome = "lost" if ended.code < 0 else "unclear" if ended.fault or ended.code else "silent"
    return Trial(kind, f"{about} | {_last(ended)}", outcome, fault)


def _last(ended: Ended) -> str:
    return f"{ended.code} {(ended.error.strip().splitlines() or ['(no error)'])[-1][:300]}"


def malformed_files(tried: int, seed: int) -> Iterator[Trial]:
    """Damage one file after another, run a command that reads it, and judge the outcome."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        place, good = Path(folder, "work"), Path(folder, "good")
        place.mkdir()
        workspace(place)
        shutil.copytree(place, good, symlinks=True)
        for number in range(tried):
            kind = FILES[number % len(FILES)]
            draw = Random(f"{seed} {number} {kind.name}")
            shutil.rmtree(place)
            shutil.copytree(good, place, symlinks=True)
            with contextlib.chdir(place):
                yield _damaged(kind, draw)


def _damaged(kind: FileKind, draw: Random) -> Trial:
    path = Path(kind.path)
    done = damage(draw, path)
    command = draw.choice(kind.commands)
    ended = run(command.split())
    is_accepted = done.is_malformed and not ended.code and kind.name not in _HEALED
    names = (path.name, path.parent.name if path.parent.name != "." else path.name)
    is_named = not ended.code or any(name in ended.error + ended.out for name in names)
    return _judged(kind.name, f"{done.name} | {command}", ended, is_named, "accepted" if is_accepted else "")


_HEALED = ("token files, metadata", "token files, ids")
"""Caches, rebuilt if damaged."""


# --- malformed command lines ----------------------------------------------------------------------------------------

_VALUES = (
    *("nan", "inf", "-inf", "-1", "0", "1e400", "9" * 30, "", " ", ESCAPE, "x" * 5000, "../..", "/", "/dev/null"),
    *(".", "--", "-", "[", "{}", "None", "true", "1,2", "0x10", "1e3", "cuda:99", "cpu:x", "meta", "folded.toml"),
    *("run", "run.toml", "missing.toml", "\u00fc", "\udce9", "a=b", "%s", "$HOME", "~", "1 2", "*", "auto", "0.5"),
)
_COMMANDS = (
    "train",
    "plan",
    "calibrate",
    "doctor",
    "recipes",
    "dump",
    "dashboard",
    "report",
    "localize",
    "export",
    "eval",
)
_ALWAYS = {
    "train": ("--dry-run",),
    "doctor": ("--only", "driver"),
    "dashboard": ("--port", "99999"),
    "localize": ("missing",),
}
"""Arguments that keep an accidentally valid command line from training, serving or measuring."""


def malformed_commands(tried: int, seed: int) -> Iterator[Trial]:
    """Run command lines with random flags and values, next to valid files."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder, contextlib.chdir(folder):
        workspace(Path(folder))
        for number in range(tried):
            draw = Random(f"{seed} {number}")
            command = draw.choice(_COMMANDS)
            words = [command, *_words(command, draw), *_ALWAYS.get(command, ())]
            ended = run(words)
            shown = " ".join(word if len(word) < 60 else f"{word[:20]}..." for word in words)
            yield _judged(command, shown, ended, _names(words, ended))


def _names(words: Sequence[str], ended: Ended) -> bool:
    """Return whether an error names one of the words, or the one that is missing."""
    if not ended.code or "\noctavo: error" not in f"\n{ended.error}":
        return True
    text = ended.error.casefold().replace("_", "-")  # a key of a run file has the name of its flag
    flags = [word.lstrip("-").partition("=") for word in words[1:]]
    parts = {*words[1:], *(part for flag, _, value in flags for part in (flag, flag.rpartition(".")[2], value))} - {""}
    shown = {start.casefold().replace("_", "-") for part in parts for start in (part[:40], ascii(part)[1:-1][:40])}
    is_missing = any(said in text for said in ("requires", "no run given", " is missing. `octavo ", "argument: ''"))
    return is_missing or any(start in text for start in shown)


def _words(command: str, draw: Random) -> list[str]:
    """Return a few flags of a command, some misspelt, with random values."""
    flags = _flags(command)
    words = ["run.toml" if command in ("train", "plan") else "run"] if draw.random() < 0.6 else []
    for _ in range(draw.randrange(1, 4)):
        flag = draw.choice(flags)
        match draw.randrange(8):
            case 0:
                words.append(flag[: max(3, len(flag) - 2)])
            case 1:
                words.append(draw.choice(_VALUES))
            case 2:
                words.append(f"{flag}={draw.choice(_VALUES)}")
            case _:
                words += [flag, draw.choice(_VALUES)]
    return words


def _flags(command: str) -> list[str]:
    from octavo.lab.cli.main import app

    arguments = app[command].assemble_argument_collection()
    return sorted({name for argument in arguments for name in argument.names if name.startswith("--")})
