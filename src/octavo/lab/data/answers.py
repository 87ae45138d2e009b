"""Where the answers of a conversation are in its text, for templates that do not mark them.

A template that renders messages one after another has each answer between the text of the messages before it, with the
generation prompt, and that up to it. One that drops earlier thoughts rewrites those messages when more follow; its
answers are located by rendering twice, once with one more character at the end of an answer: what follows the answer is
equal in both texts.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import DataError

Render = Callable[..., str]
"""Text of messages; with `add_generation_prompt` up to where an answer begins."""
_WITHOUT_THOUGHTS = re.compile(r"\s*(?:(?:<think>)?\s*</think>\s*)?")
"""What a template may leave of the thoughts of an earlier answer."""
_UNFINISHED = re.compile(r"[<\[][^<>\[\]]*$")
_PROBES = ("\ue000", "\ue001")
"""Characters that no text has: the second is for one that ends with the first."""


def find_answers(messages: Sequence[Mapping[str, Any]], render: Render) -> list[tuple[str, bool]]:
    """Return the text of a conversation in parts, each with whether it is an answer, its end of turn included.

    Parts alternate; each answer is one, though it may be empty.

    Raises:
        DataError: the template refuses the messages, or rewrites an answer or those before it.
    """
    whole, done = render(messages), 0
    parts: list[tuple[str, bool]] = []
    last: _Answer | None = None
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        answer = _Answer(messages, index, render, whole)
        start = answer.start(last)
        if start is None or start < done:
            raise DataError(f"the chat template changes the messages before answer {index}")
        end = answer.end(start)
        parts += [(whole[done:start], False), (whole[start:end], True)]
        done, last = end, answer
    return [*parts, (whole[done:], False)]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer of a conversation."""

    messages: Sequence[Mapping[str, Any]]
    index: int
    render: Render
    whole: str
    """Text of the conversation."""

    def start(self, last: _Answer | None) -> int | None:
        """Return where the answer begins, after the one before it; None if the text before it is not in the whole."""
        if self.index == 0:
            return _opening(self.whole, self.render(self.messages, add_generation_prompt=True))
        before = self.messages[: self.index]
        texts = self.render(before), self.render(before, add_generation_prompt=True)
        if (length := _prompted(self.whole, *texts)) is not None:
            return length
        return None if last is None else last.next_start(self.index)

    def end(self, start: int) -> int:
        """Return where the answer that begins at `start` ends.

        Raises:
            DataError: its content is not there.
        """
        until = self.render(self.messages[: self.index + 1])
        if len(until) >= start and self.whole.startswith(until):
            return len(until)
        end = max(start, len(self.whole) - len(self._rest(self.messages)))
        if not self._has_content(self.whole[start:end]):
            raise DataError(
                f"the chat template rewrites the content of message {self.index} (role 'assistant'), so that its answer"
                " cannot be found in the text. Write it as the template does, or change the template"
            )
        return max(end, self._after(self._rest(self.messages[: self.index + 1])) or self._after(self._turn(start)) or 0)

    def next_start(self, index: int) -> int | None:
        """Return where the next answer begins, message `index`; None if the text before it is not in the whole."""
        rest, before = self._rest(self.messages), self.messages[:index]
        following = self._rest(before), self._rest(before, add_generation_prompt=True)
        for strip in (str, str.lstrip):  # white space before may belong to either
            after = strip(rest)
            if rest != self.whole and (length := _prompted(after, *map(strip, following))) is not None:
                return len(self.whole) - len(after) + length
        return None

    def _after(self, following: str) -> int | None:
        """Return where a text after this answer's content ends; None if another one is there."""
        rest = self._rest(self.messages)
        for after, wanted in ((rest, following), (rest.lstrip(), following.lstrip())):
            if rest != self.whole and wanted and after.startswith(wanted):
                return len(self.whole) - len(after) + len(wanted)
        return None

    def _turn(self, start: int) -> str:
        """Return what follows the content of an answer when more messages follow: the text up to a next prompt."""
        prompted = self.render(self.messages[: self.index], add_generation_prompt=True) if self.index else ""
        prompt = prompted[len(_whole_tokens(_common([self.render(self.messages[: self.index]), prompted]))) :]
        try:
            turn = self._rest(self.messages[: self.index + 1], add_generation_prompt=True)
        except DataError:  # the template refuses two answers in a row
            return ""
        return turn.removesuffix(prompt) if prompt and turn.endswith(prompt) else ""

    def _rest(self, messages: Sequence[Mapping[str, Any]], **options: bool) -> str:
        """Return what follows this answer's content, and its last tool's name, in the text of messages."""
        changed = [*messages]
        changed[self.index] = _probed(messages[self.index])
        return _common_end(self.render(messages, **options), self.render(changed, **options))

    def _has_content(self, region: str) -> bool:
        content = str(self.messages[self.index].get("content") or "").strip()
        if content in region:
            return True
        _, is_thinking, answer = content.rpartition("</think>")
        kept = region[_WITHOUT_THOUGHTS.match(region).end() :]  # type: ignore[union-attr]
        return bool(is_thinking) and kept.startswith(answer.strip())


def _prompted(whole: str, base: str, prompted: str) -> int | None:
    """Return where the generation prompt ends in a text; None if the text does not begin with what precedes the prompt.

    Prompts of templates that reason may end with `<think>`, where an answer without thoughts has none.

    Args:
        whole: the text.
        base: its beginning without the generation prompt.
        prompted: the same with it.
    """
    if whole.startswith(prompted):
        return len(prompted)
    base, shared = (_whole_tokens(_common([each, prompted])) for each in (base, whole))
    return len(shared) if shared.startswith(base) and shared[len(base) :].strip() else None


def _whole_tokens(text: str) -> str:
    """Return a text without a special token that it ends within."""
    return _UNFINISHED.sub("", text)


def _common(texts: Sequence[str]) -> str:
    """Return the longest common prefix."""
    return os.path.commonprefix(texts)  # noqa: RUF071 (by character is what is wanted)


def _common_end(one: str, other: str) -> str:
    return _common([one[::-1], other[::-1]])[::-1]


def _probed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with one more character at the end of its content and of its last tool's name."""
    changed = dict(message)
    if isinstance(changed.get("content"), str):
        changed["content"] = _extended(changed["content"])
    if isinstance(calls := message.get("tool_calls"), list) and calls and isinstance(calls[-1], Mapping):
        call = dict(calls[-1])
        inner = call["function"] if isinstance(call.get("function"), Mapping) else call
        if isinstance(inner.get("name"), str):
            named = {**inner, "name": _extended(inner["name"])}
            changed["tool_calls"] = [*calls[:-1], named if inner is call else {**call, "function": named}]
    return changed


def _extended(text: str) -> str:
    return text + _PROBES[text.endswith(_PROBES[0])]


def _opening(whole: str, prompted: str) -> int | None:
    """Return the end of the text before the answer that a conversation begins with.

    Templates may refuse to render no messages, so it is where the generation prompt first is.

    Args:
        whole: text of the conversation.
        prompted: the same with the generation prompt of one more answer.
    """
    prompt = prompted.removeprefix(whole)
    at = whole.find(prompt) if prompt and prompt != prompted else -1
    return 0 if at < 0 else at + len(prompt)
