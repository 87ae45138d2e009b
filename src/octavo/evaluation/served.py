"""The evaluation of an exported model: as transformers computes it, beside what Octavo computes of the run it is of."""

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

from octavo.data.bpe import BPETokenizer
from octavo.data.loader import Batch
from octavo.data.tokenizer import Tokenizer
from octavo.errors import ConfigError, DataError, UnsupportedError
from octavo.evaluation.measure import Measured, Watch, measure, unwatched
from octavo.evaluation.result import SERVED, Evaluation, evaluation
from octavo.evaluation.run import Reopened, Settings
from octavo.evaluation.text import Cut, Text, whole_text
from octavo.serving.compressed_tensors import NAME
from octavo.serving.tokenizer_files import tokenizer_files
from octavo.strict import read_file
from octavo.train import device as devices

BATCH_TOKENS = 8192
"""Of one forward, where no run says how many."""


def is_served(directory: Path) -> bool:
    """Return whether a directory is a model as `octavo export` writes it."""
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def evaluate_served(
    directory: Path, settings: Settings, *, run: Path | None = None, watch: Watch = unwatched
) -> Evaluation:
    """Evaluate an exported model, on the same text and in the same batches as its run where that is named.

    Args:
        run: directory of the run that it was exported from, or of the checkpoint: what Octavo computes of that is
            measured too.

    Raises:
        CheckpointError: see `evaluate_run`.
        ConfigError: neither text nor run, the run has another tokenizer, or see `evaluate_run`.
        DataError: there is no tokenizer, or see `evaluate_run`.
        UnsupportedError: transformers, or what it needs for the format, is not installed.
    """
    device = devices.resolve(settings.device)
    known = read_file(directory / "config.json")
    check_installed(known)
    reopened = None if run is None else Reopened(run, settings)
    if reopened is None:
        text, notes = _own_text(directory, known, settings), list[str]()
    else:
        check_same_tokenizer(directory, reopened)
        text, notes = reopened.text(settings)
    _check_vocabulary(directory, known, text)
    model = load(directory, device)
    found: list[Measured] = [measure(SERVED, partial(score, model, device), text, watch)]
    del model  # a GPU has one of them at a time
    found += [] if reopened is None else reopened.measure(text, watch)
    about = {
        "directory": str(directory),
        "format": known.get("quantization_config", {}).get("quant_method", "plain"),
        "dtype": known.get("dtype"),
        "run": None if run is None else str(run),
        "step": None if reopened is None else reopened.checkpoint.step,
    }
    return evaluation(about, text, devices.describe(device), found, notes)


def check_installed(known: dict[str, Any]) -> None:
    """Check that transformers is there, and what it needs for the format of a model.

    Args:
        known: the model's config.json.

    Raises:
        UnsupportedError: something is not installed.
    """
    quantization = known.get("quantization_config")
    needed = ["transformers", *(["accelerate"] if quantization else [])]
    needed += ["compressed_tensors"] if quantization and quantization.get("quant_method") == NAME else []
    missing = [package for package in needed if find_spec(package) is None]
    if missing:
        raise UnsupportedError(
            f"octavo eval: an exported model is loaded by transformers. Not installed: {', '.join(missing)}. "
            "pip install octavo[serving]"
        )


def check_same_tokenizer(directory: Path, reopened: Reopened) -> None:
    """Check that the ids of a run mean in an exported model what they meant in training.

    Raises:
        ConfigError: they do not.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return
    own = tokenizer_files(reopened.tokenizer, reopened.config.model.sequence)["tokenizer.json"]
    if read_file(file).get("model", {}).get("vocab") != own["model"]["vocab"]:
        raise ConfigError(
            f"--run {reopened.checkpoint.path.parent.parent}: has another tokenizer than {directory}, which was not "
            "exported from it. Name the run that it is of, or a text with --data."
        )


@torch.no_grad()
def load(directory: Path, device: torch.device) -> nn.Module:
    """Return an exported model as transformers loads it, in the dtype that it was written in.

    Raises:
        UnsupportedError: transformers cannot load it.
    """
    transformers = import_module("transformers")
    try:
        with _quiet(transformers.utils.logging):
            model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True)
            model.to(device).eval()
            model(torch.zeros(1, 1, dtype=torch.int64, device=device))  # with bars of its own: weights are decoded now
    except (ImportError, OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedError(
            f"{directory}: cannot be loaded by transformers {transformers.__version__} ({reason})."
        ) from error
    loaded: nn.Module = model
    return loaded


@torch.no_grad()
def score(model: nn.Module, device: torch.device, batches: Iterable[Batch]) -> Tensor:
    """Return for every sequence its mean loss in nats a token and the share of targets that were likeliest, (S, 2).

    The loss is computed in FP32 from the model's logits; float64 on the CPU.
    """
    found = []
    for inputs_BT, targets_BT in batches:
        logits_BTV = model(input_ids=inputs_BT.to(device), use_cache=False).logits
        for logits_TV, targets_T in zip(logits_BTV, targets_BT.to(device), strict=True):
            hits = (logits_TV.argmax(dim=-1) == targets_T).float().mean()
            found.append(torch.stack([F.cross_entropy(logits_TV.float(), targets_T), hits]))
    return torch.stack(found).double().cpu()


def _own_text(directory: Path, known: dict[str, Any], settings: Settings) -> Text:
    """Return the text that was named, by the exported tokenizer."""
    if settings.step is not None:
        raise ConfigError("--step: chooses a checkpoint of a run. Name the run with --run.")
    if not settings.data:
        raise ConfigError(f"{directory}: an exported model has no text. Name one with --data, or its run with --run.")
    longest = known.get("max_position_embeddings", settings.sequence)
    sequence = settings.sequence or longest
    if not sequence:
        raise ConfigError(f"{directory / 'config.json'}: does not say how long a sequence may be. Give --sequence.")
    if sequence > longest:
        raise ConfigError(f"--sequence {sequence}: the model knows no more than {longest} tokens.")
    cut = Cut(sequence=sequence, rows=max(1, BATCH_TOKENS // sequence), limit=settings.tokens)
    return whole_text(settings.data, _own_tokenizer(directory), cut)


def _own_tokenizer(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"{directory}: holds no tokenizer.json. Name the run that it is of with --run.")
    return BPETokenizer.load(file)


def _check_vocabulary(directory: Path, known: dict[str, Any], text: Text) -> None:
    size, largest = known.get("vocab_size"), int(text.ids.max())
    if size is not None and largest >= size:
        raise ConfigError(
            f"{directory}: knows {size} tokens, and the text has one with the number {largest}. It is of another "
            "tokenizer than the run's."
        )


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Keep the bars and warnings of transformers and its packages off stderr while it loads; errors are raised."""
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
