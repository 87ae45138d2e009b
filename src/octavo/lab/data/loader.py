"""Token files to batches: packed windows in a random order that depends only on seed and position.

A file of N ids is split into `(N - 1) // T` windows of T + 1 ids that overlap by one, so that every id except the
first, and up to T - 1 at the end, is a target exactly once per pass. Windows ignore document ends; the
end-of-document id marks them.

With `separate`, the id that ends documents, what follows it in a window, and what begins the window, is given as the
first id of a document, and the id after an end is no target: it belongs to another document. No id is padding, and the
position needs no more state. A document that a window cuts goes on in another window as a document of its own.

The stream of windows is global: sample n is window `permutation(seed, n // windows)[n % windows]`. In each step rank r
takes the r-th batch of the next `world * batch` samples. The state is therefore one number, any number of ranks visits
the same samples, and no window is dropped at the end of a pass.

Files of 32-bit ids (`.u32`) may flag an id: `FIRST` begins a document that attention does not leave, and is given as
its complement among the inputs; `NO_TARGET` is given as -100 among the targets.

Shapes: B batch, T sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo._util.files import os_errors
from octavo.errors import CheckpointError, ConfigError, DataError
from octavo.lab.data.tokenizer import Tokens
from octavo.nn.cross_entropy import IGNORED

Batch = tuple[Tensor, Tensor]
"""(inputs_BT, targets_BT), int64 on the CPU; a target is the id after its input."""
NO_TARGET, FIRST = np.uint32(1 << 31), np.uint32(1 << 30)
"""Flags of 32-bit ids."""
IDS = np.uint32(FIRST - 1)
"""Mask of the ids themselves."""
_BLOCKS, _BLOCK_BYTES = 64, 4096
"""Blocks of a token file that its digest reads."""


class Loader:
    """An endless iterator over batches of training tokens. `state_dict` resumes it exactly."""

    def __init__(
        self,
        tokens_path: Path,
        batch: int,
        sequence: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        *,
        source: str = "",
        separate: int | None = None,
    ) -> None:
        """Open `tokens_path`, written by `prepare`, for rank `rank` of `world`; `batch` is per rank.

        `source` is the text that the file was made from, for messages about its length. `separate` is the id that ends
        documents, if attention is not to leave them; None where files flag their first ids, or it may.

        Raises:
            DataError: the file is missing or empty, or has less than one batch of all ranks.
            ConfigError: a size that is not positive, or a rank outside 0 to `world - 1`.
        """
        for name, value in (("batch", batch), ("sequence", sequence), ("world", world)):
            if value < 1:
                raise ConfigError(f"{name}: {value} is not a positive number.")
        if not 0 <= rank < world:
            raise ConfigError(f"rank: {rank} is not in 0 to {world - 1}.")
        self._tokens = open_tokens(tokens_path)
        self._digest = digest(self._tokens)
        self._windows = (len(self._tokens) - 1) // sequence
        if self._windows < batch * world:
            need = batch * world * sequence + 1
            raise DataError(
                f"{source or tokens_path}: the corpus has {len(self._tokens):,} tokens, but one batch needs {need:,} "
                f"({world} x {batch} sequences of {sequence}); give more text or a smaller batch or sequence."
            )
        self._batch, self._sequence, self._seed = batch, sequence, seed
        self._rank, self._world, self._separate = rank, world, separate
        self._samples = 0
        self._order: tuple[int, NDArray[np.int64]] = (0, permutation(seed, 0, self._windows))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        first = self._samples + self._rank * self._batch
        windows = np.array([self._window(first + i) for i in range(self._batch)])
        self._samples += self._batch * self._world
        return gather(self._tokens, windows, self._sequence, self._separate)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the settings and the `digest` of the corpus that it depends on, as JSON values."""
        return {
            "samples": self._samples,
            "seed": self._seed,
            "sequence": self._sequence,
            "tokens": len(self._tokens),
            "digest": self._digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch before `state_dict` was called.

        Batch size and number of ranks may differ. A state of an earlier version, without `digest`, is not compared by
        content.

        Raises:
            CheckpointError: the state belongs to another corpus, sequence or seed, or is malformed.
        """
        mine = self.state_dict()
        for name in ("seed", "sequence", "tokens"):
            if state.get(name) != mine[name]:
                raise CheckpointError(
                    f"the data position was saved with {name} {state.get(name)}, this run has {mine[name]}; "
                    "resume with the same corpus, sequence and seed."
                )
        if state.get("digest", self._digest) != self._digest:
            raise CheckpointError(
                f"the data position belongs to another corpus of {mine['tokens']:,} tokens: its digest is "
                f"{state['digest']} there and {self._digest} here; resume with the same text and tokenizer."
            )
        samples = state.get("samples")
        if not isinstance(samples, int) or isinstance(samples, bool) or samples < 0:
            raise CheckpointError(f"the data position {samples!r} is not a number of samples.")
        self._samples = samples

    def _window(self, sample: int) -> int:
        epoch, position = divmod(sample, self._windows)
        if self._order[0] != epoch:
            self._order = (epoch, permutation(self._seed, epoch, self._windows))
        return int(self._order[1][position])


def heldout_batches(
    tokens_path: Path,
    batch: int,
    sequence: int,
    limit_tokens: int | None = None,
    *,
    source: str = "",
    separate: int | None = None,
) -> Iterator[Batch]:
    """Return the evaluation batches: the file from its beginning, in order, always the same windows for any `batch`.

    The last batch may be smaller. `limit_tokens` stops after the window that reaches it. `source` and `separate` are as
    for `Loader`.

    Raises:
        DataError: the file is missing, or shorter than one sequence; raised by the call, not by the first batch.
        ConfigError: a size that is not positive.
    """
    for name, value in (("batch", batch), ("sequence", sequence), ("limit_tokens", limit_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}: {value} is not a positive number.")
    tokens = open_tokens(tokens_path)
    windows = (len(tokens) - 1) // sequence
    if windows == 0:
        raise DataError(
            f"{source or tokens_path}: {len(tokens):,} held-out tokens are fewer than one sequence of {sequence} and "
            "its target; give more text, a larger held-out share or a shorter sequence."
        )
    if limit_tokens is not None:
        windows = min(windows, -(-limit_tokens // sequence))
    starts = range(0, windows, batch)
    return (gather(tokens, np.arange(start, min(start + batch, windows)), sequence, separate) for start in starts)


def open_tokens(path: Path) -> Tokens:
    """Return the ids of a token file, memory-mapped and read-only.

    Raises:
        DataError: the file is missing, empty, or not made of 16-bit ids (32-bit ids if it ends in `.u32`).
    """
    width = width_of(path)
    with os_errors(path, DataError, "cannot be read"):
        size = path.stat().st_size
        if size == 0 or size % width:
            raise DataError(f"{path}: {size} bytes are not a file of {8 * width}-bit token ids.")
        return np.memmap(path, dtype=f"<u{width}", mode="r")


def digest(tokens: Tokens) -> str:
    """Return a digest of dtype, number and content of ids, 64 hexadecimal digits.

    Reads up to 64 evenly spaced blocks of 4 KiB, including the first and the last: all of a file of up to 256 KiB. In a
    longer file, ids replaced between blocks go unnoticed; another text or tokenizer does not.
    """
    size = _BLOCK_BYTES // tokens.dtype.itemsize
    last = max(len(tokens) - size, 0)
    found = hashlib.sha256(f"{tokens.dtype.str} {len(tokens)}".encode())
    for start in sorted({last * block // (_BLOCKS - 1) for block in range(_BLOCKS)}):
        found.update(tokens[start : start + size].tobytes())
    return found.hexdigest()


def width_of(path: Path) -> int:
    """Return the bytes of an id in a token file: 4 in `.u32`, otherwise 2."""
    return 4 if path.suffix == ".u32" else 2


def permutation(seed: int, epoch: int, windows: int) -> NDArray[np.int64]:
    """Return the order of the windows in one pass.

    It sorts raw words of a counter-based generator: NumPy guarantees these across versions, unlike its shuffles.
    """
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(windows)
    return np.argsort(words, kind="stable")


def gather(tokens: Tokens, windows: NDArray[np.int64], sequence: int, separate: int | None = None) -> Batch:
    """Return inputs and targets, both (len(windows), T), of the windows with these indices, `separate` or not."""
    positions = windows[:, None] * sequence + np.arange(sequence + 1)
    found = tokens[positions]
    if separate is not None:
        return _separated(found.astype(np.int64), separate)
    if found.dtype.itemsize == 2:
        ids = torch.from_numpy(found.astype(np.int64))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    plain = (found & IDS).astype(np.int64)
    inputs = np.where(found & FIRST, ~plain, plain)[:, :-1]
    targets = np.where(found & NO_TARGET, IGNORED, plain)[:, 1:]
    return torch.from_numpy(inputs.copy()), torch.from_numpy(targets.copy())


def _separated(ids: NDArray[np.int64], end: int) -> Batch:
    """Return inputs and targets of windows (n, T + 1) of unflagged ids, in which `end` ends documents."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    ends = inputs == end
    begins = np.ones_like(ends)
    begins[:, 1:] = ends[:, :-1]
    return torch.from_numpy(np.where(begins, ~inputs, inputs)), torch.from_numpy(np.where(ends, IGNORED, targets))
