"""A user's workload, from a Hugging Face config, a Python file or a run file: a model, its batches, its loss."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo._util.config_reader import read_file, read_text
from octavo._util.rng import untouched_generators
from octavo.errors import ConfigError, DataError, UnsupportedError
from octavo.lab.data.loader import Loader
from octavo.lab.models import build
from octavo.lab.train.config import RunConfig, assemble, load_file
from octavo.lab.train.setup import separator, token_files, tokenizer_of

Step = Callable[[], Any]
Loss = Callable[[nn.Module, Any], Tensor]

NO_VALUES = (RuntimeError, TypeError, ValueError)
"""Errors of code that reads values of a tensor on the meta device, by `item`, `if` or NumPy."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its data and loss, for `octavo pilot` and `octavo doctor`."""

    name: str
    build: Callable[[], nn.Module]
    """Makes the model in FP32, with the same weights in each call; on the default device, which may be `meta`."""
    batches: Callable[[], Iterator[Any]]
    """Starts an endless sequence of batches, the same in each call; tensors on the CPU."""
    loss: Loss
    """(model, batch) -> mean loss, shape ()."""
    tokens: int
    """Size of a batch, in units of `unit`."""
    unit: str = "token"
    data: str = "random tokens, Zipf-distributed"
    """Description of the batches."""
    decode: Callable[[nn.Module, Any], Step] | None = None
    """(model, batch) -> a function that decodes one more token of each sequence; None for a model that does not."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a batch."""

    batch: int = 8
    """Sequences, or images."""
    sequence: int = 1024
    """Tokens per sequence."""
    data: Path | None = None
    """Text for a language model, tokenised by the tokenizer.json beside its config, else by bytes."""


def load_workload(model: Path, shape: Shape | None = None) -> Workload:
    """Return the workload of a file.

    Args:
        model: a Hugging Face config.json, or its directory: a model with random weights. A Python file with `build()`,
            which returns the model; `batches()`, which yields batches; and, unless `model(*batch)` or `model(**batch)`
            returns a loss, `loss(model, batch)`. A run file of `octavo train`, .toml or .json.
        shape: size of a batch, for a Hugging Face config.

    Raises:
        ConfigError: no such file, or one that is none of these.
        DataError: the text cannot be read, or is too short.
        UnsupportedError: transformers is not installed.
    """
    file = model / "config.json" if model.is_dir() else model
    if not file.is_file():
        raise ConfigError(f"{model}: no such file. Name a Hugging Face config.json, a Python file or a run file.")
    if file.suffix == ".py":
        return _of_python(file)
    if file.suffix == ".json" and "model_type" in read_file(file):
        return _of_hugging_face(file, shape or Shape())
    return _of_run(assemble(load_file(file)), file.stem)


def build_without_values(workload: Workload) -> nn.Module:
    """Return the model of a workload, on the meta device unless its code reads values of tensors."""
    try:
        with torch.device("meta"):
            return workload.build()
    except NO_VALUES:
        return workload.build()


def is_run_file(file: Path) -> bool:
    """Return True for a run file, False for a Python file or a Hugging Face config."""
    return file.suffix != ".py" and (file.suffix != ".json" or "model_type" not in read_file(file))


def call_model(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a model that computes it itself: its result, or that result's `loss`."""
    found = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    found = getattr(found, "loss", found)
    if not isinstance(found, Tensor) or found.dim():
        raise ConfigError("the model returns no loss for a batch. Give the Python file a function loss(model, batch).")
    return found


def first_tensor(batch: Any) -> Tensor:
    """Return the first tensor of a batch: its first dimension counts samples."""
    values = batch.values() if isinstance(batch, Mapping) else (batch,) if isinstance(batch, Tensor) else batch
    found = next((value for value in values if isinstance(value, Tensor)), None)
    if found is None:
        raise ConfigError("a batch has no tensor: batches() must yield tuples or mappings of tensors.")
    return found


def first_sample(batch: Any) -> Any:
    """Return the first sample of a batch, as a batch."""
    return _mapped(batch, lambda tensor: tensor[:1] if tensor.dim() else tensor)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device."""
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with each tensor of it changed."""
    if isinstance(batch, Mapping):
        return {key: _mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        make = getattr(type(batch), "_make", type(batch))  # a named tuple takes its fields one by one
        return make(_mapped(value, change) for value in batch)
    return change(batch) if isinstance(batch, Tensor) else batch


def _of_python(file: Path) -> Workload:
    spec = importlib.util.spec_from_file_location(f"octavo_workload_{file.stem}", file)
    assert spec is not None and spec.loader is not None  # of every file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look up names of types
    spec.loader.exec_module(module)
    for wanted in ("build", "batches"):
        if not callable(getattr(module, wanted, None)):
            raise ConfigError(f"{file}: has no function {wanted}(). Define build() -> model and batches() -> batches.")
    sample = first_tensor(next(_endless(module.batches, file)))
    is_text = sample.dim() == 2 and not sample.is_floating_point()
    return Workload(
        name=file.stem,
        build=partial(_seeded, module.build),
        batches=partial(_endless, module.batches, file),
        loss=getattr(module, "loss", call_model),
        tokens=sample.numel() if is_text else len(sample),
        unit="token" if is_text else "sample",
        data=f"batches() of {file.name}",
        decode=getattr(module, "decode", None),
    )


def _endless(batches: Callable[[], Iterable[Any]], file: Path) -> Iterator[Any]:
    while True:
        count = 0
        for batch in batches():
            count += 1
            yield batch
        if not count:
            raise DataError(f"{file}: batches() yields nothing.")


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with untouched_generators():
        torch.manual_seed(0)
        return make()


def _of_run(config: RunConfig, name: str) -> Workload:
    data, run = config.data, config.run

    def batches() -> Iterator[Any]:
        tokenizer = tokenizer_of(data)
        files, separate = token_files(config, tokenizer), separator(config, tokenizer)
        return iter(Loader(files.train, run.batch, data.sequence, run.seed, source=files.source, separate=separate))

    return Workload(
        name=name,
        build=lambda: build(config.model, run.seed),
        batches=batches,
        loss=call_model,
        tokens=run.batch * data.sequence,
        data=str(data.source),
        decode=lambda model, batch: lambda: model(batch[0][:, :1]),
    )


def _of_hugging_face(file: Path, shape: Shape) -> Workload:
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError(f"{file}: needs transformers: pip install transformers")
    transformers = import_module("transformers")
    known = read_file(file)
    config = transformers.AutoConfig.for_model(**known)
    cls = getattr(transformers, (known.get("architectures") or [""])[0], transformers.AutoModelForCausalLM)
    make = getattr(cls, "from_config", None) or cls._from_config
    is_image = getattr(cls, "main_input_name", "input_ids") == "pixel_values"
    samples = partial(_images, config, shape) if is_image else _texts(config, shape, file.parent)
    return Workload(
        name=f"{known['model_type']}, {cls.__name__}",
        build=partial(_seeded, partial(make, config)),
        batches=samples,
        loss=call_model,
        tokens=shape.batch if is_image else shape.batch * shape.sequence,
        unit="image" if is_image else "token",
        data="random images" if is_image else str(shape.data or Workload.data),
        decode=None if is_image else _decode_with_cache,
    )


def _decode_with_cache(model: nn.Module, batch: Any) -> Step:
    """Return one step of decoding: one token of each sequence of the batch, in its context."""
    context = batch["input_ids"]
    cache = model(input_ids=context[:, :-1], use_cache=True).past_key_values
    token = context[:, -1:]

    def step() -> Any:
        found = model(input_ids=token, past_key_values=cache, use_cache=True)
        cache.crop(-1)  # so that each step has the same context
        return found

    return step


def _images(config: Any, shape: Shape) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(0)
    size = shape.batch, getattr(config, "num_channels", 3), config.image_size, config.image_size
    while True:
        labels = torch.randint(config.num_labels, (shape.batch,), generator=generator)
        yield {"pixel_values": torch.randn(size, generator=generator), "labels": labels}


def _texts(config: Any, shape: Shape, directory: Path) -> Callable[[], Iterator[Any]]:
    size = shape.batch, shape.sequence
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and shape.sequence > longest:
        raise ConfigError(f"--sequence {shape.sequence}: the model's maximum is {longest} tokens.")
    ids = None if shape.data is None else _encoded(shape.data, directory, config.vocab_size, size)

    return partial(_zipf, config.vocab_size, size) if ids is None else partial(_in_turn, ids, size)


def _zipf(vocab: int, size: tuple[int, int]) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, min(vocab, 2**20) + 1, dtype=torch.float64)
    while True:
        tokens = torch.multinomial(weights, size[0] * size[1], replacement=True, generator=generator).reshape(size)
        yield {"input_ids": tokens, "labels": tokens}


def _in_turn(ids: Tensor, size: tuple[int, int]) -> Iterator[Any]:
    rows = size[0] * size[1]
    for start in cycle(range(0, len(ids) - rows + 1, rows)):
        tokens = ids[start : start + rows].reshape(size)
        yield {"input_ids": tokens, "labels": tokens}


def _encoded(data: Path, directory: Path, vocab: int, size: tuple[int, int]) -> Tensor:
    file = directory / "tokenizer.json"
    text = read_text(data, DataError)
    tokenize = import_module("tokenizers").Tokenizer.from_file(str(file)).encode if file.is_file() else None
    ids = torch.tensor(list(text.encode()) if tokenize is None else tokenize(text).ids)
    if int(ids.max()) >= vocab:
        raise ConfigError(f"{data}: has the token {int(ids.max())}, and the model's vocabulary is {vocab}.")
    if len(ids) < size[0] * size[1]:
        raise DataError(f"{data}: has {len(ids):,} tokens, and one batch needs {size[0] * size[1]:,}.")
    return ids
