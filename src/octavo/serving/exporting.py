"""`octavo.export`: a model into a directory that inference engines load."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, UnsupportedError, did_you_mean
from octavo.numerics import dequantize
from octavo.serving import compressed_tensors, files, fine_grained
from octavo.serving.engine_models import EngineModel, engine_model
from octavo.serving.layers import ServedLayer, left_out, served_layers
from octavo.serving.notes import notes
from octavo.tensor import FP8Tensor, is_distributed

FORMATS: dict[str, ModuleType | None] = {
    compressed_tensors.NAME: compressed_tensors,
    fine_grained.NAME: fine_grained,
    "plain": None,
}
"""How FP8 layers are written, by name; `plain`: as values, as all else is."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written. `print(exported)` says it in a few lines."""

    directory: str
    format: str
    dtype: str
    """Of all that is not in FP8."""
    files: dict[str, int]
    """Name and bytes."""
    fp8_layers: dict[str, str]
    """Layers in FP8 by their name outside: how weight and input are quantised."""
    other_layers: dict[str, str]
    """The other layers with a GEMM, and why they are not."""
    notes: tuple[str, ...] = ()
    """What to know before it is served."""

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        lines = [f"written      {self.directory}, format {self.format}"]
        lines += [f"FP8          {line}" for line in _by_kind(self.fp8_layers)]
        lines += [f"{self.dtype:<12} {line}" for line in _by_kind(self.other_layers)]
        lines += [f"{'file':<12} {name}, {size:,} bytes" for name, size in self.files.items()]
        return "\n".join([*lines, *(f"note         {note}" for note in self.notes)])


def _by_kind(layers: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for all layers of which the same is said."""
    for kind, count in Counter(layers.values()).items():
        names = [name for name, said in layers.items() if said == kind]
        yield f"{names[0] if count == 1 else f'{count} layers'}: {kind}"


def export(
    model: nn.Module,
    directory: str | Path,
    format: str = compressed_tensors.NAME,
    *,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    config: Mapping[str, Any] | None = None,
    texts: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a model as inference engines load it: of FP8 layers the codes and scales that fprop reads, byte for byte.

    The model stays as it is. Engines quantise inputs as the recipe does, token by token, tensor by tensor or by 1x128,
    but with scales that are not rounded up to powers of two.

    Args:
        model: converted by `octavo.convert`: a Llama of `octavo.models`, or a model of Hugging Face's transformers.
        directory: a new one.
        format: `compressed-tensors` (vLLM, SGLang, transformers), for scales a row, a tensor or a block; `fp8`, the
            blocks of DeepSeek-V3, for the recipe `block`; `plain`: every weight as its value, nothing in FP8.
        dtype: of all that is not in FP8.
        overwrite: replace an exported model that is there.
        config: further entries of config.json.
        texts: further files by name, JSON, such as a tokenizer's.

    Raises:
        ConfigError: an unknown format, no layer in FP8, or something is in the directory already.
        UnsupportedError: the format cannot hold a layer, no engine knows the model, or it is sharded over ranks.
    """
    if format not in FORMATS:
        raise ConfigError(f"format: '{format}' is none of {', '.join(FORMATS)}.{did_you_mean(format, FORMATS)}")
    files.check_free(Path(directory), overwrite)  # before the work
    writer, outside = FORMATS[format], engine_model(model, dtype)
    layers = [] if writer is None else _layers(model, format, writer)
    coded = [layer for layer in layers if layer.name != outside.head]
    renamed = [replace(layer, name=outside.rename(layer.name)) for layer in coded]
    left = left_out(model, coded) if layers else {}
    if len(coded) < len(layers):
        left[outside.head] = "engines compute the head in high precision: the values of its codes"
    others = {outside.rename(name): reason for name, reason in left.items()}
    quantization = {} if writer is None else {"quantization_config": writer.config(renamed, others)}
    tensors = dict(_tensors(model, {layer.name: layer for layer in layers}, writer, outside, dtype))
    contents = {"config.json": {**outside.config, **(config or {}), **quantization}, **(texts or {})}
    return Exported(
        directory=str(directory),
        format=format,
        dtype=str(dtype).removeprefix("torch."),
        files=files.write(Path(directory), tensors, contents, overwrite=overwrite),
        fp8_layers={layer.name: layer.kind for layer in renamed},
        other_layers=others,
        notes=notes(renamed, others, tensors),
    )


def _layers(model: nn.Module, format: str, writer: ModuleType) -> list[ServedLayer]:
    """Return the layers in FP8, all of which the format can hold."""
    layers = served_layers(model)
    if not layers:
        raise ConfigError("export: no linear layer is in FP8. Call octavo.convert first, or take the format 'plain'.")
    for layer in layers:
        if (reason := writer.refuses(layer)) is not None:
            fitting = [f"'{name}'" for name, other in FORMATS.items() if other is None or _holds_all(other, layers)]
            instead = " or ".join(fitting)
            raise UnsupportedError(
                f"export: format '{format}' cannot hold '{layer.name}': {reason}. Take the format {instead}."
            )
    return layers


def _holds_all(writer: ModuleType, layers: Sequence[ServedLayer]) -> bool:
    return all(writer.refuses(layer) is None for layer in layers)


def _tensors(
    model: nn.Module,
    layers: Mapping[str, ServedLayer],
    writer: ModuleType | None,
    outside: EngineModel,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors by their names outside, on the CPU; one that has two names by its first."""
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        module, _, last = name.rpartition(".")
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if is_distributed(tensor):
            raise UnsupportedError(f"export: '{name}' is cut over ranks. Export a checkpoint: octavo export RUN.")
        layer = layers.get(module) if last == "weight" else None
        if layer is not None and module == outside.head:
            parts = {last: dequantize(layer.weight, dtype)}
        elif layer is not None and writer is not None:
            parts = writer.tensors(layer)
        else:
            values = tensor.dequantize(dtype) if isinstance(tensor, FP8Tensor) else tensor
            parts = {last: values.to(dtype) if values.is_floating_point() else values}
        for part, stored in parts.items():
            yield f"{outside.rename(module)}.{part}", stored.detach().cpu()
