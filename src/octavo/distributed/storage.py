"""Files of a sharded checkpoint: safetensors of torch.distributed.checkpoint, and an index. Nothing is pickled.

    index.json                                        size and SHA-256 of every file; written last
    shard-00001-model-00001-of-00002.safetensors      tensors of rank 0, with the offsets of its shards in the header

Any number of ranks can read it.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from octavo._util.checksums import check_file, check_names, check_regular, file_entry, flush
from octavo._util.dist import in_process_group
from octavo.errors import CheckpointError, NonFiniteError, OctavoError
from octavo.tensor import local, non_finite

INDEX = "index.json"
FILE_BYTES = 1 << 30
"""Tensors are written into a new file beyond this size: writing takes twice the memory of a file."""


def write(
    folder: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str] | None = None, group: Any = None
) -> None:
    """Write tensors into a folder that all ranks share. All ranks call it.

    Args:
        texts: contents of further files, by name; the first rank's are written.
        group: process group of all ranks for its messages; by default PyTorch's.

    Raises:
        CheckpointError: a rank could not write.
    """
    # In one process it warns. Several may write in a thread, whose filter would be that of all threads.
    quiet = nullcontext() if in_process_group() else warnings.catch_warnings(action="ignore", category=UserWarning)
    with _errors(folder), quiet:
        writer = _Writer(folder, tensors, texts)
        state_dict_saver.save(dict(tensors), storage_writer=writer, planner=_SavePlanner(), process_group=group)


def write_async(folder: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str], group: Any) -> Any:
    """Write in the background, after a copy to the host; return a future, which raises the errors of `write`."""
    written: futures.Future[None] = futures.Future()

    def settle(saved: Any) -> None:
        try:
            with _errors(folder):
                saved.result()
            written.set_result(None)
        except Exception as error:
            written.set_exception(error)

    state_dict_saver.async_save(
        dict(tensors), storage_writer=_Writer(folder, tensors, texts), planner=_SavePlanner(), process_group=group
    ).add_done_callback(settle)  # type: ignore[union-attr]
    return written


def read(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool = False) -> None:
    """Read into these tensors, sharded or not; files must have been checked. All ranks call it, unless `alone`.

    Args:
        tensors: by name, to be overwritten.
        alone: read in this process only.

    Raises:
        CheckpointError: a tensor is missing, incomplete, or of another shape or dtype, on any rank, and nothing is
            overwritten; or a file, which was there before, cannot be read.
    """
    reader = HuggingFaceStorageReader(str(folder))
    with _errors(folder), warnings.catch_warnings(action="ignore", category=UserWarning):  # about one process
        state_dict_loader.load(dict(tensors), storage_reader=reader, planner=_Planner(), no_dist=alone)


def read_index(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the entry of each file of a folder.

    Raises:
        CheckpointError: there is no index, it is malformed, or the folder has the pickled one of earlier versions.
    """
    path = folder / INDEX
    if not path.exists() and (folder / ".metadata").exists():
        raise CheckpointError(
            f"{folder}: was written by an earlier version, with a pickle as index, which can run code when it is read."
            " If you trust it, convert it once: docs/how-to/train-on-many-gpus.md, 'Checkpoints of earlier versions'."
        )
    try:
        check_regular(path)
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        check_names(files)
        return {name: {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])} for name, entry in files.items()}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}): the checkpoint is not complete.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: truncated or malformed ({error}).") from error


def check_files(folder: Path, finite: Callable[[str], bool], *, rank: int = 0, ranks: int = 1) -> None:
    """Check this rank's share of the files, by their checksums and `check_finite`.

    Raises:
        CheckpointError: one of them is missing or damaged, or a file is not in the index.
        NonFiniteError: a tensor that must be finite is not.
    """
    index = read_index(folder)
    for path in folder.glob("*.safetensors"):
        if path.name not in index:
            raise CheckpointError(f"{path}: is not in {folder / INDEX}: it is not of this checkpoint.")
    for name in sorted(index)[rank::ranks]:
        check_file(folder / name, index[name])
        if name.endswith(".safetensors"):
            check_finite(folder / name, finite)


def check_finite(path: Path, finite: Callable[[str], bool]) -> None:
    """Check the values of a file of tensors.

    Args:
        path: the file.
        finite: (name) -> whether the tensor may have neither a NaN nor an infinity.

    Raises:
        CheckpointError: the file is malformed.
        NonFiniteError: a tensor that must be finite is not.
    """
    with _errors(path), safe_open(path, framework="pt") as file:
        for name in filter(finite, file.keys()):
            tensor = file.get_tensor(name)
            if count := int(non_finite(tensor)):
                raise NonFiniteError(f"{path}: {count} of {tensor.numel()} values of '{name}' are NaN or infinite.")


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of each whole tensor.

    Raises:
        CheckpointError: a file is malformed, or a tensor is incomplete.
    """
    with _errors(folder):
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    return {name: (entry.size, entry.properties.dtype) for name, entry in _complete(metadata).items()}


class _Writer(HuggingFaceStorageWriter):
    """Writes each rank's shards, and the index once all files are on disk."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str] | None) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._folder, self._numbers, self._texts = folder, _file_numbers(tensors), texts or {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        (self._folder / INDEX).unlink(missing_ok=True)  # from here on the folder is incomplete
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        own = replace(plan, storage_data={**plan.storage_data, "fqn_to_index_mapping": self._numbers})
        results = super().write_data(own, planner).value()
        files = {result.storage_data.relative_path for result in results}
        entries = {name: file_entry(self._folder / name) for name in files}
        done: Future[list[WriteResult]] = Future()
        done.set_result([replace(r, storage_data=(n := r.storage_data.relative_path, entries[n])) for r in results])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = dict(result.storage_data for of_rank in results for result in of_rank)
        for name, text in self._texts.items():  # here, where an error of the first rank is one of all
            (self._folder / name).write_text(text, encoding="utf-8")
        for path in filter(Path.is_file, self._folder.iterdir()):
            if path.name not in files:
                if path.suffix == ".safetensors":
                    path.unlink()  # of an earlier checkpoint, by more ranks
                else:
                    files[path.name] = file_entry(path)
        path = self._folder / INDEX
        path.write_text(json.dumps({"files": dict(sorted(files.items()))}, indent=1) + "\n", encoding="utf-8")
        flush(path)
        flush(self._folder)


class _SavePlanner(DefaultSavePlanner):
    """Copies what a file of safetensors cannot hold: tensors that share memory, as tied weights, or are strided."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        if not isinstance(found, Tensor):
            return found
        return found.detach().clone(memory_format=torch.contiguous_format) if found.is_cpu else found.contiguous()


class _Planner(DefaultLoadPlanner):
    """Refuses tensors that are incomplete or of another dtype, which would be converted."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        known = _complete(metadata)
        for name, tensor in state_dict.items():
            if name in known and (dtype := known[name].properties.dtype) != tensor.dtype:
                raise CheckpointError(f"'{name}' is {dtype} there and {tensor.dtype} here.")
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _complete(metadata: Metadata) -> Mapping[str, Any]:
    """Return the entry of each tensor, all of whose values are there."""
    known: Mapping[str, Any] = metadata.state_dict_metadata
    for name, entry in known.items():
        found, size = sum(prod(chunk.sizes) for chunk in entry.chunks), prod(entry.size)
        if found != size:
            raise CheckpointError(f"'{name}' is incomplete: {found} of {size} values.")
    return known


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of the file of each tensor of this rank, from 1."""
    numbers, size = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + size // FILE_BYTES
        size += local(tensor).nbytes
    return numbers


@contextmanager
def _errors(folder: Path) -> Iterator[None]:
    """Raise errors of torch.distributed.checkpoint in this block as Octavo's."""
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        if isinstance(reason, OctavoError):
            raise type(reason)(f"{folder}: {reason}") from error
        if isinstance(reason, OSError):
            raise CheckpointError(f"{folder}: {reason.strerror or reason} (rank {rank}).") from error
        raise CheckpointError(
            f"{folder} does not fit this model, its optimizer, or the ranks it is sharded over (rank {rank}: {reason})."
        ) from error
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{folder}: cannot be read ({error}).") from error
