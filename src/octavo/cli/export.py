"""`octavo export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from octavo._util.terminal import say
from octavo.errors import ConfigError


def export(
    run: Path,
    /,
    *,
    out: Path | None = None,
    format: Literal["auto", "compressed-tensors", "fp8", "plain"] = "auto",
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    overwrite: Annotated[bool, Parameter(negative=())] = False,
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Export a run's model for inference engines: the trained codes and scales, byte for byte, and the tokenizer.

    The directory is a Hugging Face Llama, for `vllm serve`, SGLang and transformers.

    Examples:

        octavo export runs/demo
        octavo export runs/demo --out served --overwrite
        octavo export runs/demo/checkpoints/step-000320 --format plain --dtype float32

    Parameters
    ----------
    run
        Directory of a run or of one of its checkpoints.
    out
        Directory to write; by default `export` in the run's directory.
    format
        compressed-tensors: scales per row, tensor or block. fp8: the blocks of DeepSeek-V3. plain: values, nothing in
        FP8. auto: fp8 for blocks, otherwise compressed-tensors; plain for a run in BF16.
    dtype
        Dtype of everything not in FP8.
    overwrite
        Replace an existing exported model.
    json_output
        Print the result as JSON.
    """
    import torch

    from octavo.serving.run import export_run

    if not run.is_dir():
        raise ConfigError(f"{run}: no such directory. Name the directory of a run of `octavo train`.")
    wanted = "" if format == "auto" else format
    exported = export_run(run, out or run / "export", wanted, dtype=getattr(torch, dtype), overwrite=overwrite)
    following = (f"vllm serve {exported.directory}", f"octavo eval {exported.directory} --run {run}")
    say(exported.to_json() if json_output else "\n  ".join([f"{exported}\n\nNext", *following]))
    return 0
