"""Weights of Hugging Face's safetensors for a Llama, also in FP8 as `octavo export` and engines store them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo._util.checksums import check_names, check_regular
from octavo._util.config_reader import blaming, read_file
from octavo._util.files import os_errors
from octavo.errors import CheckpointError
from octavo.lab.models.hugging_face import stored_name
from octavo.lab.models.llama import Llama
from octavo.numerics import Granularity, Quantized, dequantize

_PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SCALES = ("weight_scale", "weight_scale_inv")
_UNUSED = (*_SCALES, "input_scale", "rotary_emb.inv_freq")


@torch.no_grad()
def load_weights(model: Llama, directory: Path) -> None:
    """Copy the weights in a directory into a model of the same shape; codes are multiplied by their scales in FP32.

    Raises:
        CheckpointError: there are none, a file is damaged, or a tensor is missing, unknown, of another shape or of a
            dtype that is not read.
    """
    files = _files(directory)
    blocks = _blocks(directory)
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
            home = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
            wanted = dict(_parameters(model))
            unused = (*_UNUSED, "lm_head.weight") if model.config.tie_embeddings else _UNUSED
            unknown = [name for name in home if name not in wanted and not name.endswith(unused)]
            for name in [*(name for name in wanted if name not in home), *unknown]:
                place = "the model" if name in wanted else "the directory"
                raise CheckpointError(f"{directory}: is of another model: only {place} has the tensor '{name}'.")
            for name, parameter in wanted.items():
                values = _values(home, name, blocks)
                if values.shape != parameter.shape:
                    shapes = f"{list(values.shape)} there and {list(parameter.shape)} here"
                    raise CheckpointError(f"{directory}: is of another model: '{name}' has the shape {shapes}.")
                parameter.copy_(values)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{directory}: cannot be read ({error}).") from error


def _files(directory: Path) -> list[Path]:
    """Return the files of the model: those that its index names, or else model.safetensors, or else all."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        homes = read_file(index, CheckpointError).get("weight_map")
        if not isinstance(homes, dict) or not homes or not all(isinstance(name, str) for name in homes.values()):
            raise CheckpointError(f"{index}: has no weight_map, the file of each tensor. Download it again.")
        with blaming(index, CheckpointError):
            check_names(homes.values())
        files = [directory / name for name in sorted(set(homes.values()))]
    else:
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory}: contains no .safetensors.")
    for file in files:
        with os_errors(file, CheckpointError, "cannot be read"):
            check_regular(file)
    return files


def _parameters(model: Llama) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():  # a tied weight once, as the embedding
        module, _, last = name.rpartition(".")
        yield f"{stored_name(module)}.{last}", parameter


def _blocks(directory: Path) -> tuple[int, int]:
    """Return the block of weight scales by config.json."""
    known = read_file(directory / "config.json").get("quantization_config") or {}
    groups = known.get("config_groups") or {}
    found = [group.get("weights", {}).get("block_structure") for group in groups.values()]
    rows, columns = next(filter(None, (known.get("weight_block_size"), *found)), (128, 128))
    return int(rows), int(columns)


def _values(home: dict[str, Any], name: str, blocks: tuple[int, int]) -> Tensor:
    """Return the values of a tensor: those stored, or codes times their scales, in FP32."""
    stored: Tensor = home[name].get_tensor(name)
    if stored.dtype in _PLAIN:
        return stored
    if stored.dtype != torch.float8_e4m3fn:  # other codes would be copied without their scales
        raise CheckpointError(
            f"'{name}' is stored as {stored.dtype}; codes are read as torch.float8_e4m3fn only. Download the model in "
            "BF16, or convert it to BF16 with the tool that quantised it."
        )
    module = name.rpartition(".")[0]
    scale_name = next((full for last in _SCALES if (full := f"{module}.{last}") in home), None)
    if scale_name is None:
        raise CheckpointError(f"'{name}' is in FP8 and has no scale: {' or '.join(_SCALES)}.")
    scale: Tensor = home[scale_name].get_tensor(scale_name).float()
    if scale.numel() == 1:
        return stored.float() * scale.reshape(())
    by_row, by_block = Granularity(1, None), Granularity(*blocks)
    tile = by_row if scale.shape == by_row.scale_shape(*stored.shape) else by_block
    if scale.shape != tile.scale_shape(*stored.shape):  # others would multiply the wrong codes
        known = " or ".join(str(each.scale_shape(*stored.shape)) for each in (by_row, by_block))
        raise CheckpointError(
            f"'{scale_name}' has the shape {tuple(scale.shape)}; scales by row or by {blocks[0]}x{blocks[1]} block, as "
            f"in config.json, have {known}, one by tensor has one value. Download the model in BF16."
        )
    return dequantize(Quantized(stored, scale, tile), torch.float32)
