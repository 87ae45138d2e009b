"""Evaluation of an exported model: computed by transformers, with its run computed by Octavo for comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo._util.checksums import check_regular
from octavo._util.config_reader import blaming, read_file, shown
from octavo._util.files import os_errors
from octavo._util.terminal import Report, silent
from octavo.errors import ConfigError, DataError, UnsupportedError
from octavo.lab.data.bpe import BPETokenizer
from octavo.lab.data.loader import Batch
from octavo.lab.data.tokenizer import Tokenizer
from octavo.lab.evaluation.result import SERVED, Evaluation, evaluation, measure
from octavo.lab.evaluation.run import EvalSettings, LoadedRun
from octavo.lab.evaluation.text import EvalText, SequenceLayout, whole_text
from octavo.lab.train import device as devices
from octavo.lab.train.export import tokenizer_files
from octavo.serving.formats import COMPRESSED_TENSORS
from octavo.serving.rotations import rotate_inputs

BATCH_TOKENS = 8192
"""Tokens per batch without a run."""


def is_served(directory: Path) -> bool:
    """Return True if a directory contains a model written by `octavo export`."""
    return (directory / "config.json").exists() and any(directory.glob("*.safetensors"))


def evaluate_served(
    directory: Path, settings: EvalSettings, *, run: Path | None = None, report: Report = silent
) -> Evaluation:
    """Evaluate an exported model, on the same text and in the same batches as its run if given.

    Args:
        run: directory of the original run, or of the checkpoint, to be evaluated by Octavo as well.

    Raises:
        CheckpointError: see `evaluate_run`.
        ConfigError: neither text nor run is given, the run has another tokenizer, or see `evaluate_run`.
        DataError: the tokenizer is missing, or see `evaluate_run`.
        UnsupportedError: transformers, or its requirement for the format, is not installed.
    """
    device = devices.use(settings.device)
    known = _config(directory / "config.json")
    check_installed(known)
    loaded = None if run is None else LoadedRun(run, settings)
    if loaded is None:
        text, notes = _own_text(directory, known, settings), list[str]()
    else:
        check_same_tokenizer(directory, loaded)
        if loaded.config.data.format == "chat" and not settings.data:
            raise UnsupportedError(
                f"--run {run}: was trained on conversations, which transformers cannot keep apart in a sequence. Use"
                " --tasks, or a text with --data."
            )
        text, notes = loaded.text()
    _check_vocabulary(directory, known, text)
    model = load(directory, device)
    found = [measure(SERVED, partial(score, model, device), text, report)]
    del model  # a GPU holds one model at a time
    found += [] if loaded is None else loaded.measure(text, report)
    about = {
        "directory": str(directory),
        "format": (known.get("quantization_config") or {}).get("quant_method", "plain"),
        "dtype": known.get("dtype"),
        "run": None if run is None else str(run),
        "step": None if loaded is None else loaded.checkpoint.step,
    }
    noise = {} if loaded is None else loaded.noise(text)
    return evaluation(about, text, devices.describe(device), found, notes, noise)


def _config(file: Path) -> dict[str, Any]:
    """Return a model's config.json, with the keys that are read here of their types."""
    known = read_file(file)
    for key, kind in (("quantization_config", dict), ("max_position_embeddings", int), ("vocab_size", int)):
        if not isinstance(known.get(key), kind | None):
            raise ConfigError(f"{file}: {key}: expected {kind.__name__}, got {shown(known[key])}.")
    return known


def check_installed(known: dict[str, Any]) -> None:
    """Check that transformers and its requirements for the format of a model are installed.

    Args:
        known: the model's config.json.

    Raises:
        UnsupportedError: something is not installed.
    """
    quantization = known.get("quantization_config")
    needed = ["transformers", *(["accelerate"] if quantization else [])]
    needed += ["compressed_tensors"] if quantization and quantization.get("quant_method") == COMPRESSED_TENSORS else []
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise UnsupportedError(
            f"octavo eval: exported models are loaded by transformers. Not installed: {', '.join(missing)}. "
            'pip install "octavo[serving]"'
        )


def check_same_tokenizer(directory: Path, loaded: LoadedRun) -> None:
    """Check that a run and an exported model have the same tokenizer.

    Raises:
        ConfigError: they have not.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return
    own = tokenizer_files(loaded.tokenizer, loaded.config.model.sequence)["tokenizer.json"]
    with blaming(file):
        vocab = read_file(file).get("model", {}).get("vocab")
    if vocab != own["model"]["vocab"]:
        raise ConfigError(
            f"--run {loaded.checkpoint.run}: has another tokenizer than {directory}, which was not "
            "exported from it. Name the original run, or a text with --data."
        )


@torch.no_grad()
def load(directory: Path, device: torch.device) -> nn.Module:
    """Return an exported model loaded by transformers, in its stored dtype.

    Raises:
        ConfigError: a file is a pipe, a device or a broken link.
        UnsupportedError: transformers cannot load it.
    """
    for path in directory.iterdir():  # transformers would wait for a pipe
        with os_errors(path, ConfigError, "cannot be read"):
            check_regular(path)
    transformers = import_module("transformers")
    try:
        with _quiet(transformers.utils.logging):
            model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True)
            rotate_inputs(model, directory).to(device).eval()
            model(
                torch.zeros(1, 1, dtype=torch.int64, device=device)
            )  # decodes weights now, with progress bars of its own
    except Exception as error:  # of any kind: transformers trusts the files
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise UnsupportedError(
            f"{directory}: cannot be loaded by transformers {transformers.__version__} ({reason})."
        ) from error
    loaded: nn.Module = model
    return loaded


@torch.no_grad()
def score(model: nn.Module, device: torch.device, batches: Iterable[Batch]) -> Tensor:
    """Return the mean loss in nats per token and the accuracy of every sequence, (S, 2), float64 on the CPU.

    The loss is computed in FP32 from the model's logits.
    """
    found = []
    for inputs_BT, targets_BT in batches:
        logits_BTV = model(input_ids=inputs_BT.to(device), use_cache=False).logits
        for logits_TV, targets_T in zip(logits_BTV, targets_BT.to(device), strict=True):
            hits = (logits_TV.argmax(dim=-1) == targets_T).float().mean()
            found.append(torch.stack([F.cross_entropy(logits_TV.float(), targets_T), hits]))
    return torch.stack(found).double().cpu()


def _own_text(directory: Path, known: dict[str, Any], settings: EvalSettings) -> EvalText:
    """Return the given text, tokenized by the exported tokenizer."""
    if settings.step is not None:
        raise ConfigError("--step: selects a checkpoint of a run. Name the run with --run.")
    if not settings.data:
        raise ConfigError(
            f"{directory}: an exported model has no text of its own. Name one with --data, or its run with --run."
        )
    longest = known.get("max_position_embeddings") or settings.sequence
    sequence = settings.sequence or longest
    if not sequence:
        raise ConfigError(f"{directory / 'config.json'}: gives no maximum sequence length. Use --sequence.")
    if sequence > longest:
        raise ConfigError(f"--sequence {sequence}: the model's maximum is {longest} tokens.")
    layout = SequenceLayout(sequence=sequence, rows=max(1, BATCH_TOKENS // sequence), limit=settings.tokens)
    return whole_text(settings.data, _own_tokenizer(directory), layout)


def _own_tokenizer(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"{directory}: contains no tokenizer.json. Name the original run with --run.")
    return BPETokenizer.load(file)


def _check_vocabulary(directory: Path, known: dict[str, Any], text: EvalText) -> None:
    size, largest = known.get("vocab_size"), int(text.ids.max())
    if size is not None and largest >= size:
        raise ConfigError(
            f"{directory}: has a vocabulary of {size} tokens, but the text has the id {largest}. The model and the "
            "run have different tokenizers."
        )


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Suppress progress bars and warnings of transformers while it loads; errors are raised."""
    level, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if has_bar:
            logging.enable_progress_bar()
