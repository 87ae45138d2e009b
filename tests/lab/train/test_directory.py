"""One writer per directory, nothing lost by accident, and a directory that is removed during a run."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from reporters import Listener
from rich.console import Console

from octavo.errors import CheckpointError, ConfigError, RunError
from octavo.lab.train import checkpoint, train
from octavo.lab.train.config import RunConfig, assemble
from octavo.lab.train.console import ConsoleReporter
from octavo.lab.train.directory import LOCK, RunDirectory
from octavo.lab.train.events import Logged
from octavo.lab.train.files import SamplesFile, read_metrics

Configure = Callable[..., RunConfig]
RUN = {"steps": 4, "log_every": 1, "checkpoint_every": 2, "keep": 10, "baseline": False}


def held_by_another_process(path: Path) -> subprocess.Popen[str]:
    """Return a process that writes to the directory, until its input is closed."""
    code = "import sys; from octavo.lab.train.directory import RunDirectory\nfrom pathlib import Path\n"
    code += "with RunDirectory(Path(sys.argv[1])):\n print('held', flush=True); sys.stdin.read()"
    known = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": known}
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], **pipes)  # type: ignore[call-overload]
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_second_writer_is_refused_and_told_who_the_first_is(configure: Configure) -> None:
    config = configure(run=RUN)
    holder = held_by_another_process(config.run.out)
    try:
        who = rf"process {holder.pid} on {re.escape(os.uname().nodename)} since .* is writing a run here"
        for options in ({}, {"overwrite": True}):
            with pytest.raises(RunError, match=who):
                train(config, **options)
        assert [path.name for path in config.run.out.iterdir()] == [LOCK]
    finally:
        holder.kill()
        holder.communicate()
    assert (config.run.out / LOCK).exists()  # left over, by a process that was killed
    train(config)
    assert not (config.run.out / LOCK).exists()


def test_a_refusal_shows_no_terminal_escapes(tmp_path: Path) -> None:
    with RunDirectory(tmp_path):
        (tmp_path / LOCK).write_bytes(b"\x1b[2Jme\xff")
        with pytest.raises(RunError) as error, RunDirectory(tmp_path):
            pass
    assert error.value.args[0].isprintable() and "[2Jme" in error.value.args[0]


def test_the_log_of_an_interrupted_run_is_not_wiped(configure: Configure) -> None:
    config = configure(run={**RUN, "checkpoint_every": 0})

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, reporters=[Listener(Logged, interrupt, step=2)])
    before = (config.run.out / "metrics.jsonl").read_bytes()
    assert before.count(b"\n") == 2 and checkpoint.latest(config.run.out / "checkpoints") is None
    with pytest.raises(ConfigError, match=r"run without a checkpoint, whose metrics.jsonl would be lost. --overwrite"):
        train(config)
    assert (config.run.out / "metrics.jsonl").read_bytes() == before
    assert train(config, overwrite=True)["steps"] == 4


@pytest.mark.parametrize("content", ['{"model_type": "llama"}', "[1]", "not json"])
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_a_config_of_something_else_is_never_overwritten(
    configure: Configure, content: str, options: dict[str, bool]
) -> None:
    config = configure(run=RUN)
    config.run.out.mkdir(parents=True)
    (config.run.out / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config.json: is not of a run of octavo"):
        train(config, **options)
    assert [path.name for path in config.run.out.iterdir()] == ["config.json"]
    assert (config.run.out / "config.json").read_text() == content


@pytest.mark.parametrize(("how", "after"), [("removed", 1), ("removed", 2), ("renamed", 2)])
def test_a_directory_that_goes_stops_the_run_which_is_saved_beside_it(
    configure: Configure, how: str, after: int
) -> None:
    config = configure(run=RUN, sample={"every": 1, "tokens": 2})
    out = config.run.out

    def go() -> None:
        if how == "removed":
            shutil.rmtree(out)
        else:
            out.rename(out.with_name("elsewhere"))

    rescued = out.with_name("run-rescued")
    with pytest.raises(RunError, match=rf"removed or renamed; noticed at step 2.* go on with octavo train {rescued}"):
        console = ConsoleReporter(Console(file=io.StringIO(), width=100), keep=True)
        train(config, reporters=[console, Listener(Logged, go, step=after)])
    assert not out.exists()
    kept = (rescued / "console.log").read_text()
    assert kept.startswith("---") and f"results in {out}" in kept and "octavo: error: " in kept.splitlines()[-1]
    assert [line["step"] for line in SamplesFile.read(rescued / "samples.jsonl")] == [1, 2][:after]
    assert [line["step"] for line in read_metrics(rescued / "metrics.jsonl")] == [1, 2][:after]
    assert [path.name for path in checkpoint.find(rescued / "checkpoints")] == ["step-000002"]
    again = assemble(("rescued", json.loads((rescued / "config.json").read_text())))
    straight = train(configure(run={**RUN, "out": str(out.with_name("straight"))}))
    assert train(again, resume=True)["heldout_loss_fp8"] == straight["heldout_loss_fp8"]


def test_removed_files_are_said_and_the_log_is_written_again(configure: Configure) -> None:
    config = configure(run=RUN)

    def remove() -> None:
        (config.run.out / "metrics.jsonl").unlink()
        (config.run.out / "run.sqlite").unlink()

    with pytest.warns(UserWarning) as said:
        train(config, reporters=[Listener(Logged, remove, step=2)])
    texts = [str(one.message) for one in said]
    assert sum("metrics.jsonl: was removed during the run, and is written again" in text for text in texts) == 1
    assert sum("run.sqlite: was removed during the run" in text for text in texts) == 1
    lines = read_metrics(config.run.out / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss_fp8" in line] == [1, 2, 3, 4]


def test_what_cannot_be_a_directory_is_named(configure: Configure) -> None:
    config = configure(run=RUN)
    config.run.out.parent.mkdir(exist_ok=True)
    config.run.out.write_text("a file")
    with pytest.raises(RunError, match=r"run: cannot be written \(File exists\)"):
        train(config)


def test_nothing_to_resume_leaves_nothing(configure: Configure) -> None:
    config = configure(run=RUN)
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        train(config, resume=True)
    assert not config.run.out.exists()
