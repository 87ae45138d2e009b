"""Conversations for supervised fine-tuning: loss on answers only, packed whole into sequences.

A line of `.jsonl` has `messages`, each with `role` and `content`, as OpenAI's and Hugging Face's; `tools` go to the
template, and a `task` names what accuracy is reported by. An answer of `weight` 0 is read and not trained on. Rows of
`sequence` ids contain whole conversations; one that is longer is cut. Flags in the ids (`octavo.lab.data.loader`) mark
where a conversation begins, and ids that are no targets.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo._util.config_reader import parse, read_text, shown
from octavo.errors import DataError
from octavo.lab.data.answers import find_answers
from octavo.lab.data.chat_template import (
    REASONING,
    TEMPLATE,
    generated,
    marks_answers,
    plain_messages,
    read_template,
    render,
)
from octavo.lab.data.corpus import Corpus
from octavo.lab.data.documents import check_characters
from octavo.lab.data.encode import SideTotals, SplitTotals, digest, threshold
from octavo.lab.data.loader import FIRST, IDS, NO_TARGET
from octavo.lab.data.tokenizer import Tokenizer

TASKS = "tasks.json"
"""File with the task of each held-out conversation, in the order of the rows."""
_RENDERING = 3
"""Increases whenever a template would give other texts."""
_OPEN_ROWS = 256
_PLAIN_FIELDS = ("role", "content", "weight", "name", "tool_call_id")
"""Fields of messages that a template need not read."""

Ids = NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """Format of conversations: template and length of a row."""

    sequence: int
    """Ids per row."""
    template: str = TEMPLATE
    """Jinja template of the messages, as in Hugging Face's tokenizers."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """Special tokens of the template by name, such as `bos_token` and `eos_token`; those that there are."""

    @classmethod
    def of(cls, tokenizer: str, sequence: int) -> ChatFormat:
        """Return the format of a tokenizer: the template beside its .json file, or `TEMPLATE`.

        Of several templates by name it is `default`, or the only one.

        Raises:
            DataError: a file cannot be read, or has several templates and none of them is the default.
        """
        if not tokenizer.endswith(".json"):
            return cls(sequence=sequence)
        template, tokens = read_template(Path(tokenizer))
        return cls(sequence=sequence, template=template, tokens=tokens)

    @property
    def fingerprint(self) -> str:
        """A text that differs between formats that could give different rows."""
        decisive = json.dumps([_RENDERING, self.template, dict(self.tokens)], sort_keys=True)
        return f"{self.sequence} {hashlib.sha256(decisive.encode()).hexdigest()}"

    def spans(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[tuple[str, bool]]:
        """Return the text of a conversation in parts, each with whether it is an answer to be trained on.

        Those are the blocks `{% generation %}` of a template that has them, otherwise answers with their end of turn.

        Raises:
            DataError: the template refuses the messages, or rewrites an answer or those before it; or an answer of
                weight 0 cannot be told from the others.
        """
        if marks_answers(self.template):
            parts = generated(self.template, self._values(messages, tools))
        else:
            parts = find_answers(messages, partial(self.text, tools=tools))
        weights = [message.get("weight") != 0 for message in messages if message["role"] == "assistant"]
        if all(weights):
            return parts
        if (blocks := sum(is_answer for _, is_answer in parts)) != len(weights):
            raise DataError(
                f"the chat template has {blocks} blocks {{% generation %}} for {len(weights)} answers, so that the one"
                " of weight 0 has none to leave out. Leave out the conversation, or mark each answer by one block"
            )
        trained = iter(weights)
        return [(text, is_answer and next(trained)) for text, is_answer in parts]

    def text(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of messages, with `add_generation_prompt` up to where an answer begins.

        Raises:
            DataError: the template refuses them.
        """
        values = self._values(messages, tools, add_generation_prompt)
        return render(self.template, values) if messages else ""

    def _values(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool = False
    ) -> dict[str, Any]:
        return {
            "messages": plain_messages(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.tokens,
        }

    def encode(self, line: Mapping[str, Any], tokenizer: Tokenizer) -> Ids:
        """Return the ids of a conversation, flagged, with the end of document; at most a row.

        Raises:
            DataError: see `spans`.
        """
        parts = []
        ends_trained = False
        for text, is_trained in self.spans(line["messages"], line.get("tools")):
            ids = tokenizer.encode_template(text).astype(np.uint32)
            parts.append(ids if is_trained else ids | NO_TARGET)
            ends_trained = is_trained if text else ends_trained
        found = np.concatenate(parts)
        end = np.uint32(tokenizer.end_of_document)
        if not len(found) or found[-1] & IDS != end:
            found = np.append(found, end if ends_trained else end | NO_TARGET)
        found[0] |= FIRST | NO_TARGET
        return found[: self.sequence]


def encode_chat(corpus: Corpus, tokenizer: Tokenizer, folder: Path, fraction: float, chat: ChatFormat) -> SplitTotals:
    """Write `train.u32`, `heldout.u32` and `TASKS` of the conversations of a corpus into `folder`.

    Raises:
        DataError: a line is no conversation; there are fewer than two, or none has an answer within a row.
    """
    found: list[_Conversation] = []
    overlong = 0
    for where, line, size in _lines(corpus, chat.template):
        try:
            ids = chat.encode(line, tokenizer)
        except DataError as error:
            raise DataError(f"{where}: {error}.") from error
        overlong += int(ids[-1] & IDS != tokenizer.end_of_document)  # cut: a whole one ends with it
        if not np.all(ids & NO_TARGET):
            text = json.dumps(line["messages"], sort_keys=True)
            found.append(_Conversation(digest(text.encode()), ids, str(line.get("task", "")), size))
    digests = [each.digest for each in found]
    limit = threshold(digests, fraction) if found else None
    if limit is None:
        raise DataError(f"{corpus.source}: two different conversations with answers are needed, to hold one out.")
    train = _rows([each for each in found if each.digest >= limit], chat.sequence)
    heldout = _rows([each for each in found if each.digest < limit], chat.sequence)
    totals = (
        _write_rows(folder / "train.u32", train, chat.sequence, tokenizer),
        _write_rows(folder / "heldout.u32", heldout, chat.sequence, tokenizer),
    )
    tasks = [each.task for row in heldout for each in row]
    (folder / TASKS).write_text(json.dumps(tasks) + "\n", encoding="utf-8")
    return SplitTotals.of(*totals, digests, overlong=overlong, suffix=".u32")


class _Conversation(NamedTuple):
    digest: int
    ids: Ids
    task: str
    size: int
    """Bytes of its messages."""


def _rows(conversations: Sequence[_Conversation], sequence: int) -> list[list[_Conversation]]:
    packed = pack([each.ids for each in conversations], sequence)
    return [[conversations[index] for index in row] for row in packed]


def _write_rows(path: Path, rows: Sequence[Sequence[_Conversation]], sequence: int, tokenizer: Tokenizer) -> SideTotals:
    ids = layout([[each.ids for each in row] for row in rows], sequence, tokenizer)
    path.write_bytes(ids.astype("<u4").tobytes())
    counts = np.bincount(ids[ids < FIRST], minlength=tokenizer.vocab)
    size = sum(each.size for row in rows for each in row)
    return SideTotals(counts, documents=sum(map(len, rows)), tokens=len(ids), bytes=size)


def pack(documents: Sequence[Ids], sequence: int) -> list[list[int]]:
    """Return the documents of each row, by index: each in the fullest open row that has room for it (best fit)."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room and row, in ascending order
    for index, document in enumerate(documents):
        place = bisect.bisect_left(free, (len(document), -1))
        if place == len(free):
            room, row = sequence, len(rows)
            rows.append([])
        else:
            room, row = free.pop(place)
        rows[row].append(index)
        bisect.insort(free, (room - len(document), row))
        if len(free) > _OPEN_ROWS:
            free.pop(0)  # the fullest
    return rows


def layout(rows: Sequence[Sequence[Ids]], sequence: int, tokenizer: Tokenizer) -> Ids:
    """Return rows one after another, filled up with ends of document that are no targets; and one id, the last target.

    A filling is a document of its own.
    """
    filling = np.uint32(tokenizer.end_of_document) | NO_TARGET
    found = np.full(len(rows) * sequence + 1, filling, dtype=np.uint32)
    for number, row in enumerate(rows):
        ids = np.concatenate(row)
        start = number * sequence
        found[start : start + len(ids)] = ids
        if len(ids) < sequence:
            found[start + len(ids)] |= FIRST
    found[-1] |= FIRST
    return found


def _lines(corpus: Corpus, template: str) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield where each conversation is, its line, and the bytes of its messages."""
    for file in corpus.files:
        if file.path.suffix != ".jsonl":
            raise DataError(f"{file.path}: chat data are lines of .jsonl. Take data.format 'text' for text.")
        for number, line in enumerate(read_text(file.path, DataError).split("\n"), 1):
            if line.strip():
                where = f"{file.path}:{number}"
                found = _checked(parse(line, where, DataError), where, template)
                check_characters(json.dumps(found, ensure_ascii=False), where)  # also those of tools
                yield where, found, sum(len((message.get("content") or "").encode()) for message in found["messages"])


def _checked(line: Any, where: str, template: str) -> dict[str, Any]:
    messages = line.get("messages") if isinstance(line, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: each line needs a list 'messages'.")
    for number, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        calls = fields.get("role") == "assistant" and fields.get("tool_calls")
        wanted = ("role",) if calls and fields.get("content") is None else ("role", "content")
        if not all(isinstance(fields.get(name), str) for name in wanted):
            raise DataError(f"{where}: message {number} needs the texts 'role' and 'content'.")
        _check_fields(fields, f"{where}: message {number}", template)
    return dict(line)


def _check_fields(message: Mapping[str, Any], where: str, template: str) -> None:
    """Refuse fields that would be ignored in silence, such as a mask by another name."""
    weight = message.get("weight", 1)
    if "weight" in message and (isinstance(weight, bool) or weight not in (0, 1, None)):
        raise DataError(
            f"{where}: the weight {shown(weight)} is neither 0 nor 1. An answer is trained on, or it is not: take one."
        )
    for name, value in message.items():
        if name in _PLAIN_FIELDS or value in (None, [], {}, ""):
            continue
        names = REASONING if name in REASONING else (name,)
        if not any(re.search(rf"\b{re.escape(each)}\b", template) for each in names):
            raise DataError(
                f"{where}: has the field '{name}', which the chat template does not read, so that it would be ignored."
                " Remove it, or train with a template that reads it. An answer that is not to be trained on has"
                " 'weight': 0."
            )
