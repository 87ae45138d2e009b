"""`octavo eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from octavo._util import terminal
from octavo.errors import ConfigError
from octavo.lab.cli.flags import JsonOutput

if TYPE_CHECKING:
    from octavo.lab.evaluation.result import Evaluation
    from octavo.lab.evaluation.run import EvalSettings


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class TextFlags:
    """Flags for the text to evaluate on."""

    data: str = ""
    """Text to evaluate on, in place of the run's held-out text: a file, a folder, python or english."""
    tokens: PositiveInt | None = None
    """Number of tokens, from the beginning of the text; by default all."""
    sequence: PositiveInt | None = None
    """Tokens per sequence; by default as in training, or the maximum of an exported model."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFlags:
    """Flags for tasks to evaluate on."""

    tasks: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = ()
    """Tasks of lm-eval to evaluate on, in place of text (needs octavo[tasks]): FP8 beside BF16, with errors."""
    task_files: Path | None = None
    """Folder with task files (.yaml) of your own, which the tasks are then taken from."""
    limit: PositiveInt | None = None
    """Samples per task; by default all."""


ALL_TEXT, NO_TASKS = TextFlags(), TaskFlags()


def eval_(
    model: Path,
    /,
    *,
    text: TextFlags = ALL_TEXT,
    run: Path | None = None,
    step: int | None = None,
    tasks: TaskFlags = NO_TASKS,
    device: str = "auto",
    json_output: JsonOutput = False,
) -> int:
    """Evaluate a run or an exported model on text: the loss in FP8 and in high precision.

    Every precision is evaluated on the same text; differences are paired by sequence.

    Examples:

        octavo eval runs/demo
        octavo eval runs/demo --step 320 --tokens 100000
        octavo eval runs/demo --data notes.txt --json
        octavo eval served --run runs/demo
        octavo eval served --data notes.txt
        octavo eval runs/demo --tasks arithmetic --task-files my-tasks

    Parameters
    ----------
    model
        Directory of a run or of one of its checkpoints, or a model written by octavo export (needs transformers).
    run
        For an exported model: its original run, which is evaluated too, on its held-out text.
    step
        Step of the checkpoint; by default the newest.
    device
        cuda or cpu; auto uses the GPU if there is one.
    """
    if not model.is_dir():
        raise ConfigError(f"{model}: no such directory. Name the directory of a run or of an exported model.")
    if run is not None and not run.is_dir():
        raise ConfigError(f"--run {run}: no such directory. Name the directory of a run of `octavo train`.")
    from octavo.lab.evaluation.run import EvalSettings

    settings = EvalSettings(data=text.data, tokens=text.tokens, sequence=text.sequence or 0, step=step, device=device)
    if not tasks.tasks and tasks != NO_TASKS:
        raise ConfigError("--limit and --task-files need --tasks. --tokens limits a text.")
    if not tasks.tasks:
        found = _evaluate(model, run, settings)
        terminal.say(found.to_json() if json_output else found)
        return 0 if found.is_finite else 1
    if text != ALL_TEXT or run:
        raise ConfigError("--tasks: have texts of their own: leave out --data, --run, --tokens and --sequence.")
    from octavo.lab.evaluation.tasks import evaluate_tasks

    by_task = evaluate_tasks(model, tasks.tasks, settings, files=tasks.task_files, limit=tasks.limit)
    terminal.say(by_task.to_json() if json_output else by_task)
    return 0


def _evaluate(model: Path, run: Path | None, settings: EvalSettings) -> Evaluation:
    """Evaluate a run, or an exported model, on text."""
    from octavo.lab.evaluation.run import evaluate_run
    from octavo.lab.evaluation.served import evaluate_served, is_served

    served = is_served(model)
    if run is not None and not served:
        raise ConfigError(f"--run: needs an exported model, which {model} is not (no config.json with .safetensors).")
    with terminal.progress() as report:
        report("reading model and text", 0.0)
        if not served:
            return evaluate_run(model, settings, report)
        return evaluate_served(model, settings, run=run, report=report)
