"""Checkpoints: safetensors and JSON, no pickle, written whole or not at all.

    checkpoints/step-000100/
        state.json              step, configuration, loader, totals, versions, size of every file
        fp8.safetensors         model.<parameter>, optimizer.<parameter>.exp_avg | exp_avg_sq | step
        bf16.safetensors        the same of the twin
        random.safetensors      the states of torch's generators

A checkpoint is written under a name that starts with a dot, flushed to disk, then renamed: what has the name
`step-*` is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.errors import CheckpointError, NonFiniteError

FORMAT = 1
_PREFIX = "step-"
_TEMPORARY = ".writing-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint holds, on the CPU."""

    path: Path
    """Its directory."""
    tensors: dict[str, dict[str, Tensor]]
    """By file name without suffix, then by tensor name."""
    state: dict[str, Any]
    """Plain values: at least `step`, `config` and `loader`."""

    @property
    def step(self) -> int:
        """Number of steps done when it was written."""
        return int(self.state["step"])


def save(
    directory: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write `directory/step-XXXXXX`, then remove all but the newest `keep` checkpoints. Return its path.

    Raises:
        CheckpointError: it could not be written (no space left, say). Nothing half-written remains, and the
            checkpoints before it stay.
    """
    final = directory / f"{_PREFIX}{step:06d}"
    temporary = directory / f"{_TEMPORARY}{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    try:
        temporary.mkdir(parents=True)
        _write(temporary, tensors, {"format": FORMAT, "step": step, **state})
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _flush(directory)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_not_written(final, error, latest(directory))) from error
    finally:
        # Also on Ctrl-C: after the rename there is nothing left to remove.
        shutil.rmtree(temporary, ignore_errors=True)
    for old in find(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def find(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory`, oldest first."""
    numbered = [p for p in directory.glob(f"{_PREFIX}*") if p.is_dir() and p.name[len(_PREFIX) :].isdigit()]
    return sorted(numbered, key=lambda path: int(path.name[len(_PREFIX) :]))


def latest(directory: Path) -> Path | None:
    """Return the newest checkpoint in `directory`, or None."""
    found = find(directory)
    return found[-1] if found else None


def load(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        CheckpointError: a file is missing, truncated or malformed, or the format is of another version.
        NonFiniteError: a weight is NaN or infinite; the message names the parameter.
    """
    state = _read_state(path)
    tensors = {}
    for name, size in state["files"].items():
        tensors[Path(name).stem] = _read_tensors(path / name, size)
    for lane, named in tensors.items():
        _check_finite(path, lane, named)
    return Checkpoint(path, tensors, state)


def discard(directory: Path) -> None:
    """Remove every checkpoint in `directory`, half-written ones of a killed process included."""
    for path in [*find(directory), *directory.glob(f"{_TEMPORARY}*")]:
        shutil.rmtree(path, ignore_errors=True)


def _write(directory: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    sizes = {}
    for name, named in tensors.items():
        path = directory / f"{name}.safetensors"
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in named.items()}, path)
        _flush(path)
        sizes[path.name] = path.stat().st_size
    path = directory / "state.json"
    path.write_text(json.dumps({**state, "files": sizes}, indent=2) + "\n", encoding="utf-8")
    _flush(path)
    _flush(directory)


def _flush(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_state(path: Path) -> dict[str, Any]:
    file = path / "state.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        version, _ = state["format"], (state["step"], state["config"], state["files"].items())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}).{_remedy(path)}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: truncated or malformed ({error}).{_remedy(path)}") from error
    if version != FORMAT:
        raise CheckpointError(f"{path}: checkpoint format {version}; this version of octavo reads format {FORMAT}.")
    return dict(state)


def _read_tensors(file: Path, size: int) -> dict[str, Tensor]:
    try:
        actual = file.stat().st_size
        if actual != size:
            raise CheckpointError(f"{file}: truncated, {actual} of {size} bytes.{_remedy(file.parent)}")
        return dict(load_file(file))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}).{_remedy(file.parent)}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file}: malformed ({error}).{_remedy(file.parent)}") from error


def _check_finite(path: Path, lane: str, named: Mapping[str, Tensor]) -> None:
    for name, tensor in named.items():
        if not (name.startswith("model.") and tensor.is_floating_point()):
            continue
        finite = torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)  # codes cannot be asked
        if not finite.all():
            count = int((~finite).sum())
            parameter = name.removeprefix("model.")
            raise NonFiniteError(
                f"{path / lane}.safetensors: {count} of {tensor.numel()} values of the parameter"
                f" '{parameter}' are NaN or infinite.{_remedy(path)}"
            )


def _remedy(path: Path) -> str:
    """Say how to go on without the checkpoint `path`: from the one before, where there is one."""
    before = [p for p in find(path.parent) if p.name < path.name]
    return f" Remove {path} to resume from {before[-1].name}." if before else ""


def _not_written(final: Path, error: Exception, last: Path | None) -> str:
    # Safetensors reports a full disk as its own error, with the reason in the text.
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    stays = f"The last good checkpoint is {last}." if last else "There is no earlier checkpoint."
    return f"{final}: cannot be written ({reason}). {stays}"
