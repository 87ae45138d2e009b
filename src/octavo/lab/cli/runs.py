"""`octavo dashboard`, `octavo report`, `octavo dump` and `octavo export`: the commands that read runs."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from octavo._util.terminal import program, say
from octavo.errors import ConfigError
from octavo.lab.cli.flags import JsonOutput, Output, Switch


def dashboard(
    *folders: Path,
    port: int | None = None,
    open_browser: Annotated[bool, Parameter(name="--open", negative=())] = False,
) -> int:
    """Show runs on a local web page, also while they train.

    The page is read-only and available on this machine only. For a run on another machine, forward the port:
    ssh -L 7117:127.0.0.1:7117 THAT_MACHINE. Ctrl-C ends it.

    Examples:

        octavo dashboard
        octavo dashboard runs/demo --open
        octavo dashboard runs/ --port 8000
        octavo dashboard /mnt/node1/runs /mnt/node2/runs

    Parameters
    ----------
    folders
        Folders with runs at any depth, such as those of several machines, or one run; by default runs.
    port
        Port number; 0 for any free port. By default 7117 or the next free one.
    open_browser
        Open the page in a browser.
    """
    from octavo.lab.monitor.dashboard.server import serve

    roots = folders or (Path("runs"),)

    def ready(address: str) -> None:
        say(f"{', '.join(map(str, roots))}: {address} (Ctrl-C to end)")
        if open_browser:
            import webbrowser

            webbrowser.open(address)

    with suppress(KeyboardInterrupt):  # the way to end it
        serve(*roots, port=port, ready=ready)
    return 0


def report(
    *runs: Path,
    output: Annotated[Path, Parameter(name=("--out", "-o", "--output"))] = Path("report.html"),
) -> int:
    """Write the dashboard of one run, or of several side by side, as one HTML file.

    The file contains all data, opens from disk and needs no network.

    Examples:

        octavo report runs/demo
        octavo report runs/demo runs/other --out compared.html

    Parameters
    ----------
    runs
        Directories of runs.
    output
        File to write.
    """
    from octavo.lab.monitor.dashboard.report import report as write

    if not runs:
        raise ConfigError("no run given: name one, as in `octavo report runs/demo`.")
    path = write(runs, output)
    say(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")
    return 0


def dump(
    run: Path,
    /,
    *,
    to: Annotated[Literal["parquet", "csv", "tensorboard"], Parameter(name=("--to", "--format"))],
    out: Output = None,
    json_output: JsonOutput = False,
) -> int:
    """Write the measurements of a run as Parquet, CSV or TensorBoard files. It may still be training.

    Examples:

        octavo dump runs/demo --to parquet
        octavo dump runs/demo --to csv --out tables
        octavo dump runs/demo --to tensorboard --out logs/demo

    Parameters
    ----------
    run
        Directory of a run, or its run.sqlite.
    to
        parquet or csv: one file per table (scalars, telemetry, histograms, tensors, events, system). tensorboard: an
        event file with the scalars and aggregates of the telemetry.
    out
        Folder to write to; by default a folder named as the format, in the run's directory.
    """
    from octavo.lab.monitor.export import export
    from octavo.lab.monitor.store.writer import file_of

    folder = out or file_of(run).parent / to
    written = export(run, to, folder)
    if json_output:
        say(json.dumps({"files": [str(path) for path in written]}, indent=2))
    else:
        say(*written)
    return 0


def _run_of(directory: Path) -> Path:
    """Return the directory of the run that a checkpoint is of: older checkpoints are removed with all that is in them.

    Any other directory is returned as it is.
    """
    is_checkpoint = (directory / "state.json").exists() and directory.absolute().parent.name == "checkpoints"
    return Path(os.path.relpath(directory.absolute().parents[1])) if is_checkpoint else directory


def export(
    run: Path,
    /,
    *,
    out: Output = None,
    step: int | None = None,
    format: Literal["auto", "compressed-tensors", "fp8", "plain"] = "auto",
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    overwrite: Switch = False,
    json_output: JsonOutput = False,
) -> int:
    """Export a run's model for inference engines: the trained codes and scales, byte for byte, and the tokenizer.

    The directory is a Hugging Face Llama, for `vllm serve`, SGLang and transformers.

    Examples:

        octavo export runs/demo
        octavo export runs/demo --out served --overwrite
        octavo export runs/demo --step 320 --format plain

    Parameters
    ----------
    run
        Directory of a run or of one of its checkpoints.
    out
        Directory to write; by default `export` in the run's directory.
    step
        Step of the checkpoint; by default the newest.
    format
        compressed-tensors: scales per row, tensor or block. fp8: the blocks of DeepSeek-V3. plain: values, nothing in
        FP8. auto: fp8 for blocks, otherwise compressed-tensors; plain for a run in BF16.
    dtype
        Dtype of everything not in FP8.
    overwrite
        Replace an existing exported model.
    """
    import torch

    from octavo.lab.train.export import export_run

    if not run.is_dir():
        raise ConfigError(f"{run}: no such directory. Name the directory of a run of `octavo train`.")
    wanted = "" if format == "auto" else format
    given = {"dtype": getattr(torch, dtype), "overwrite": overwrite, "step": step}
    exported = export_run(run, out or _run_of(run) / "export", wanted, **given)
    of_run = f"--run {run}" + ("" if step is None else f" --step {step}")
    following = (f"vllm serve {exported.directory}", f"{program()} eval {exported.directory} {of_run}")
    say(exported.to_json() if json_output else "\n  ".join([f"{exported}\n\nNext", *following]))
    return 0
