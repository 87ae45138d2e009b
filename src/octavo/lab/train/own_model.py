"""Subjects that are no runs: a Python file, and a Hugging Face config."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
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
from octavo.lab.train.subject import Shape, Step, Subject, call_model, first_tensor


def python_file(file: Path) -> Subject:
    """Return the subject of a Python file.

    It has `build()`, which returns the model; `batches()`, which yields batches; and, unless `model(*batch)` or
    `model(**batch)` returns a loss, `loss(model, batch)`.

    Raises:
        ConfigError: a function is missing, or a batch has no tensor.
        DataError: there are no batches.
    """
    spec = importlib.util.spec_from_file_location(f"octavo_subject_{file.stem}", file)
    assert spec is not None and spec.loader is not None  # of every file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look up names of types
    spec.loader.exec_module(module)
    for wanted in ("build", "batches"):
        if not callable(getattr(module, wanted, None)):
            raise ConfigError(f"{file}: has no function {wanted}(). Define build() -> model and batches() -> batches.")
    sample = first_tensor(next(_endless(module.batches, file)))
    is_text = sample.dim() == 2 and not sample.is_floating_point()
    return Subject(
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


def hugging_face_config(file: Path, shape: Shape) -> Subject:
    """Return the subject of a config.json: a model with random weights, on random tokens or images, or a text.

    Raises:
        ConfigError: the batches do not suit the model.
        DataError: the text cannot be read, or is too short.
        UnsupportedError: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError(f"{file}: needs transformers: pip install transformers")
    transformers = import_module("transformers")
    known = read_file(file)
    config = transformers.AutoConfig.for_model(**known)
    cls = getattr(transformers, (known.get("architectures") or [""])[0], transformers.AutoModelForCausalLM)
    make = getattr(cls, "from_config", None) or cls._from_config
    is_image = getattr(cls, "main_input_name", "input_ids") == "pixel_values"
    samples = partial(_images, config, shape) if is_image else _texts(config, shape, file.parent)
    return Subject(
        name=f"{known['model_type']}, {cls.__name__}",
        build=partial(_seeded, partial(make, config)),
        batches=samples,
        loss=call_model,
        tokens=shape.batch if is_image else shape.batch * shape.sequence,
        unit="image" if is_image else "token",
        data="random images" if is_image else str(shape.data or Subject.data),
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
