"""Signals: the first saves and stops, the second aborts, and both leave an outcome and an exit code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from reporters import Listener

from octavo.errors import Interrupted
from octavo.lab.monitor.store.reader import RunReader
from octavo.lab.train import checkpoint, train
from octavo.lab.train.config import RunConfig
from octavo.lab.train.events import Logged
from octavo.lab.train.files import read_metrics
from octavo.lab.train.stopping import StopSignals

Configure = Callable[..., RunConfig]
RUN = {"steps": 6, "log_every": 1, "checkpoint_every": 0, "baseline": False}


def test_a_signal_saves_a_checkpoint_and_the_run_goes_on_bit_for_bit(
    configure: Configure, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    number, code = signal.SIGINT, 130
    straight, stopped = (configure(run={**RUN, "out": str(tmp_path / name)}) for name in ("straight", "stopped"))
    expected = train(straight)
    before = signal.getsignal(number)
    with pytest.raises(Interrupted) as error:
        train(stopped, reporters=[Listener(Logged, lambda: os.kill(os.getpid(), number), step=2)])
    assert error.value.exit_code == code
    assert signal.getsignal(number) is before
    assert "saving a checkpoint after this step" in capfd.readouterr().err
    assert [path.name for path in checkpoint.find(stopped.run.out / "checkpoints")] == ["step-000003"]
    assert RunReader(stopped.run.out).state() == "interrupted"
    assert train(stopped, resume=True)["heldout_loss_fp8"] == expected["heldout_loss_fp8"]
    assert len(read_metrics(stopped.run.out / "metrics.jsonl")) == 6 + 1


def test_the_second_signal_raises_unless_it_is_the_first_one_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.lab.train.stopping.os.write", lambda *_: 0)
    with StopSignals() as signals, signals.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.asked == signal.SIGINT
        monkeypatch.setattr("octavo.lab.train.stopping.ONE", -1.0)
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_outside_of_steps_leaves_an_outcome_too(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(run=RUN)
    monkeypatch.setattr("octavo.lab.train.parts.heldout_losses", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted) as error:
        train(config)
    assert error.value.exit_code == 143
    assert RunReader(config.run.out).state() == "interrupted"


def test_two_signals_end_the_command_in_one_line_with_its_code(configure: Configure, tmp_path: Path) -> None:
    config = configure(run={**RUN, "steps": 100_000})
    slow = "import time; from octavo.lab.train.train_state import TrainState as T; f = T.step\n"
    slow += "def step(self, *a, **k):\n time.sleep(60 if k['step'] == 3 else 0); return f(self, *a, **k)\n"
    slow += "T.step = step\nfrom octavo.lab.cli.main import main; main()"
    flags = ["--preset", "tiny", "--source", str(config.data.source), "--cache", str(config.data.cache)]
    flags += ["--out", str(config.run.out), "--steps", "100000", "--log-every", "1", "--device", "cpu", "--no-baseline"]
    known = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": known}
    run = subprocess.Popen([sys.executable, "-c", slow, "train", *flags], **pipes)  # type: ignore[call-overload]
    log = config.run.out / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    run.send_signal(signal.SIGTERM)
    errors = run.communicate(timeout=50)[1]
    assert run.returncode == 143, errors
    assert "Traceback" not in errors
    assert re.search(r"^octavo: interrupted\. There is no checkpoint yet", errors, re.MULTILINE)
    assert RunReader(config.run.out).state() == "interrupted"
