"""Checkpoints: safetensors and JSON, written atomically.

    checkpoints/step-000100/
        state.json              step, configuration, loader, totals, versions, size of every file
        fp8.safetensors         model.<parameter>, optimizer.<parameter>.exp_avg | exp_avg_sq | step
        bf16.safetensors        the same for the BF16 baseline
        random.safetensors      the states of torch's generators

A run on several ranks writes one such file per rank, `fp8.rank-0.safetensors`, and sharded tensors separately:

        sharded/                fp8.model.<parameter>, ... in the format of torch.distributed.checkpoint

Any number of ranks can read it; its `.metadata` is a pickle, as PyTorch writes it.

A checkpoint is written under a name that starts with a dot, flushed to disk, then renamed: every `step-*` directory is
complete.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.errors import CheckpointError, NonFiniteError
from octavo.tensor import is_distributed, local
from octavo.train.parallel import SINGLE_PROCESS, Ranks

FORMAT = 1
_PREFIX = "step-"
_TEMPORARY = ".writing-"
_SHARDED = "sharded"

Place = Callable[[str, torch.Size, torch.dtype], Tensor | None]
"""(name, shape, dtype) -> memory to read the tensor `<file>.<name>` into; None leaves it out."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint on the CPU; sharded tensors are on the device of the rank."""

    path: Path
    """Its directory."""
    tensors: dict[str, dict[str, Tensor]]
    """By file name without suffix, then by tensor name."""
    state: dict[str, Any]
    """Plain values: at least `step`, `config` and `loader`."""

    @property
    def step(self) -> int:
        """Number of steps made when it was written."""
        return int(self.state["step"])


def save(
    directory: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
    ranks: Ranks = SINGLE_PROCESS,
) -> Path:
    """Write `directory/step-XXXXXX`, then remove all but the newest `keep` checkpoints. Return its path.

    All ranks call it, with a shared directory.

    Raises:
        CheckpointError: it could not be written (disk full, for example). No partial checkpoint remains, and earlier
                ones are kept.
    """
    final = directory / name_of(step)
    temporary = directory / f"{_TEMPORARY}{final.name}"
    try:
        ranks.on_first(lambda: _begin(temporary))
        _write_tensors(temporary, tensors, ranks)
        ranks.on_first(
            lambda: _finish(temporary, final, {"format": FORMAT, "step": step, **_written_by(ranks), **state})
        )
    except (OSError, SafetensorError, _sharded_error()) as error:
        raise CheckpointError(_not_written(final, error, latest(directory))) from error
    finally:
        # Also on Ctrl-C; after the rename there is nothing to remove.
        if ranks.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
    for old in find(directory)[:-keep] if ranks.is_first else ():
        shutil.rmtree(old, ignore_errors=True)
    return final


def name_of(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"{_PREFIX}{step:06d}"


def find(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory`, oldest first."""
    numbered = [p for p in directory.glob(f"{_PREFIX}*") if p.is_dir() and p.name[len(_PREFIX) :].isdigit()]
    return sorted(numbered, key=lambda path: int(path.name[len(_PREFIX) :]))


def latest(directory: Path) -> Path | None:
    """Return the newest checkpoint in `directory`, or None."""
    found = find(directory)
    return found[-1] if found else None


def load(path: Path, *, rank: int = 0, place: Place | None = None) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: directory of the checkpoint.
        rank: this rank. Per-rank files of missing ranks are read from another one; in a pipeline those of other
                stages are read too.
        place: memory for sharded tensors; by default they are read whole.

    Raises:
        CheckpointError: a file is missing, truncated or malformed, or the format version differs.
        NonFiniteError: a weight is NaN or infinite; the message names the parameter.
    """
    state = _read_state(path)
    for name, size in state["files"].items():
        _check_size(path / name, size)
    tensors: dict[str, dict[str, Tensor]] = {}
    for suffix in _suffixes(rank, state.get("ranks", 1), state.get("stages", 1)):
        for name in state["files"]:
            if name.endswith(suffix) and "/" not in name:
                tensors.setdefault(name.removesuffix(suffix), {}).update(_read_tensors(path / name))
    if any(name.startswith(f"{_SHARDED}/") for name in state["files"]):
        for name, tensor in _read_sharded(path / _SHARDED, place).items():
            file, _, own = name.partition(".")
            tensors.setdefault(file, {})[own] = tensor
    for model, named in tensors.items():
        _check_finite(path, model, named)
    return Checkpoint(path, tensors, state)


def discard(directory: Path) -> None:
    """Remove every checkpoint in `directory`, and partial ones of killed processes."""
    for path in [*find(directory), *directory.glob(f"{_TEMPORARY}*")]:
        shutil.rmtree(path, ignore_errors=True)


def _begin(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    temporary.mkdir(parents=True)


def _write_tensors(directory: Path, tensors: Mapping[str, Mapping[str, Tensor]], ranks: Ranks) -> None:
    sharded: dict[str, Tensor] = {}
    for name, named in tensors.items():
        path = directory / f"{name}{_suffix(ranks.rank, ranks.count)}"
        own = {key: tensor for key, tensor in named.items() if not is_distributed(tensor)}
        sharded |= {f"{name}.{key}": tensor for key, tensor in named.items() if key not in own}
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in own.items()}, path)
        _flush(path)
    if sharded:
        from torch.distributed.checkpoint import state_dict_saver

        state_dict_saver.save(sharded, checkpoint_id=str(directory / _SHARDED))  # flushes its files itself
    ranks.barrier()


def _finish(temporary: Path, final: Path, state: Mapping[str, Any]) -> None:
    """Write `state.json`, with the size of each file, and rename the directory."""
    files = {str(path.relative_to(temporary)): path.stat().st_size for path in _files(temporary)}
    path = temporary / "state.json"
    path.write_text(json.dumps({**state, "files": files}, indent=2) + "\n", encoding="utf-8")
    _flush(path)
    _flush(temporary)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    _flush(final.parent)


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _suffix(rank: int, ranks: int) -> str:
    return ".safetensors" if ranks == 1 else f".rank-{rank}.safetensors"


def _suffixes(rank: int, ranks: int, stages: int) -> list[str]:
    """Return the suffixes of the files a rank reads: those of one rank of each other stage, then its own."""
    of_stage, own = ranks // stages, rank % ranks
    others = [stage * of_stage + own % of_stage for stage in range(stages)]
    return [_suffix(one, ranks) for one in (*(other for other in others if other != own), own)]


def _written_by(ranks: Ranks) -> dict[str, int]:
    return {"ranks": ranks.count, "stages": ranks.parallel.pipeline}


def _sharded_error() -> type[BaseException]:
    """Return the exception type of torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
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


def _check_size(file: Path, size: int) -> None:
    try:
        actual = file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from error
    if actual != size:
        raise CheckpointError(f"{file}: truncated, {actual} of {size} bytes.{_remedy(_checkpoint_of(file))}")


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(file))
    except OSError as error:
        raise _unreadable(file, error) from error
    except SafetensorError as error:
        raise CheckpointError(f"{file}: malformed ({error}).{_remedy(file.parent)}") from error


def _read_sharded(directory: Path, place: Place | None) -> dict[str, Tensor]:
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        known = FileSystemReader(directory).read_metadata().state_dict_metadata
        memory = {name: _memory(name, entry, place) for name, entry in known.items()}
        tensors = {name: tensor for name, tensor in memory.items() if tensor is not None}
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about reading in one process
            state_dict_loader.load(tensors, checkpoint_id=str(directory), no_dist=place is None)
    except (_sharded_error(), OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{directory}: cannot be read ({error}).{_remedy(directory.parent)}") from error
    return tensors


def _memory(name: str, entry: Any, place: Place | None) -> Tensor | None:
    shape, dtype = entry.size, entry.properties.dtype
    return torch.empty(shape, dtype=dtype) if place is None else place(name, shape, dtype)


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{file}: cannot be read ({error.strerror}).{_remedy(_checkpoint_of(file))}")


def _checkpoint_of(file: Path) -> Path:
    return file.parent.parent if file.parent.name == _SHARDED else file.parent


def _check_finite(path: Path, model: str, named: Mapping[str, Tensor]) -> None:
    for name, tensor in named.items():
        if not (name.startswith("model.") and tensor.is_floating_point()):
            continue
        tensor = local(tensor)
        finite = torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor)  # no isfinite for FP8
        if not finite.all():
            count = int((~finite).sum())
            parameter = name.removeprefix("model.")
            raise NonFiniteError(
                f"{path / model}.safetensors: {count} of {tensor.numel()} values of the parameter"
                f" '{parameter}' are NaN or infinite.{_remedy(path)}"
            )


def _remedy(path: Path) -> str:
    """Return advice to resume from the checkpoint before `path`, if there is one."""
    before = [p for p in find(path.parent) if p.name < path.name]
    return f" Remove {path} to resume from {before[-1].name}." if before else ""


def _not_written(final: Path, error: BaseException, last: Path | None) -> str:
    # Safetensors reports a full disk as an error of its own, with the reason in the text.
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    stays = f"The last good checkpoint is {last}." if last else "There is no earlier checkpoint."
    return f"{final}: cannot be written ({reason}). {stays}"
