"""Checkpoints: safetensors and JSON, written atomically.

    checkpoints/step-000100/
        state.json              step, configuration, loader, totals, versions, size and SHA-256 of every file
        fp8.safetensors         model.<parameter>, optimizer.<parameter>.exp_avg | exp_avg_sq | step
        bf16.safetensors        the same for the BF16 baseline
        random.safetensors      the states of torch's generators

A run on several ranks writes one such file per rank, `fp8.rank-0.safetensors`, and sharded tensors separately:

        sharded/                fp8.model.<parameter>, ... of all ranks (`octavo.distributed.storage`)

Any number of ranks can read it. Nothing is pickled.

A checkpoint is written under a name that starts with a dot, flushed to disk, then renamed, and renamed before it is
removed: every `step-*` directory is complete. One of the same step is renamed to `.old-step-*` first, and counts until
the new one is in place.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo._util.checksums import check_file, check_names, file_entry, flush
from octavo._util.config_reader import blaming, read_file, shown
from octavo._util.files import OLD, os_errors, put_in_place, remove, write_text
from octavo.errors import CheckpointError, NonFiniteError
from octavo.lab.train.parallel import SINGLE_PROCESS, Ranks
from octavo.tensor import is_distributed, local, non_finite

FORMAT = 2
"""Format 1 had sizes in place of checksums; it can be read."""
_PREFIX = "step-"
_TEMPORARY = ".writing-"
_NAME = re.compile(rf"({re.escape(OLD)})?{_PREFIX}(\d+)")
_SHARDED = "sharded"
_ROLLED_BACK = "rolled-back.json"
"""File in a checkpoint that a rollback has abandoned and kept, with the step that the run went back to."""

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
    rolled_back_to: int | None = None
    """Step that the run went back to afterwards, so that the log ends there; None if it did not (`roll_back`)."""

    @property
    def step(self) -> int:
        """Number of steps made when it was written."""
        return int(self.state["step"])

    @property
    def run(self) -> Path:
        """Directory of its run."""
        return Path(os.path.abspath(self.path)).parent.parent  # noqa: PTH100  # `.` has no parent; links stay


def save(
    directory: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    *,
    keep: int,
    ranks: Ranks = SINGLE_PROCESS,
) -> Path:
    """Write `directory/step-XXXXXX`, then remove all but the newest `keep` checkpoints up to it. Return its path.

    Those of later steps are removed, too: the run has gone back since (`roll_back`). All ranks call it, with a shared
    directory.

    Raises:
        CheckpointError: a rank could not write it (disk full, for example), or the first one not remove others. All
                ranks raise it. No partial checkpoint remains, and earlier ones are kept.
    """
    final = directory / name_of(step)
    temporary = directory / f"{_TEMPORARY}{final.name}"
    try:
        ranks.on_first(lambda: _begin(temporary))
        files = _write_tensors(temporary, tensors, ranks)
        about = {"format": FORMAT, "step": step, "ranks": ranks.count, "stages": ranks.parallel.pipeline}
        ranks.on_first(lambda: _finish(temporary, final, {**about, **state, "files": files}))
    except (OSError, CheckpointError) as error:
        raise CheckpointError(_not_written(final, error, latest(directory))) from error
    finally:
        # Also on Ctrl-C; after the rename there is nothing to remove.
        if ranks.is_first:
            with suppress(OSError):  # the first error counts; the next checkpoint removes what is left, or says why
                remove(temporary)
    ranks.on_first(lambda: _remove_others(directory, step, keep))
    return final


def roll_back(directory: Path, step: int) -> bool:
    """Remove the checkpoints after `step`, to which a run goes back: a resumed run is not to find the fault in one.

    The newest one up to `step` is then the one to resume from. If there is none up to `step`, the oldest one, which is
    the least likely to have the fault, stays until `save` has written another: to resume from it is better than to
    start over, although the log lacks the steps before it. A file in it has `step` (`Checkpoint.rolled_back_to`).

    Returns:
        True if one stays for that reason, so that another should be saved soon.
    """
    earlier, later = _split(directory, step)
    only_later = bool(later) and not earlier
    for path in reversed(later[1:] if only_later else later):
        _remove(path)
    if only_later:
        with suppress(CheckpointError):  # a full disk ends no run here
            content = {"step": step, "from": _step_of(later[0])}
            signed = json.dumps({**content, "sha256": _digest(content)})
            write_text(later[0] / _ROLLED_BACK, signed + "\n", CheckpointError)
    return only_later


def name_of(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"{_PREFIX}{step:06d}"


def find(directory: Path) -> list[Path]:
    """Return the checkpoints in `directory`, oldest first.

    An `.old-step-*` is one if a process was killed before its replacement was in place.
    """
    found: dict[int, Path] = {}
    for path in sorted(directory.glob(f"*{_PREFIX}*")):  # `.old-step-*` comes before `step-*`, which counts
        if (name := _NAME.fullmatch(path.name)) and path.is_dir():
            found[int(name[2])] = path
    return [found[step] for step in sorted(found)]


def latest(directory: Path) -> Path | None:
    """Return the newest checkpoint in `directory`, or None."""
    found = find(directory)
    return found[-1] if found else None


def load(path: Path, *, ranks: Ranks = SINGLE_PROCESS, place: Place | None = None) -> Checkpoint:
    """Read a checkpoint.

    Args:
        path: directory of the checkpoint.
        ranks: the ranks that read it together. Per-rank files of missing ranks are read from another one; in a pipeline
                those of other stages are read too.
        place: memory for sharded tensors; by default they are read whole.

    Raises:
        CheckpointError: a file is missing, truncated, damaged or malformed, or the format version differs.
        NonFiniteError: a weight or an optimizer state is NaN or infinite; the message names it.
    """
    state, tensors = ranks.together(lambda: _read_own(path, ranks))
    if any(name.startswith(f"{_SHARDED}/") for name in state["files"]):
        for name, tensor in _read_sharded(path / _SHARDED, place).items():
            model, _, key = name.partition(".")
            tensors.setdefault(model, {})[key] = tensor
    return Checkpoint(path, tensors, state, _rolled_back_to(path, state["step"]))


def _read_own(path: Path, ranks: Ranks) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Return the state of a checkpoint and the tensors in this rank's files, after checks of its share of all files."""
    state = _read_state(path)
    files, own = state["files"], dict[str, str]()
    for suffix in _suffixes(ranks.rank, state.get("ranks", 1), state.get("stages", 1)):
        own |= {name: name.removesuffix(suffix) for name in files if name.endswith(suffix) and "/" not in name}
    for name in sorted({*own, *sorted(files)[ranks.rank :: ranks.count]}):  # those of all ranks by one of them
        check_file(path / name, files[name], _remedy(path))
        if name.startswith(f"{_SHARDED}/") and name.endswith(".safetensors"):
            _check_finite(path / name)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, model in own.items():
        tensors.setdefault(model, {}).update(_read_tensors(path / name))
        if fault := first_non_finite(tensors[model]):
            raise NonFiniteError(f"{path / name}: {fault}.{_remedy(path)}")
    return state, tensors


def first_non_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name and fault of the first tensor whose part on this rank has a NaN or an infinity; empty if none."""
    sums = {name: _sum(tensor) for name, tensor in tensors.items() if _must_be_finite(name)}
    for name, total in sums.items():  # read after all are queued
        if not math.isfinite(float(total)) and (count := int(non_finite(tensors[name]))):
            return f"{count} of {local(tensors[name]).numel()} values of '{name}' are NaN or infinite"
    return ""


def _sum(tensor: Tensor) -> Tensor:
    """Return a number that is finite only if all values of this rank's part are: counting takes forty times as long.

    A sum of finite values may overflow. That of codes is NaN: it says nothing of their values.
    """
    part = local(tensor).detach()
    is_plain = type(part) is Tensor and part.dtype.itemsize > 1
    return part.sum() if is_plain else torch.full((), math.nan, device=part.device)


def _must_be_finite(name: str) -> bool:
    return name.startswith(("model.", "optimizer."))


def discard(directory: Path) -> None:
    """Remove every checkpoint in `directory`, and what killed processes left.

    Raises:
        CheckpointError: one cannot be removed; a resumed run would find it.
    """
    for path in [*find(directory), *_leftovers(directory)]:
        with _removing(path):
            remove(path)


def _split(directory: Path, step: int) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints up to `step`, and those after it."""
    found = find(directory)
    count = sum(_step_of(path) <= step for path in found)
    return found[:count], found[count:]


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _remove(path: Path) -> None:
    """Remove a checkpoint; a process that is killed meanwhile leaves no partial one under its name."""
    hidden = path.with_name(f"{_TEMPORARY}{name_of(_step_of(path))}")
    with _removing(path):
        remove(hidden)  # left by a process that was killed
        with suppress(FileNotFoundError):
            path.rename(hidden)
        remove(hidden)


def _removing(path: Path) -> AbstractContextManager[None]:
    return os_errors(path, CheckpointError, "cannot be removed")


def _leftovers(directory: Path) -> list[Path]:
    """Return what killed processes left: partial checkpoints, and old ones whose replacement is in place."""
    hidden, found = (directory.glob(f"{prefix}{_PREFIX}*") for prefix in (_TEMPORARY, OLD)), find(directory)
    return [path for paths in hidden for path in paths if path not in found]


def _remove_others(directory: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `step`, and those after it."""
    earlier, later = _split(directory, step)
    for path in [*earlier[:-keep], *later]:
        _remove(path)


def _begin(temporary: Path) -> None:
    for path in _leftovers(temporary.parent):
        remove(path)
    temporary.mkdir(parents=True)


def _write_tensors(
    directory: Path, tensors: Mapping[str, Mapping[str, Tensor]], ranks: Ranks
) -> dict[str, dict[str, Any]]:
    """Write the tensors of all ranks; return the index entries of their files."""
    own, sharded = dict[str, dict[str, Tensor]](), dict[str, Tensor]()
    for name, named in tensors.items():
        own[f"{name}{_suffix(ranks.rank, ranks.count)}"] = {k: x for k, x in named.items() if not is_distributed(x)}
        sharded |= {f"{name}.{key}": tensor for key, tensor in named.items() if is_distributed(tensor)}
    written = ranks.together(lambda: {file: _write_file(directory / file, of_file) for file, of_file in own.items()})
    files = {name: entry for of_rank in ranks.gather(written) for name, entry in of_rank.items()}
    if sharded:
        from octavo.distributed import storage

        storage.write(directory / _SHARDED, sharded, group=ranks.group)
        index = directory / _SHARDED / storage.INDEX
        entries = {**storage.read_index(index.parent), index.name: file_entry(index)}
        files |= {f"{_SHARDED}/{name}": entry for name, entry in entries.items()}
    ranks.barrier()
    return files


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors into a file; return its index entry."""
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise CheckpointError(str(error)) from error
    flush(path)
    return file_entry(path)


def _finish(temporary: Path, final: Path, state: Mapping[str, Any]) -> None:
    """Write `state.json` and rename the directory."""
    path = temporary / "state.json"
    plain = json.loads(json.dumps(state))  # histories of the guard may have NaN
    path.write_text(json.dumps({**plain, "sha256": _digest(plain)}, indent=2) + "\n", encoding="utf-8")
    flush(path)
    put_in_place(temporary, final)


def _digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, in whatever order and spacing."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _suffix(rank: int, ranks: int) -> str:
    return ".safetensors" if ranks == 1 else f".rank-{rank}.safetensors"


def _suffixes(rank: int, ranks: int, stages: int) -> list[str]:
    """Return the suffixes of the files a rank reads: those of one rank of each other stage, then its own."""
    of_stage, own = ranks // stages, rank % ranks
    others = [stage * of_stage + own % of_stage for stage in range(stages)]
    return [_suffix(one, ranks) for one in (*(other for other in others if other != own), own)]


def _read_state(path: Path) -> dict[str, Any]:
    file = path / "state.json"
    try:
        with blaming(file, CheckpointError):
            state = read_file(file, CheckpointError)
            version, _ = state["format"], (state["config"], state["files"].items())
            _check_step(state["step"])
            if version == 1:
                state["files"] = {name: {"bytes": size} for name, size in state["files"].items()}
            check_names(state["files"])
    except CheckpointError as error:
        is_denied = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)
        raise CheckpointError(f"{error}{'' if is_denied else _remedy(path)}") from error
    if version not in (1, FORMAT):
        raise CheckpointError(f"{path}: checkpoint format {version}; this version of octavo reads format {FORMAT}.")
    _check_digest(state, file, path)
    return dict(state)


def _check_step(step: Any, below: float = math.inf) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < below:
        raise ValueError(f"step {shown(step)} is no number of steps" + ("" if below == math.inf else f" below {below}"))


def _check_digest(content: dict[str, Any], file: Path, path: Path) -> None:
    """Compare JSON values with their `sha256`, and remove it.

    State of format 1 and the rollbacks of earlier versions have none.
    """
    digest, version = content.pop("sha256", None), content.get("format")
    if digest is None and version == FORMAT:
        raise CheckpointError(f"{file}: damaged: its SHA-256 is missing.{_remedy(path)}")
    if digest is None and version is None:
        warnings.warn(f"{file}: has no SHA-256, so that a change of it would go unnoticed.", stacklevel=2)
    if digest is not None and digest != _digest(content):
        raise CheckpointError(f"{file}: damaged: its content is not that of its SHA-256.{_remedy(path)}")


def _rolled_back_to(path: Path, step: int) -> int | None:
    """Return the step that the run went back to from a checkpoint of `step`; earlier versions wrote no checksum."""
    file = path / _ROLLED_BACK
    if not os.path.lexists(file):
        return None
    content = read_file(file, CheckpointError)
    _check_digest(content, file, path)
    with blaming(file, CheckpointError):
        _check_step(content["step"], below=step)
        return int(content["step"])


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(file))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror}).") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file}: malformed ({error}).{_remedy(file.parent)}") from error


def _read_sharded(directory: Path, place: Place | None) -> dict[str, Tensor]:
    from octavo.distributed import storage

    try:
        storage.read_index(directory)
        known = storage.shapes(directory)
        memory = {
            name: torch.empty(shape, dtype=dtype) if place is None else place(name, shape, dtype)
            for name, (shape, dtype) in known.items()
        }
        tensors = {name: tensor for name, tensor in memory.items() if tensor is not None}
        storage.read(directory, tensors, alone=place is None)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_remedy(directory.parent)}") from error
    return tensors


def _check_finite(file: Path) -> None:
    from octavo.distributed import storage

    try:
        storage.check_finite(file, lambda name: _must_be_finite(name.partition(".")[2]))
    except (CheckpointError, NonFiniteError) as error:
        raise type(error)(f"{error}{_remedy(file.parents[1])}") from error


def _remedy(path: Path) -> str:
    """Return advice to resume from the checkpoint before `path`, if there is one."""
    found = find(path.parent)
    before = found[: found.index(path)] if path in found else []
    return f" Remove {path} to resume from {before[-1].name}." if before else ""


def _not_written(final: Path, error: BaseException, last: Path | None) -> str:
    # Safetensors reports a full disk as an error of its own, with the reason in the text.
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    stays = f"The last good checkpoint is {last}." if last else "There is no earlier checkpoint."
    return f"{final}: cannot be written ({reason}). {stays}"
