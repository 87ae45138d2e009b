"""The files of an exported model: safetensors, in parts if large, and JSON, written atomically."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from octavo._util.checksums import flush
from octavo._util.files import put_in_place, remove
from octavo.errors import ConfigError, OctavoError

PART_BYTES = 5 * 10**9
"""Maximum size of a file of weights, as usual for hubs and engines."""
_WRITING = ".writing"


def check_free(directory: Path, overwrite: bool) -> None:
    """Check that a directory can be written.

    Args:
        overwrite: allow to replace an existing exported model, but nothing else.

    Raises:
        ConfigError: the directory is not empty.
    """
    there = list(directory.iterdir()) if directory.is_dir() else []
    if not there and (directory.is_dir() or not directory.exists()):
        return
    if not overwrite:
        raise ConfigError(f"{directory}: exists already. Name another directory, or use --overwrite.")
    if not any(path.suffix == ".safetensors" for path in there) or any(path.is_dir() for path in there):
        raise ConfigError(f"{directory}: exists and is not an exported model. Name another directory.")


def write(
    directory: Path,
    tensors: Mapping[str, Tensor],
    texts: Mapping[str, Any],
    *,
    overwrite: bool = False,
    part_bytes: int = PART_BYTES,
) -> dict[str, int]:
    """Write tensors and other files into a new directory; return the bytes of each file by its name.

    An exported model that is replaced is there until the new one is complete (`put_in_place`).

    Args:
        tensors: tensors by name, written in this order.
        texts: contents of other files by name: bytes as they are, everything else as JSON.
        overwrite: replace an existing exported model.

    Raises:
        ConfigError: see `check_free`.
        OctavoError: a write failed; nothing incomplete remains.
    """
    check_free(directory, overwrite)
    directory = directory.resolve()  # a link stays, and '.' has a name
    temporary = directory.with_name(f"{_WRITING}-{directory.name}")
    try:
        remove(temporary)
        temporary.mkdir(parents=True)
        for name, text in texts.items():
            if isinstance(text, bytes):
                (temporary / name).write_bytes(text)
            else:
                _write_json(temporary / name, text)
        _write_tensors(temporary, tensors, part_bytes)
        for path in temporary.iterdir():
            flush(path)
        put_in_place(temporary, directory)
    except OSError as error:
        raise OctavoError(f"{directory}: could not be written ({error.strerror}).") from error
    finally:
        with suppress(OSError):  # the first error counts; the next export removes what is left, or says why
            remove(temporary)
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir())}


def _write_tensors(directory: Path, tensors: Mapping[str, Tensor], part_bytes: int) -> None:
    parts = list(_parts(tensors, part_bytes))
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    names = names if len(parts) > 1 else ["model.safetensors"]
    for name, part in zip(names, parts, strict=True):
        path = directory / name
        path.touch()
        mode = path.stat().st_mode
        save_file({key: tensor.contiguous() for key, tensor in part.items()}, path, {"format": "pt"})
        path.chmod(mode)  # safetensors creates files readable only by their owner, but another user may serve them
    if len(parts) > 1:
        weights = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        size = sum(tensor.nbytes for tensor in tensors.values())
        _write_json(
            directory / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weights}
        )


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _parts(tensors: Mapping[str, Tensor], part_bytes: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > part_bytes:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part
