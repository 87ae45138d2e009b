"""`octavo eval`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from octavo._util import terminal
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.data.loader import Batch
    from octavo.evaluation.result import Progress
    from octavo.evaluation.text import EvalText


def eval_(
    model: Path,
    /,
    *,
    data: str = "",
    run: Path | None = None,
    step: int | None = None,
    tokens: int | None = None,
    sequence: int | None = None,
    tasks: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = (),
    task_files: Path | None = None,
    limit: int | None = None,
    device: str = "auto",
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
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
    data
        Text to evaluate on, in place of the run's held-out text: a file, a folder, python or english.
    run
        For an exported model: its original run, which is evaluated too, on its held-out text.
    step
        Step of the checkpoint; by default the newest.
    tokens
        Number of tokens, from the beginning of the text; by default all.
    sequence
        Tokens per sequence; by default as in training, or the maximum of an exported model.
    tasks
        Tasks of lm-eval to evaluate on, in place of text (needs octavo[tasks]); FP8 beside BF16, with standard errors.
    task_files
        Folder with task files (.yaml) of your own.
    limit
        Samples per task; by default all.
    device
        cuda or cpu; auto uses the GPU if there is one.
    json_output
        Print the result as JSON on stdout, progress on stderr.
    """
    if not model.is_dir():
        raise ConfigError(f"{model}: no such directory. Name the directory of a run or of an exported model.")
    if run is not None and not run.is_dir():
        raise ConfigError(f"--run {run}: no such directory. Name the directory of a run of `octavo train`.")
    for name, count in (("tokens", tokens), ("sequence", sequence), ("limit", limit)):
        if count is not None and count < 1:
            raise ConfigError(f"--{name} {count}: must be positive.")
    from octavo.evaluation.run import EvalSettings, evaluate_run
    from octavo.evaluation.served import evaluate_served, is_served

    if tasks and (data or run or tokens or sequence):
        raise ConfigError("--tasks: have texts of their own: leave out --data, --run, --tokens and --sequence.")
    settings = EvalSettings(data=data, tokens=tokens, sequence=sequence or 0, step=step, device=device)
    if tasks:
        from octavo.evaluation.tasks import evaluate_tasks

        by_task = evaluate_tasks(model, tasks, settings, files=task_files, limit=limit)
        terminal.say(by_task.to_json() if json_output else by_task)
        return 0
    served = is_served(model)
    if run is not None and not served:
        raise ConfigError(f"--run: needs an exported model, which {model} is not (no config.json with .safetensors).")
    with _progress() as progress:
        found = (
            evaluate_served(model, settings, run=run, progress=progress)
            if served
            else evaluate_run(model, settings, progress)
        )
    terminal.say(found.to_json() if json_output else found)
    return 0 if found.is_finite else 1


@contextmanager
def _progress() -> Iterator[Progress]:
    """Show progress on a terminal."""
    from rich.progress import Progress

    console = terminal.console(stderr=True)
    if not console.is_terminal:
        yield lambda computed, text: text
        return
    with Progress(console=console, transient=True) as bars:
        reading = bars.add_task("reading model and text", total=None)

        def progress(computed: str, text: EvalText) -> Iterable[Batch]:
            bars.update(reading, visible=False)
            return bars.track(text, description=computed)

        yield progress
