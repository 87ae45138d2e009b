"""Accuracy by task with EleutherAI's harness (lm-eval): of a run in FP8, in high precision and of its BF16 baseline.

Tasks are the harness's own, or YAML files of the user with data beside them, which need no network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo._util.config_reader import read_file
from octavo.conversion import disabled
from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.data.bpe import BPETokenizer
from octavo.lab.data.chat import ChatFormat
from octavo.lab.data.tokenizer import Tokenizer
from octavo.lab.evaluation.run import EvalSettings, LoadedRun
from octavo.lab.evaluation.served import check_installed, is_served, load
from octavo.lab.monitor.store.writer import replace_document
from octavo.lab.train import device as devices
from octavo.lab.train.evaluate import compared, within
from octavo.lab.train.files import write_json
from octavo.lab.train.train_state import TrainState

Logits = Callable[[Tensor], Tensor]
"""ids (B, T) to logits (B, T, V)."""
ROWS = 8
"""Sequences per forward."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the harness for the number of ids of an answer."""
LONGEST_ANSWER = 256
"""Number of ids where a task names none, as in the harness."""
NO_EFFECT = frozenset({"top_p", "top_k", "min_p", "typical_p", "seed", "use_cache"})
"""Options that do not change a greedy answer."""
NEUTRAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
"""Options that do, except with this value."""


@dataclass(frozen=True, kw_only=True)
class TaskEvaluation:
    """Result by task. `print(found)` shows it as a table."""

    model: str
    """Directory of the model."""
    tasks: dict[str, dict[str, Any]]
    """By `task metric`: `samples`, values with errors (`fp8`, `fp8_error`, ...) and their paired `difference`."""

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        names = [name for name in next(iter(self.tasks.values()), {}) if name != "samples" and "_error" not in name]
        lines = [f"model       {self.model}\n", f"{'':<32}{'samples':>8}" + "".join(f"{name:>20}" for name in names)]
        for task, found in self.tasks.items():
            values = (f"{found[name]:.4f}{within(found[f'{name}_error'], found['samples'], '.4f')}" for name in names)
            lines.append(f"{task:<32}{found['samples']:>8,}" + "".join(f"{value:>20}" for value in values))
        return "\n".join(
            [*lines, "\nValues ± their standard error; the difference, FP8's to the next one's, is paired."]
        )


def evaluate_tasks(
    model: Path, names: Sequence[str], settings: EvalSettings, *, files: Path | None = None, limit: int | None = None
) -> TaskEvaluation:
    """Evaluate a run or an exported model on tasks; those of a finished run are stored with its summary.

    Args:
        model: directory of a run, of one of its checkpoints, or of an exported model.
        names: tasks of `files`; without, of the harness.
        settings: checkpoint and device.
        files: folder with task files (.yaml).
        limit: samples per task; None for all.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: an unknown task.
        UnsupportedError: lm-eval, or what loads an exported model, is not installed.
    """
    harness = partial(_results, names=names, files=files, limit=limit)
    _harness()
    served = is_served(model)
    models = _served(model, settings) if served else _of_run(model, settings)
    found = {name: harness(loaded) for name, loaded in models}
    evaluation = TaskEvaluation(model=str(model), tasks=_compared(found))
    summary = model / "summary.json"
    if not served and summary.is_file():
        content = read_file(summary)
        content["tasks"] = {**content.get("tasks", {}), **evaluation.tasks}
        write_json(summary, content)
        replace_document(model, "summary", content)
    return evaluation


def _harness() -> Any:
    """Return the package, without telemetry."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import lm_eval
    except ImportError as error:
        raise UnsupportedError('octavo eval: --tasks needs lm-eval: pip install "octavo[tasks]"') from error
    return lm_eval


def _of_run(model: Path, settings: EvalSettings) -> Iterator[tuple[str, Any]]:
    loaded = LoadedRun(model, settings)
    data, longest = loaded.config.data, loaded.config.model.sequence
    chat = ChatFormat.of(data.tokenizer, data.sequence) if data.format == "chat" else None
    states = loaded.subject.states()
    for state in states:
        state.model.eval()
        yield state.name, _model(state.logits, loaded.tokenizer, longest, state.device, chat)
        if state.name == "fp8" and len(states) == 1:
            high = partial(_in_high_precision, state)
            yield "high_precision", _model(high, loaded.tokenizer, longest, state.device, chat)


def _in_high_precision(state: TrainState, ids_BT: Tensor) -> Tensor:
    with disabled(state.model):
        return state.logits(ids_BT)


def _served(model: Path, settings: EvalSettings) -> Iterator[tuple[str, Any]]:
    device = devices.use(settings.device)
    known = read_file(model / "config.json")
    check_installed(known)
    loaded: Any = load(model, device)
    tokenizer, chat = BPETokenizer.load(model / "tokenizer.json"), None
    if "chat_template" in read_file(model / "tokenizer_config.json"):
        chat = ChatFormat.of(str(model / "tokenizer.json"), known["max_position_embeddings"])

    def logits(ids_BT: Tensor) -> Tensor:
        found: Tensor = loaded(input_ids=ids_BT, use_cache=False).logits
        return found

    yield "served", _model(logits, tokenizer, known["max_position_embeddings"], device, chat)


def _results(model: Any, *, names: Sequence[str], files: Path | None, limit: int | None) -> Mapping[str, Any]:
    """Return the harness's results."""
    harness = _harness()
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if files is None else str(files), include_defaults=files is None)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        where = "" if files is None else f" or in {files}"
        raise ConfigError(
            f"--tasks: lm-eval has no task '{unknown[0]}'{where}. Task files are named with --task-files."
        )
    with torch.no_grad():
        found: Mapping[str, Any] = harness.simple_evaluate(
            model,
            tasks=list(names),
            task_manager=manager,
            limit=limit,
            bootstrap_iters=0,
            apply_chat_template=model.talks,
        )
    return found


def _compared(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the values of each metric by model, with errors of the harness, and the first two's paired difference."""
    first = next(iter(found.values()))
    rows: dict[str, dict[str, Any]] = {}
    for task, results in first["results"].items():
        for key in [key for key in results if key.endswith(",none") and "_stderr" not in key]:
            metric = key.partition(",")[0]
            samples = {name: [float(each[metric]) for each in other["samples"][task]] for name, other in found.items()}
            values = {name: float(other["results"][task][key]) for name, other in found.items()}  # as the harness says
            rows[f"{task} {metric}"] = {**compared({name: torch.tensor(x) for name, x in samples.items()}), **values}
    return rows


def _model(logits: Logits, tokenizer: Tokenizer, longest: int, device: torch.device, chat: ChatFormat | None) -> Any:
    """Return the harness's view of a model: log-likelihoods and greedy continuations."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Model(TemplateLM):  # type: ignore[misc]
        tokenizer_name = tokenizer.fingerprint
        talks = chat is not None
        eot_token_id = tokenizer.end_of_document

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids = tokenizer.encode_batch([string])[0] if chat is None else tokenizer.encode_template(string)
            return [*map(int, ids)]

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            assert chat is not None
            return chat.text(chat_history, add_generation_prompt=add_generation_prompt)

        def chat_template(self, chat_template: bool | str = False) -> str:
            return "" if chat is None else chat.template

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            pairs = [(context, continuation) for _, context, continuation in requests]
            return scores_in_batches(logits, pairs, longest, device)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            totals = []
            for request in requests:
                ids = self.tok_encode(request.args[0])
                windows = get_rolling_token_windows(ids, self.prefix_token_id, longest, 1)
                pairs = [(None, *make_disjoint_window(window)) for window in windows]
                totals.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            prompts = [(self.tok_encode(context), options) for context, options in (each.args for each in requests)]
            for _, options in prompts:  # of all tasks: a refusal comes before the first answer
                _ends(options)
            return [continuation(logits, tokenizer, ids, options, longest, device) for ids, options in prompts]

    return Model()


def continuation(
    logits: Logits,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    options: Mapping[str, Any],
    longest: int,
    device: torch.device,
) -> str:
    """Return the greedy continuation of a prompt.

    Args:
        options: the task's `generation_kwargs`: `until`, the text or texts that end it, and the number of ids, by one
            of the names in `LENGTHS`.
        longest: length of the context in ids.

    Raises:
        UnsupportedError: the options ask for samples, or have one that is not honoured.
    """
    (stops, count), known, text = _ends(options), [*ids], ""
    for _ in range(count):
        recent = torch.tensor([known[-longest:]], device=device)
        known.append(int(logits(recent)[0, -1].argmax()))
        text = tokenizer.decode(known[len(ids) :])
        if known[-1] == tokenizer.end_of_document or any(stop in text for stop in stops):
            break
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def _ends(options: Mapping[str, Any]) -> tuple[Sequence[str], int]:
    """Return the texts that end an answer and its maximum number of ids; errors as `continuation`."""
    given = {name: value for name, value in options.items() if value is not None}
    until, lengths = given.pop("until", []), {int(given.pop(name)) for name in LENGTHS if name in given}
    temperature = float(given.pop("temperature", 1 if given.get("do_sample") else 0))
    if given.pop("do_sample", temperature > 0) and temperature > 0:
        raise UnsupportedError("octavo eval: tasks are answered by greedy decoding; the task asks for samples.")
    for name, value in given.items():
        if name not in NO_EFFECT and (name not in NEUTRAL or value != NEUTRAL[name]):
            raise UnsupportedError(
                f"octavo eval: the task's generation_kwargs have '{name}: {value}', which is not supported. Answers are"
                f" greedy, with 'until' and '{LENGTHS[0]}': remove it in a copy of the task, for --task-files."
            )
    if len(lengths) > 1:
        raise UnsupportedError(
            f"octavo eval: the task's generation_kwargs have several lengths, {sorted(lengths)}, by the names"
            f" {', '.join(name for name in LENGTHS if name in options)}. Keep one of them."
        )
    return [until] if isinstance(until, str) else until, max(lengths, default=LONGEST_ANSWER)


def scores_in_batches(
    logits: Logits, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], longest: int, device: torch.device
) -> list[tuple[float, bool]]:
    """Return the `scores` of pairs in their order; those of similar lengths are computed together."""
    order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
    found: dict[int, tuple[float, bool]] = {}
    for start in range(0, len(order), ROWS):
        part = order[start : start + ROWS]
        found |= zip(part, scores(logits, [pairs[i] for i in part], longest, device), strict=True)
    return [found[i] for i in range(len(pairs))]


def scores(
    logits: Logits, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], longest: int, device: torch.device
) -> list[tuple[float, bool]]:
    """Return for each context and continuation the log-likelihood of the continuation, in nats, and if it is greedy.

    Contexts are cut at the left to at most `longest` ids in all; shorter rows are filled at the right.
    """
    rows = [[*context, *continuation][-(longest + 1) :] for context, continuation in pairs]
    width = max(map(len, rows)) - 1
    ids_BT = torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids_BT[number, : len(row) - 1] = torch.tensor(row[:-1])
    logits_BTV = logits(ids_BT.to(device))
    found = []
    for logits_TV, row, (_, continuation) in zip(logits_BTV, rows, pairs, strict=True):
        count = min(len(continuation), len(row) - 1)
        targets_T = torch.tensor(row[-count:], device=device)
        own_TV = logits_TV[len(row) - 1 - count : len(row) - 1].float().log_softmax(-1)
        likelihood = float(own_TV.gather(1, targets_T[:, None]).double().sum())
        found.append((likelihood, bool((own_TV.argmax(-1) == targets_T).all())))
    return found
