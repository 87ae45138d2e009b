"""Conversations for supervised fine-tuning: loss on answers only, packed whole into sequences.

A line of `.jsonl` has `messages`, each with `role` and `content`, as OpenAI's and Hugging Face's; `tools` go to the
template, and a `task` names what accuracy is reported by. Rows of `sequence` ids contain whole conversations; one that
is longer is cut. Flags in the ids (`octavo.data.loader`) mark where a conversation begins, and ids that are no targets.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo._util.config_reader import blaming, parse, read_file, read_text
from octavo.data.corpus import Corpus
from octavo.data.documents import check_characters
from octavo.data.encode import SideTotals, SplitTotals, digest, threshold
from octavo.data.loader import FIRST, IDS, NO_TARGET
from octavo.data.tokenizer import Tokenizer
from octavo.errors import DataError

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ':\\n' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
"""Template of tokenizers that have none."""
TASKS = "tasks.json"
"""File with the task of each held-out conversation, in the order of the rows."""
_RENDERING = 2
"""Increases whenever a template would give other texts."""
_OPEN_ROWS = 256
_WITHOUT_THOUGHTS = re.compile(r"\s*(?:<think>\s*</think>\s*)?")
"""What a template may leave of the thoughts of an earlier answer."""

Ids = NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """Format of conversations: template and length of a row."""

    sequence: int
    """Ids per row."""
    template: str = TEMPLATE
    """Jinja template of the messages, as in Hugging Face's tokenizers."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """`bos_token` and `eos_token` of the template."""

    @classmethod
    def of(cls, tokenizer: str, sequence: int) -> ChatFormat:
        """Return the format of a tokenizer: the template beside its .json file, or `TEMPLATE`.

        Of several templates by name it is `default`, or the only one.

        Raises:
            DataError: a file cannot be read, or has several templates and none of them is the default.
        """
        folder = Path(tokenizer).parent
        if not tokenizer.endswith(".json"):
            return cls(sequence=sequence)
        config = folder / "tokenizer_config.json"
        known = read_file(config, DataError) if config.is_file() else {}
        jinja = folder / "chat_template.jinja"
        given = read_text(jinja, DataError) if jinja.is_file() else ""
        with blaming(config, DataError):
            template = given or _chosen(known.get("chat_template") or TEMPLATE)
            values = {name: known.get(name) or "" for name in ("bos_token", "eos_token")}
            tokens = {name: value if isinstance(value, str) else value["content"] for name, value in values.items()}
        return cls(sequence=sequence, template=template, tokens=tokens)

    @property
    def fingerprint(self) -> str:
        """A text that differs between formats that could give different rows."""
        decisive = json.dumps([_RENDERING, self.template, dict(self.tokens)], sort_keys=True)
        return f"{self.sequence} {hashlib.sha256(decisive.encode()).hexdigest()}"

    def spans(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[tuple[str, bool]]:
        """Return the text of a conversation in parts, each with whether it is an answer, its end of turn included.

        Raises:
            DataError: the template refuses the messages, or rewrites an answer or those before it.
        """
        whole, done = self.text(messages, tools), 0
        found: list[tuple[str, bool]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.text(messages[:index] if index else messages, tools, add_generation_prompt=True)
            before = before if index else _opening(whole, before)
            if not whole.startswith(before):
                raise DataError(f"the chat template changes the messages before answer {index}")
            end = _end(whole, len(before), self.text(messages[: index + 1], tools), message["content"])
            if end is None:
                raise DataError(
                    f"the chat template rewrites the content of message {index} (role 'assistant'), so that its answer"
                    " cannot be found in the text. Write it as the template does, or change the template"
                )
            found += [(whole[done : len(before)], False), (whole[len(before) : end], True)]
            done = end
        return [*found, (whole[done:], False)]

    def text(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of messages, with `add_generation_prompt` up to where an answer begins.

        Raises:
            DataError: the template refuses them.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(reason: str) -> None:
            raise TemplateError(reason)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        values = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt, **self.tokens}
        try:
            template = environment.from_string(self.template, {"raise_exception": refuse})
            return template.render(**values) if messages else ""
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses the messages ({error})") from error

    def encode(self, line: Mapping[str, Any], tokenizer: Tokenizer) -> Ids:
        """Return the ids of a conversation, flagged, with the end of document; at most a row.

        Raises:
            DataError: see `spans`.
        """
        parts = []
        for text, is_answer in self.spans(line["messages"], line.get("tools")):
            ids = tokenizer.encode_template(text).astype(np.uint32)
            parts.append(ids if is_answer else ids | NO_TARGET)
        found = np.concatenate(parts)
        end = np.uint32(tokenizer.end_of_document)
        if not len(found) or found[-1] & IDS != end:
            found = np.append(found, end if not parts[-1].size else end | NO_TARGET)
        found[0] |= FIRST | NO_TARGET
        return found[: self.sequence]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as templates of Hugging Face expect it: Jinja's own filter sorts keys and escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _chosen(template: Any) -> str:
    """Return a template, or of several by name, a mapping or a list of entries, the default or the only one."""
    if isinstance(template, str):
        return template
    named = template if isinstance(template, dict) else {each["name"]: each["template"] for each in template}
    if "default" not in named and len(named) > 1:
        raise DataError(
            f"chat_template: has the templates {', '.join(map(repr, named))}, and none is named 'default'. Rename the"
            " one to train with, or write it to chat_template.jinja in the same folder."
        )
    chosen = named["default"] if "default" in named else next(iter(named.values()))
    if not isinstance(chosen, str):
        raise TypeError(f"chat_template: expected a text, got {chosen!r}")
    return chosen


def _opening(whole: str, prompted: str) -> str:
    """Return the text before the answer that a conversation begins with; templates may refuse to render no messages.

    Args:
        whole: text of the conversation.
        prompted: the same with the generation prompt of one more answer.
    """
    prompt = prompted.removeprefix(whole)
    before, found, _ = whole.partition(prompt) if prompt and prompt != prompted else ("", "", "")
    return before + found if found else ""


def _end(whole: str, start: int, until: str, content: str) -> int | None:
    """Return the end of the answer that begins at `start`, None if it is not there.

    Args:
        whole: text of the conversation.
        start: where the generation prompt ends.
        until: text up to the answer, which is then the last.
        content: content of the answer. Templates that reason render only the last answer with its thoughts, if those
                are in the content itself without them: what follows `</think>`.
    """
    if whole.startswith(until):
        return len(until)
    content = content.strip()
    at, last = whole.find(content, start), until.rfind(content)
    if not 0 <= at <= last:  # beyond `last` a later message quotes it
        _, is_thinking, content = (part.strip() for part in content.rpartition("</think>"))
        at, last = _WITHOUT_THOUGHTS.match(whole, start).end(), until.rfind(content)  # type: ignore[union-attr]
        if not is_thinking or last < 0 or not whole.startswith(content, at):
            return None
    end, turn = at + len(content), until[last + len(content) :]
    return end + len(turn) if whole.startswith(turn, end) else end


def encode_chat(corpus: Corpus, tokenizer: Tokenizer, folder: Path, fraction: float, chat: ChatFormat) -> SplitTotals:
    """Write `train.u32`, `heldout.u32` and `TASKS` of the conversations of a corpus into `folder`.

    Raises:
        DataError: a line is no conversation; there are fewer than two, or none has an answer within a row.
    """
    found: list[_Conversation] = []
    overlong = 0
    for where, line, size in _lines(corpus):
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


def _lines(corpus: Corpus) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield where each conversation is, its line, and the bytes of its messages."""
    for file in corpus.files:
        if file.path.suffix != ".jsonl":
            raise DataError(f"{file.path}: chat data are lines of .jsonl. Take data.format 'text' for text.")
        for number, line in enumerate(read_text(file.path, DataError).split("\n"), 1):
            if line.strip():
                where = f"{file.path}:{number}"
                found = _checked(parse(line, where, DataError), where)
                check_characters(json.dumps(found, ensure_ascii=False), where)  # also those of tools
                yield where, found, sum(len(message["content"].encode()) for message in found["messages"])


def _checked(line: Any, where: str) -> dict[str, Any]:
    messages = line.get("messages") if isinstance(line, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: each line needs a list 'messages'.")
    for number, message in enumerate(messages):
        fields = message if isinstance(message, dict) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise DataError(f"{where}: message {number} needs the texts 'role' and 'content'.")
    return dict(line)
