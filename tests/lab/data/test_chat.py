"""Conversations as rows of ids: what is a target, what is packed where, and what attention does not cross."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import DataError
from octavo.lab.data import ByteTokenizer, Loader, prepare
from octavo.lab.data.chat import TASKS, ChatFormat, layout, pack
from octavo.lab.data.loader import FIRST, IDS, NO_TARGET, heldout_batches, open_tokens
from octavo.lab.models import ModelConfig, build

BYTES = ByteTokenizer()
CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETTING = (
    "{% for m in messages %}<|{{m.role}}|>{% if m.role=='assistant' and not loop.last %}LEFT"
    "{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Drops the thoughts of earlier answers, in place of which there is LEFT."""
THINKING = (
    "{% for m in messages %}{{ m.role }}>{% if loop.last and m.role == 'assistant' %}[]{% endif %}{{ m.content }};"
    "{% endfor %}{% if add_generation_prompt %}assistant>{% endif %}"
)


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def answers(chat: ChatFormat, *contents: str) -> list[str]:
    return [text for text, is_answer in chat.spans(turns(*contents)) if is_answer]


def test_answers_end_with_their_turn() -> None:
    assert answers(ChatFormat(sequence=64), "1?", "one", "2?", "two") == ["one\n", "two\n"]
    chatml = ChatFormat(sequence=64, template=CHATML, tokens={"bos_token": "<s>"})
    assert answers(chatml, "1?", " one ", "2?", "two") == ["one<|im_end|>\n", "two<|im_end|>\n"]
    assert "".join(text for text, _ in chatml.spans(turns("1?", "one"))).startswith("<s><|im_start|>user\n1?<|im_end|>")
    # Thoughts are rendered in the last answer only: text up to an earlier one, rendered alone, is no prefix.
    assert answers(ChatFormat(sequence=64, template=THINKING), "a", "b", "c", "d") == ["b;", "[]d;"]


@pytest.mark.parametrize(
    ("chat", "expected"),
    [
        (ChatFormat(sequence=64), ["hello\n", "two\n"]),
        (ChatFormat(sequence=64, template="X" + CHATML), ["hello<|im_end|>\n", "two<|im_end|>\n"]),
        (ChatFormat(sequence=64, template=CHATML.partition("{% if")[0]), None),  # no generation prompt to go by
    ],
)
def test_a_conversation_may_begin_with_an_answer(chat: ChatFormat, expected: list[str] | None) -> None:
    """What names its role is no part of it."""
    messages = [{"role": "assistant", "content": "hello"}, *turns("2?", "two")]
    found = [text for text, is_answer in chat.spans(messages) if is_answer]
    assert (found == expected) if expected else found[0].endswith("hello<|im_end|>\n")


@pytest.mark.parametrize("left", ["", " ", "<think></think>\n", "<think>\n\n</think>\n\n"])
def test_an_earlier_answer_whose_thoughts_the_template_drops_is_what_is_left(left: str) -> None:
    chat = ChatFormat(sequence=64, template=FORGETTING.replace("LEFT", left))
    found = answers(chat, "q", "<think>a1 or hm</think>\n\na1", "a1 q2", "<think>so</think>a2", "q3", "a3")
    assert found == [f"{left}a1<|end|>", f"{left}a2<|end|>", "a3<|end|>"]


@pytest.mark.parametrize("rewritten", ["{{ m.content | upper }}", "{{ m.content[1:] }}", "a2", ""])
@pytest.mark.parametrize("thoughts", ["<think>hm</think>", ""])
def test_an_answer_that_the_template_rewrites_is_named(rewritten: str, thoughts: str, tmp_path: Path) -> None:
    kept = "LEFT{{ m.content.split('</think>')[-1].lstrip() }}"
    chat = ChatFormat(sequence=256, template=FORGETTING.replace(kept, rewritten))
    lines = [turns("a", "b"), turns("q", f"{thoughts}one", f"not {thoughts}one", "a2")]
    source = write(tmp_path / "chat.jsonl", [{"messages": messages} for messages in lines])
    with pytest.raises(DataError, match=r"chat\.jsonl:2: .*rewrites the content of message 1 \(role 'assistant'\)"):
        prepare(source, BYTES, tmp_path / "cache", chat=chat)


def test_an_expression_of_a_template_that_fails_is_no_bare_error() -> None:
    for expression in ("{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ messages[0].content.index('z') }}"):
        with pytest.raises(DataError, match="template refuses"):
            ChatFormat(sequence=64, template=expression).spans(turns("a", "b"))


TOOLS = [{"type": "function", "function": {"name": "f", "description": "a < b & it's é"}}]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", json.dumps(TOOLS, ensure_ascii=False)),
        ("(indent=4, ensure_ascii=True)", json.dumps(TOOLS, indent=4)),
        ("(separators=(',', ':'))", json.dumps(TOOLS, ensure_ascii=False, separators=(",", ":"))),
    ],
)
def test_tools_are_written_as_hugging_face_writes_them(options: str, expected: str) -> None:
    chat = ChatFormat(sequence=64, template=f"{{{{ tools | tojson{options} }}}}")
    assert chat.text(turns("a"), TOOLS) == expected


def test_templates_that_cannot_be_trained_on_are_refused() -> None:
    counting = ChatFormat(sequence=64, template="{{ messages | length }}{{ messages[-1].content }}")
    with pytest.raises(DataError, match="changes the messages before answer 1"):
        counting.spans(turns("a", "b"))
    strict = ChatFormat(sequence=64, template="{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match="no system role"):
        strict.spans(turns("a", "b"))
    unsafe = ChatFormat(sequence=64, template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(DataError, match="unsafe"):
        unsafe.spans(turns("a", "b"))


def test_a_template_lies_beside_its_tokenizer(tmp_path: Path) -> None:
    config = {"chat_template": "old", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatFormat.of(str(tmp_path / "tokenizer.json"), 64)
    assert (found.template, found.tokens) == ("old", {"bos_token": "<s>", "eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text("new")
    assert ChatFormat.of(str(tmp_path / "tokenizer.json"), 64).template == "new"
    assert ChatFormat.of("bytes", 64) == ChatFormat(sequence=64)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"id": 1}}))
    with pytest.raises(DataError, match=r"tokenizer_config\.json: .*'content'"):
        ChatFormat.of(str(tmp_path / "tokenizer.json"), 64)


@pytest.mark.parametrize("is_list", [False, True])
def test_of_several_templates_it_is_the_default_or_the_only_one(tmp_path: Path, is_list: bool) -> None:
    def of(**named: str) -> ChatFormat:
        given = [{"name": name, "template": text} for name, text in named.items()] if is_list else named
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
        return ChatFormat.of(str(tmp_path / "tokenizer.json"), 64)

    assert of(rag="a", default="b").template == "b"
    assert of(tool_use="a").template == "a"
    assert of() == ChatFormat(sequence=64, tokens={"bos_token": "", "eos_token": ""})
    with pytest.raises(DataError, match=r"tokenizer_config\.json: .* 'tool_use', 'rag', and none is named 'default'"):
        of(tool_use="a", rag="b")
    for template in ({"default": 5}, ["a"], 5):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with pytest.raises(DataError, match=r"tokenizer_config\.json: damaged"):
            ChatFormat.of(str(tmp_path / "tokenizer.json"), 64)


def test_only_answers_are_targets() -> None:
    ids = ChatFormat(sequence=64).encode({"messages": turns("1?", "one", "2?", "two")}, BYTES)
    is_target = (ids & NO_TARGET) == 0
    assert BYTES.decode(ids[is_target] & IDS) == "one\ntwo\n"
    assert ids[-1] == BYTES.end_of_document  # a target, too: the answer ends here
    assert np.flatnonzero(ids & FIRST).tolist() == [0]
    asked = ChatFormat(sequence=64).encode({"messages": turns("1?", "one", "2?")}, BYTES)
    assert asked[-1] & NO_TARGET and len(ChatFormat(sequence=5).encode({"messages": turns("1?", "one")}, BYTES)) == 5


def test_an_answer_of_weight_0_is_no_target() -> None:
    messages = turns("1?", "one", "2?", "two")
    messages[1]["weight"], messages[3]["weight"] = 0, 1  # type: ignore[assignment]
    ids = ChatFormat(sequence=64).encode({"messages": messages}, BYTES)
    assert BYTES.decode(ids[(ids & NO_TARGET) == 0] & IDS) == "two\n" and ids[-1] == BYTES.end_of_document
    messages[1]["weight"], messages[3]["weight"] = 1, 0  # type: ignore[assignment]
    ids = ChatFormat(sequence=64).encode({"messages": messages}, BYTES)
    assert BYTES.decode(ids[(ids & NO_TARGET) == 0] & IDS) == "one\n" and ids[-1] & NO_TARGET


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight": 0.5}, "message 1: the weight 0.5 is neither 0 nor 1"),
        ({"weight": True}, "the weight True is neither"),
        ({"weight": "0"}, "the weight '0' is neither"),
        ({"train": False}, "message 1: has the field 'train', which the chat template does not read"),
        ({"reasoning": "so"}, "has the field 'reasoning'"),
        ({"tool_calls": [{"function": {"name": "f"}}]}, "has the field 'tool_calls'"),
        ({"content": None}, "message 1 needs the texts"),
    ],
)
def test_a_field_that_would_be_ignored_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    lines = [{"messages": turns(f"{i}?", "one")} for i in range(9)]
    lines[3]["messages"][1] |= fields
    source = write(tmp_path / "chat.jsonl", lines)
    with pytest.raises(DataError, match=rf"chat\.jsonl:4: .*{message}|chat\.jsonl:4: {message}"):
        prepare(source, BYTES, tmp_path, 0.2, ChatFormat(sequence=64))


def test_fields_that_templates_read_and_those_without_a_value_are_taken(tmp_path: Path) -> None:
    chat = ChatFormat(sequence=64, template=CHATML.replace("m.content", "m.content ~ m.thinking ~ m.tool_calls"))
    lines = [{"messages": turns(f"{i}?", "one")} for i in range(9)]
    lines[3]["messages"][1] |= {"reasoning": "so", "refusal": None, "annotations": [], "name": "x", "weight": None}
    lines[4]["messages"][1] |= {"content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert prepare(write(tmp_path / "chat.jsonl", lines), BYTES, tmp_path, 0.2, chat).documents > 0


def test_rows_are_filled_best_fit() -> None:
    lengths = [5, 4, 3, 6, 2]
    rows = pack([np.zeros(n, dtype=np.uint32) for n in lengths], 8)
    assert rows == [[0, 2], [1], [3, 4]]  # 3 beside 5, 2 beside 6: the fullest that has room


def test_a_filling_is_a_document_of_its_own_and_no_target() -> None:
    """So that attention does not lead from it into the conversation before."""
    ids = ChatFormat(sequence=64).encode({"messages": turns("1?", "one")}, BYTES)
    row, end = layout([[ids], [ids]], len(ids) + 3, BYTES), np.uint32(BYTES.end_of_document)
    for start in (0, len(ids) + 3):
        assert np.array_equal(row[start : start + len(ids)], ids)
        filling = row[start + len(ids) : start + len(ids) + 3]
        assert filling.tolist() == [end | FIRST | NO_TARGET, end | NO_TARGET, end | NO_TARGET]
    assert len(row) == 2 * (len(ids) + 3) + 1 and row[-1] == end | FIRST | NO_TARGET
    full = layout([[ids]], len(ids), BYTES)  # nothing to fill but the last target
    assert np.array_equal(full[:-1], ids)


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_documents_leak_neither_loss_nor_attention(tmp_path: Path) -> None:
    """In a packed row every conversation has the loss that it has alone."""
    lines = [{"messages": turns(f"{i} plus {i}", str(2 * i)), "task": "sum" if i % 2 else ""} for i in range(40)]
    source, chat = write(tmp_path / "chat.jsonl", lines), ChatFormat(sequence=96)
    files = prepare(source, BYTES, tmp_path / "cache", 0.2, chat=chat)
    assert prepare(source, BYTES, tmp_path / "cache", 0.2, chat=chat) == files and files.suffix == ".u32"
    assert files.documents + files.heldout_documents == 40
    tasks = json.loads((files.directory / TASKS).read_text())
    assert len(tasks) == files.heldout_documents and {*tasks} == {"sum", ""}
    shape = {"vocab": 272, "dim": 32, "layers": 2, "heads": 2, "ffn": 64, "sequence": 96}
    packed = build(ModelConfig(**shape, documents="separate"), 0)
    alone = build(ModelConfig(**shape), 0)
    for inputs, targets in (next(Loader(files.train, 2, 96, 0)), next(heldout_batches(files.heldout, 2, 96))):
        for row, target in zip(inputs, targets, strict=True):
            starts = [*torch.where(row < 0)[0].tolist(), 96]
            assert starts[0] == 0 and len(starts) > 3
            sums, count = torch.zeros(()), 0
            for start, end in itertools.pairwise(starts):
                document = torch.where(row < 0, ~row, row)[None, start:end]
                known = target[None, start:end]
                if (known >= 0).any():
                    sums += alone(document, known) * (known >= 0).sum()
                    count += int((known >= 0).sum())
                    assert BYTES.decode(known[known >= 0]).strip().isdigit()
            torch.testing.assert_close(packed(row[None], target[None]), sums / count, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"text": "x"}], "needs a list 'messages'"),
        ([{"messages": [{"role": "user"}]}], "message 0 needs the texts"),
        ([{"messages": turns("a", "b \ud800")}], r"chat\.jsonl:1: the text contains a lone surrogate"),
        ([{"messages": turns("a", "b"), "tools": ["\ud800"]}], r"chat\.jsonl:1: the text contains a lone surrogate"),
        ([{"messages": turns("a", "b")}], "two different conversations"),
        ([{"messages": turns("a" * 90, "b")}, {"messages": turns("a" * 91, "b")}], "two different conversations"),
    ],
)
def test_what_is_no_conversation_is_refused(lines: list[Any], said: str, tmp_path: Path) -> None:
    source = write(tmp_path / "chat.jsonl", lines)
    with pytest.raises(DataError, match=said):
        prepare(source, BYTES, tmp_path, chat=ChatFormat(sequence=64))


def test_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"data\.format 'text'"):
        prepare(tmp_path, BYTES, tmp_path / "cache", chat=ChatFormat(sequence=64))


@pytest.mark.parametrize(
    "change", [{"tokens": {"bos_token": "<BOS>"}}, {"template": CHATML.replace("}<", "} <")}, {"sequence": 96}]
)
def test_another_format_gives_other_files(change: dict[str, Any], tmp_path: Path) -> None:
    source = write(tmp_path / "chat.jsonl", [{"messages": turns(f"q{i}", f"a{i}")} for i in range(20)])
    base: dict[str, Any] = {"sequence": 128, "template": CHATML, "tokens": {"bos_token": "<s>"}}
    first, other = (
        prepare(source, BYTES, tmp_path / "cache", 0.2, chat=ChatFormat(**settings))
        for settings in (base, base | change)
    )
    assert first.directory != other.directory
    assert prepare(source, BYTES, tmp_path / "cache", 0.2, chat=ChatFormat(**base)) == first


def test_a_conversation_of_exactly_a_row_is_not_cut(tmp_path: Path) -> None:
    messages = [{"messages": turns(f"{i}?", "one")} for i in range(9)]
    length = len(ChatFormat(sequence=64).encode(messages[0], BYTES))
    source = write(tmp_path / "chat.jsonl", messages)
    cut = [prepare(source, BYTES, tmp_path, 0.2, ChatFormat(sequence=n)).overlong for n in (length, length - 1)]
    assert cut == [0, 9]


class WideTokenizer(ByteTokenizer):
    """Bytes, with ids that need 32 bits."""

    name, vocab, end_of_document, fingerprint = "wide", 70_016, 69_999, "wide"

    def encode(self, text: str) -> Any:
        return super().encode(text).astype(np.uint32) + np.uint32(65_600)

    def decode(self, ids: Any) -> str:
        return super().decode(i - 65_600 for i in ids if i != 69_999)


def test_large_vocabularies_are_stored_in_32_bits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to train on, and to hold out " * 20)
    files = prepare(tmp_path / "a.txt", WideTokenizer(), tmp_path / "cache", 0.2)
    assert files.train.suffix == ".u32" and open_tokens(files.train).dtype == np.uint32
    inputs, targets = next(Loader(files.train, 2, 16, 0))
    assert inputs.min() > 65_535 and torch.equal(inputs[:, 1:], targets[:, :-1])
