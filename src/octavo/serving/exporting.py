"""`octavo.export`: write a model to a directory that inference engines load."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, OctavoError, UnsupportedError, did_you_mean
from octavo.nn.modules import unwrapped_name
from octavo.serving import files
from octavo.serving.companions import GENERATION, NO_TOKENIZER, companions, has_tokenizer
from octavo.serving.engine_models import engine_model, unwrapped
from octavo.serving.formats import COMPRESSED_TENSORS, FORMATS, Format
from octavo.serving.layers import NOT_STORED, ServedLayer, served_experts, served_layers, unserved_layers
from octavo.serving.notes import notes
from octavo.tensor import FP8Tensor, is_distributed

_OF_PEFT = {"base_model", "base_layer", "original_module", "modules_to_save"}
"""Names that PEFT puts between a module and its parent, besides those that begin with `lora_`."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export. `print(exported)` summarises it."""

    directory: str
    format: str
    dtype: str
    """Dtype of everything not in FP8."""
    files: dict[str, int]
    """Bytes by file name."""
    fp8_layers: dict[str, str]
    """FP8 layers by their exported name: quantisation of weight and input."""
    other_layers: dict[str, str]
    """Other layers with a GEMM, with the reason."""
    notes: tuple[str, ...] = ()
    """Notes for serving."""

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
    """Yield one line per group of layers with the same description."""
    for kind, count in Counter(layers.values()).items():
        names = [name for name, said in layers.items() if said == kind]
        yield f"{names[0] if count == 1 else f'{count} layers'}: {kind}"


def export(
    model: nn.Module,
    directory: str | Path,
    format: str = COMPRESSED_TENSORS,
    *,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    config: Mapping[str, Any] | None = None,
    texts: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> Exported:
    """Write a model for inference engines, with the codes and scales of FP8 layers that fprop reads, byte for byte.

    The model is not changed. Engines quantise inputs as the recipe does, per token, per tensor or by 1x128, but with
    scales that are not rounded up to powers of two.

    Args:
        model: converted by `octavo.convert`: a Llama of `octavo.lab.models`, or a model of Hugging Face's transformers.
        directory: directory to create.
        format: `compressed-tensors` (vLLM, SGLang, transformers), for scales per row, tensor or block, and rotated
            INT8; `fp8`, the blocks of DeepSeek-V3, for the recipe `block`; `plain`: values of all weights, nothing in
            eight bits.
        dtype: dtype of everything not in FP8.
        overwrite: replace an existing exported model.
        config: additional entries of config.json.
        texts: additional JSON files by name, such as a tokenizer's.
        tokenizer: a tokenizer or processor of transformers, or a directory with its files, chat template included. By
            default those in the directory that a model of transformers was loaded from; its `generation_config` is
            always written.

    Raises:
        ConfigError: an unknown format, no layer in FP8, or the directory is not empty.
        UnsupportedError: the format cannot store a layer, no engine supports the model, or it is sharded over ranks.
    """
    files.check_free(Path(directory), overwrite)  # fail early
    stored = _Stored(model, format, dtype)
    target, layers = stored.target, stored.layers
    coded = [layer for layer in layers.values() if layer.name != target.head]
    renamed = [replace(layer, name=target.rename(layer.name)) for layer in coded]
    left = unserved_layers(stored.model, coded) if layers else {}
    if len(coded) < len(layers):
        left[target.head] = "engines compute the head in high precision, from the values of its codes"
    others = {target.rename(name): reason for name, reason in left.items()}
    quantization = {} if stored.writer is None else {"quantization_config": stored.writer.config(renamed, others)}
    tensors = {name: tensor.cpu() for name, tensor in stored.tensors()}
    tensors |= {} if stored.writer is None else stored.writer.constants(renamed)
    more = {**companions(stored.model, tokenizer), **(texts or {})}
    contents = {"config.json": {**target.config, **(config or {}), **quantization}, **more}
    missing = (NO_TOKENIZER,) if GENERATION in more and not has_tokenizer(more) else ()
    return Exported(
        directory=str(directory),
        format=format,
        dtype=str(dtype).removeprefix("torch."),
        files=files.write(Path(directory), tensors, contents, overwrite=overwrite),
        fp8_layers={layer.name: layer.kind for layer in renamed},
        other_layers=others,
        notes=(*notes(renamed, others, tensors), *missing),
    )


def served_tensors(
    model: nn.Module, format: str = COMPRESSED_TENSORS, *, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `export` writes, by their exported names, on the model's device; not constant ones.

    Raises:
        ConfigError, UnsupportedError: as `export`.
    """
    yield from _Stored(model, format, dtype).tensors()


def check(model: nn.Module, format: str = COMPRESSED_TENSORS) -> None:
    """Raise what `export` would raise of a model, which may be without weights on the meta device.

    Raises:
        ConfigError, UnsupportedError: as `export`.
    """
    _Stored(model, format, torch.bfloat16)


class _Stored:
    """Tensors of a model that an export format stores, with their names."""

    def __init__(self, model: nn.Module, format: str, dtype: torch.dtype) -> None:
        if format not in FORMATS:
            raise ConfigError(f"format: '{format}' is not one of {', '.join(FORMATS)}.{did_you_mean(format, FORMATS)}")
        self.model = model = unwrapped(model)
        self.dtype, self.writer = dtype, FORMATS[format]
        self.target = engine_model(model, dtype)
        names = [unwrapped_name(name) for name in model.state_dict(keep_vars=True)]
        _check_merged(names)
        self.layers: dict[str, ServedLayer] = {}
        """FP8 layers by their name in the model."""
        self.experts: dict[str, list[ServedLayer]] = {}
        """FP8 layers of experts by parameter."""
        if self.writer is None:
            return
        self.experts = served_experts(model, self.target.experts)
        if self.experts and self.target.rename_with_experts is not None:
            self.target = self.target._replace(rename=self.target.rename_with_experts)
        linear = served_layers(model)
        layers = [*linear, *(layer for parts in self.experts.values() for layer in parts)]
        _check_stores(self.writer, format, layers, model)
        _check_found([*(f"{layer.name}.weight" for layer in linear), *self.experts], names)
        self.layers = {layer.name: layer for layer in layers}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors by their exported names; values with two names by the first, codes of layers by each."""
        seen = set()
        for full, tensor in self.model.state_dict(keep_vars=True).items():
            name = unwrapped_name(full)
            module, _, last = name.rpartition(".")
            is_coded = last == "weight" and module in self.layers and module != self.target.head
            if not is_coded and id(tensor) in seen:
                continue
            seen |= set() if is_coded else {id(tensor)}
            if is_distributed(tensor):
                raise UnsupportedError(
                    f"export: '{name}' is sharded over ranks. Export a checkpoint: octavo export RUN."
                )
            if self.writer is not None and name in self.experts:
                for expert in self.experts[name]:
                    for part, stored in self.writer.tensors(expert).items():
                        yield f"{self.target.rename(expert.name)}.{part}", stored.detach().cpu()
                continue
            for part, stored in self._parts(name, tensor).items():
                yield f"{self.target.rename(module)}.{part}", stored.detach()

    def _parts(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the stored tensors of a tensor, by the last part of their names."""
        module, _, last = name.rpartition(".")
        layer = self.layers.get(module) if last == "weight" else None
        if layer is not None and module == self.target.head:
            return {last: layer.values(self.dtype)}
        if layer is not None and self.writer is not None:
            return self.writer.tensors(layer)
        values = tensor.dequantize(self.dtype) if isinstance(tensor, FP8Tensor) else tensor
        return {last: values.to(self.dtype) if values.is_floating_point() else values}


def _check_merged(names: Collection[str]) -> None:
    """Check that no tensor has a name that adapters gave it, or belongs to them: no engine would find it."""
    for name in names:
        parts = name.split(".")
        if "lora" in parts:
            raise UnsupportedError(
                f"export: '{name}' is not merged into the weight of its layer. Call octavo.nn.lora.merge_lora(model) "
                "first."
            )
        if not _OF_PEFT.isdisjoint(parts) or any(part.startswith("lora_") for part in parts):
            raise UnsupportedError(
                f"export: '{name}' is a name of PEFT, which no engine knows. Merge the adapters first: "
                "model = model.merge_and_unload()."
            )


def _check_found(coded: Sequence[str], names: Collection[str]) -> None:
    """Check that all tensors that are written as codes are in the state_dict, from which names are taken."""
    if missing := sorted({*coded} - {*names}):
        raise UnsupportedError(
            f"export: '{missing[0]}' is computed in FP8 and is not in the state_dict of the model, so that its codes "
            "would not be written. Export the model without the wrapper or hook that renames it."
        )


def _nothing_to_store(model: nn.Module) -> OctavoError:
    """Return an error for a model that has no layer in FP8, or only such as no format of engines stores."""
    unstored = {name: why for name, why in unserved_layers(model, ()).items() if why.endswith(NOT_STORED)}
    if not unstored:
        return ConfigError("export: no linear layer is in FP8. Call octavo.convert first, or use the format 'plain'.")
    name, reason = next(iter(unstored.items()))
    return UnsupportedError(
        "export: the model is in FP8, but inference engines can read no layer of it, such as "
        f"'{name}': {reason}. Use the format 'plain', which stores values."
    )


def _check_stores(writer: Format, format: str, layers: Sequence[ServedLayer], model: nn.Module) -> None:
    """Check that there is a layer in FP8, and that the format can store each."""
    if not layers:
        raise _nothing_to_store(model)
    for layer in layers:
        if (reason := writer.unsupported_reason(layer)) is not None:
            others = FORMATS.items()
            fitting = [f"'{name}'" for name, other in others if other is None or not any(map(other[0], layers))]
            instead = " or ".join(fitting)
            raise UnsupportedError(
                f"export: format '{format}' cannot store '{layer.name}': {reason}. Use the format {instead}."
            )
