from __future__ import annotations

import io
import logging
import math
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from octavo._util.terminal import clock, program
from octavo.lab.guard import GuardEvent
from octavo.lab.monitor.console import FILE
from octavo.lab.train.config import RunConfig, assemble, load_preset
from octavo.lab.train.console import ConsoleReporter
from octavo.lab.train.events import Evaluated, Event, Finished, Logged, Saved, Started, Switched
from octavo.lab.train.files import write_json
from octavo.lab.train.summary import HIGH, summarise


def tiny() -> RunConfig:
    return assemble(load_preset("tiny", cuda=False))


def run_of(*lanes: str, bf16: float = 2.0, sequences: int = 16) -> list[Event]:
    """Return the events of a short run in which the FP8 loss lies 1 % above that of BF16, which is `bf16`."""
    config = tiny()
    loss = {lane: {"fp8": 1.01 * bf16, "bf16": bf16}[lane] for lane in lanes}
    ones = dict.fromkeys(lanes, 1.0)
    logged = [
        Logged(
            step=step,
            loss=loss,
            gradient_norm=ones,
            milliseconds=ones,
            lr=1e-3,
            tokens=128 * step,
            tokens_per_second=1234.0,
        )
        for step in (10, 20)
    ]
    started = Started(
        config=config,
        models=lanes,
        device="a processor",
        parameters=38_048,
        plan=None,
        corpus={},
        first_step=0,
    )
    history = [line.record() for line in logged]
    facts = {
        "device": "a processor",
        "parameters": 38_048,
        "weight_bytes_per_parameter": 4.0,
        "optimizer_bytes_per_parameter": 8.0,
        "fp8_gemms": {"scaled_mm.row": 840},
        "fallbacks": [],
        "skipped_steps": {},
        "tasks": {},
        "seconds": 75.0,
        "energy_kwh": 0.5,
    }
    memory = {"peak_gib": None, "predicted_peak_gib": None}
    by_sequence = {lane: ([mean - 0.5, mean + 0.5] * 8)[:sequences] for lane, mean in loss.items()}
    summary = summarise(config, facts, by_sequence, {"unigram_entropy": 3.2}, history, memory)
    return [
        started,
        *logged,
        Saved(step=20, path=Path("runs/tiny/checkpoints/step-000020")),
        Evaluated(step=20, loss=loss),
        Finished(summary=summary, history=history, directory=Path("runs/tiny")),
    ]


def shown(events: list[Event], *, terminal: bool, program: str = "octavo") -> str:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=120, highlight=False, legacy_windows=False)
    reporter = ConsoleReporter(console, program)
    for event in events:
        reporter.report(event)
    reporter.close()
    return written.getvalue()


def test_piped_output_is_aligned_lines_without_escapes() -> None:
    text = shown(run_of("fp8", "bf16"), terminal=False)
    assert "\x1b" not in text
    titles, *rows = [line for line in text.splitlines() if "loss FP8  loss BF16" in line or " 1.000 " in line]
    assert titles.split() == [
        "step",
        "loss",
        "FP8",
        "loss",
        "BF16",
        "gap",
        "%",
        "tokens/s",
        "lr",
        "grad",
        "norm",
        "left",
    ]
    assert [row.split()[:-1] for row in rows] == [
        [step, "2.0200", "2.0000", "+1.00", "1,234", "1.0e-03", "1.000"] for step in ("10", "20")
    ]
    assert {len(line) for line in (titles, *rows)} == {len(titles)}


def test_the_gap_to_a_loss_of_zero_is_not_known() -> None:
    """Text of one token, as someone may try a new installation with, is learnt completely."""
    events = run_of("fp8", "bf16", bf16=0.0)
    assert events[1].record()["gap_percent"] is None  # type: ignore[union-attr]
    summary = events[-1].summary  # type: ignore[union-attr]
    assert (summary["gap_percent"], summary["gap_95_percent"], summary["heldout_loss_bf16"]) == (None, None, 0.0)
    rows = [line for line in shown(events, terminal=False).splitlines() if " 1.000 " in line]
    assert [row.split()[:5] for row in rows] == [[step, "0.0000", "0.0000", "-", "1,234"] for step in ("10", "20")]


def test_an_infinite_perplexity_is_told_and_written(tmp_path: Path) -> None:
    events = run_of("fp8", "bf16", bf16=900.0)
    summary = events[-1].summary  # type: ignore[union-attr]
    assert summary["heldout_loss_fp8"] == pytest.approx(909.0) and summary["perplexity_fp8"] is None
    write_json(tmp_path / "summary.json", summary)
    assert "909.0000 nats per token, perplexity infinite" in shown(events, terminal=False)


def test_a_single_sequence_says_nothing_of_the_noise() -> None:
    summary = run_of("fp8", "bf16", sequences=1)[-1].summary  # type: ignore[union-attr]
    assert summary["gap_percent"] == pytest.approx(2 / 1.5) and summary["gap_95_percent"] is None


def test_a_terminal_gets_a_table_and_the_progress() -> None:
    text = shown(run_of("fp8", "bf16"), terminal=True)
    assert "\x1b" in text
    assert "loss BF16" in text
    assert "20/20" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor comes back


def test_the_cursor_comes_back_when_a_run_fails() -> None:
    text = shown(run_of("fp8", "bf16")[:2], terminal=True)
    assert text.rstrip().endswith("\x1b[?25h")


def test_the_closing_block_says_what_came_out_and_what_to_do() -> None:
    text = shown(run_of("fp8", "bf16"), terminal=False)
    for expected in (
        "held-out loss FP8     2.0200 nats per token, perplexity 7.538",
        "held-out loss BF16    2.0000 nats per token, perplexity 7.389",
        "gap                   +1.000 % (FP8 relative to BF16)",
        "unigram entropy       3.2000",
        "in 1 min 15 s",
        "840 scaled_mm.row",
        "fallbacks             none",
        "stored in             runs/tiny",
        "train longer        octavo train runs/tiny --resume --steps 40",
    ):
        assert expected in text


def test_the_last_line_is_the_verdict_on_the_gap() -> None:
    assert shown(run_of("fp8", "bf16"), terminal=False).split("\n\n")[-1].startswith("One run cannot tell: held-out")


def test_the_loss_of_the_same_weights_without_fp8_is_beside_the_others() -> None:
    *events, finished = run_of("fp8", "bf16")
    assert isinstance(finished, Finished) and "without FP8" not in shown([*events, finished], terminal=False)
    summary = {**finished.summary, f"heldout_loss_{HIGH}": 2.01}
    text = shown([*events, replace(finished, summary=summary)], terminal=False)
    lines = text.splitlines()
    below = lines[next(i for i, line in enumerate(lines) if line.startswith("held-out loss FP8")) + 1]
    assert below == "  without FP8         2.0100 nats per token, by the same weights"


def test_the_next_commands_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / ".venv" / "bin" / "octavo"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\n", encoding="utf-8")
    own.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(own), "train"])
    monkeypatch.setenv("PATH", "/nowhere")
    text = shown(run_of("fp8", "bf16"), terminal=False, program=program())
    assert "  evaluate            .venv/bin/octavo eval runs/tiny\n" in text
    *events, finished = run_of("fp8", "bf16")
    assert isinstance(finished, Finished)
    text = shown([*events, replace(finished, directory=Path("runs/my run"))], terminal=False)
    assert "octavo eval 'runs/my run'\n" in text
    assert "octavo train 'runs/my run' --recipe folded --out 'runs/my run-folded'\n" in text


def test_the_time_left_follows_the_speed_and_forgets_the_first_step() -> None:
    started, first, *_ = run_of("fp8")
    assert isinstance(first, Logged)
    lines = [replace(first, tokens=0, tokens_per_second=speed) for speed in (0.01, 2.0, 1.0, 0.5)]
    rows = [line.split() for line in shown([started, *lines], terminal=False).splitlines() if " 1.000 " in line]
    tokens = tiny().tokens
    assert rows[0][-1] == "-"  # the first step compiles: its speed says nothing
    assert [row[-1] for row in rows[1:]] == [clock(tokens / 2), clock(tokens / 2), clock(tokens)]  # medians


def plan_on(device: str, *, is_fp8: bool = True) -> SimpleNamespace:
    return SimpleNamespace(device=device, layers=[SimpleNamespace(is_fp8=is_fp8), SimpleNamespace(is_fp8=False)])


def test_the_wait_for_the_first_step_on_a_gpu_is_explained() -> None:
    started = run_of("fp8")[0]
    assert isinstance(started, Started)
    on_gpu = replace(started, plan=plan_on("cuda"))
    assert "first step: compiling" in shown([on_gpu], terminal=True)
    assert "compiling" not in shown([started], terminal=True)


def test_a_cpu_run_says_beforehand_that_fp8_is_slower() -> None:
    started = run_of("fp8")[0]
    assert isinstance(started, Started)
    plans = plan_on("cpu"), plan_on("cuda"), plan_on("cpu", is_fp8=False)
    here, gpu, nothing = (shown([replace(started, plan=plan)], terminal=False) for plan in plans)
    assert "slower than BF16 here" in here and "no layer is in FP8" not in here
    assert "slower than BF16" not in gpu
    assert "slower than BF16" not in nothing and "no layer is in FP8" in nothing


def test_the_closing_block_tells_of_weights_that_are_not_fp32() -> None:
    *events, finished = run_of("fp8", "bf16")
    assert isinstance(finished, Finished)
    told = {"weights": "fp8", "weight_bytes_per_parameter": 1.234, "optimizer_bytes_per_parameter": 12.0}
    text = shown([*events, replace(finished, summary={**finished.summary, **told})], terminal=False)
    assert "weights               fp8, 1.23 bytes per parameter" in text
    assert "optimizer states      fp32, 12.00 bytes per parameter" in text
    assert "bytes per parameter" not in shown([*events, finished], terminal=False)


def test_a_single_lane_shows_no_gap() -> None:
    fp8, bf16 = (shown(run_of(lane), terminal=False) for lane in ("fp8", "bf16"))
    assert "gap" not in fp8
    assert "loss BF16" not in fp8
    assert "loss FP8" not in bf16
    assert "8-bit GEMMs" not in bf16


def test_a_change_of_precision_and_skipped_steps_are_told() -> None:
    stream = io.StringIO()
    reporter = ConsoleReporter(Console(file=stream, width=100))
    reporter.report(Switched(step=4, recipe="bf16"))
    line = {
        "gradient_norm": {"fp8": 1.0},
        "milliseconds": {"fp8": 1.0},
        "lr": 0.1,
        "tokens": 1,
        "tokens_per_second": 1.0,
    }
    event = Logged(step=6, loss={"fp8": math.inf}, loss_scale={"fp8": 64.0}, overflows={"fp8": 2}, **line)
    reporter.report(event)
    text = "FP8 gradients overflowed, 2 steps skipped so far"
    reporter.report(GuardEvent(6, "warning", "overflow", text, "loss scale 64", value=2))
    told = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert told == [
        "step 4: the FP8 model switches to recipe 'bf16'",
        "step 6: FP8 gradients overflowed, 2 steps skipped so far -> loss scale 64",
    ]
    assert event.record()["loss_fp8"] is None and event.record()["overflows_fp8"] == 2


@pytest.mark.filterwarnings("always:be careful")
def test_what_is_printed_is_kept_beside_the_run_with_warnings_and_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown_before: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", show := lambda message, *_: shown_before.append(str(message)))
    started, *rest = run_of("fp8", "bf16")
    started = replace(started, config=started.config.with_run(out=tmp_path))  # type: ignore[type-var, union-attr]
    for events, error in ([started, rest[0]], RuntimeError("no more \x1b[31m")), ([started, *rest], None):
        screen = Console(file=io.StringIO(), force_terminal=True, width=120)
        reporter = ConsoleReporter(screen, keep=True)
        assert error is None or not (tmp_path / FILE).exists()  # a run that does not start leaves its directory empty
        try:
            raise KeyError("of the caller")  # a run that is started while an error is handled did not fail by it
        except KeyError:
            for event in events:
                reporter.report(event)
            warnings.warn(f"be careful, {error}", stacklevel=1)
            logging.getLogger("octavo").warning("a slower kernel")
            reporter.close(error)
    assert warnings.showwarning is show and len(shown_before) == 2
    text = (tmp_path / FILE).read_text()
    assert "\x1b" not in text and text.count("be careful") == 2
    assert text.count("--- 20") == 2 and text.count("a slower kernel") == 2
    assert [line for line in text.splitlines() if "error" in line] == ["octavo: error: no more \\x1b[31m"]
    rows = [line.split()[0] for line in text.splitlines() if " 1.000 " in line]
    assert rows == ["10", "10", "20"]  # one that is resumed writes on below
    assert "stored in             runs/tiny" in text
