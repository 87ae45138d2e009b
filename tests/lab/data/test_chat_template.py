"""Templates render as Hugging Face's tokenizers render them, and give the answers that they mark."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import DataError
from octavo.lab.data import ByteTokenizer
from octavo.lab.data.chat import ChatFormat
from octavo.lab.data.chat_template import read_template
from octavo.lab.train.export import tokenizer_files

NAMED = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ cls_token }}|{{ sep_token }}|"
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REASONING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{% set content = m.content or '' %}"
    "{{ content.split('</think>')[-1].lstrip('\n') if loop.index0 < ns.last else content }}"
    "{% for call in m.tool_calls %}{% if content or not loop.first %}{{ '\n' }}{% endif %}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3's: the thoughts since the last question are kept, and those before it dropped."""


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": name}}], **fields}


def said(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


ROUNDS = [
    said("user", "q1"),
    call("find", content="", reasoning_content="where?"),
    said("tool", "here"),
    call("read", content="let me read", reasoning="how?"),
    said("tool", "assistant"),
    said("assistant", "a1", thinking="so"),
    said("user", "q2"),
    call("find", content=None, reasoning_content="again"),
    said("tool", "there"),
    said("assistant", ""),
    said("user", "q3"),
    said("assistant", "a3", reasoning_content="easy"),
]
ANSWERS = [
    '<tool_call>\n{"name": "find"}\n</tool_call><|im_end|>\n',
    'let me read\n<tool_call>\n{"name": "read"}\n</tool_call><|im_end|>\n',
    "a1<|im_end|>\n",
    '<tool_call>\n{"name": "find"}\n</tool_call><|im_end|>\n',
    "<|im_end|>\n",
    "<think>\neasy\n</think>\n\na3<|im_end|>\n",
]


def written(folder: Path, template: str, **files: Any) -> ChatFormat:
    """Return the format of a tokenizer's folder; the names of files are without `.json`."""
    contents = {**tokenizer_files(ByteTokenizer(), 64), **{f"{name}.json": value for name, value in files.items()}}
    for name, value in contents.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(template)
    return ChatFormat.of(str(folder / "tokenizer.json"), 64)


def test_several_rounds_of_tools_under_a_template_that_drops_thoughts() -> None:
    chat = ChatFormat(sequence=64, template=REASONING)
    parts = chat.spans(ROUNDS)
    assert "".join(text for text, _ in parts) == chat.text(ROUNDS)
    assert [text for text, is_answer in parts if is_answer] == ANSWERS


@pytest.mark.parametrize("count", range(2, len(ROUNDS) + 1))
def test_each_beginning_of_it_has_its_answers(count: int) -> None:
    chat = ChatFormat(sequence=64, template=REASONING)
    parts = chat.spans(ROUNDS[:count])
    assert "".join(text for text, _ in parts) == chat.text(ROUNDS[:count])
    answers = [text for text, is_answer in parts if is_answer]
    asked = [message for message in ROUNDS[:count] if message["role"] == "assistant"]
    assert len(answers) == len(asked) and all(text.endswith("<|im_end|>\n") for text in answers)
    assert all((message.get("content") or "") in text for text, message in zip(answers, asked, strict=True))


@pytest.mark.parametrize("content", ["", " ", "<think>hm</think>", "<think>hm</think>\n\n"])
def test_an_answer_that_is_empty_keeps_its_end_of_turn(content: str) -> None:
    chat = ChatFormat(sequence=64, template=REASONING)
    messages = [said("user", "a"), said("assistant", content), said("user", "b"), said("assistant", content)]
    first, second = [text for text, is_answer in chat.spans(messages) if is_answer]
    assert first.endswith("<|im_end|>\n") and second == f"{content}<|im_end|>\n"
    assert "think" not in first


def test_equal_rounds_are_not_taken_for_one_another() -> None:
    chat = ChatFormat(sequence=64, template=REASONING)
    messages = [said("user", "a"), said("assistant", "<think>x</think>b")] * 4
    answers = [text for text, is_answer in chat.spans(messages) if is_answer]
    assert answers == ["b<|im_end|>\n"] * 3 + ["<think>x</think>b<|im_end|>\n"]


def test_marked_answers_are_what_a_template_marks() -> None:
    chat = ChatFormat(sequence=64, template=MARKED)
    messages = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d", weight=0)]
    assert chat.text(messages) == "<|user|>a<|end|>\n<|assistant|>b<|end|>\n<|user|>c<|end|>\n<|assistant|>d<|end|>\n"
    assert [text for text, is_answer in chat.spans(messages) if is_answer] == ["b<|end|>"]
    messages[-1]["weight"] = 1
    assert [text for text, is_answer in chat.spans(messages) if is_answer] == ["b<|end|>", "d<|end|>"]
    twice = ChatFormat(sequence=64, template=MARKED.replace("{{ m.content }}<|end|>{% endg", "{% endg") + MARKED)
    with pytest.raises(DataError, match="weight 0"):
        twice.spans([said("user", "a"), said("assistant", "b", weight=0)])


def test_the_date_is_that_of_today() -> None:
    chat = ChatFormat(sequence=64, template="{{ strftime_now('%Y') }}")
    assert chat.text([said("user", "a")]) in {str(datetime.now().year + later) for later in (0, 1)}


@pytest.mark.parametrize("mark", ["lstrip", None])
def test_special_tokens_of_either_file(tmp_path: Path, mark: str | None) -> None:
    """As transformers reads them: of `special_tokens_map.json` unless the other file says which tokens were added."""
    added = {} if mark is None else {"added_tokens_decoder": {"256": {"content": "<x>"}}}
    config = {"eos_token": "</s>", "unk_token": None, "pad_token": {"content": "<p>"}, "add_bos_token": True, **added}
    others = {"bos_token": "<s>", "eos_token": {"content": "<end>"}, "cls_token": "<c>", "additional": ["<y>"]}
    written(tmp_path, NAMED, tokenizer_config=config, special_tokens_map=others)
    _, tokens = read_template(tmp_path / "tokenizer.json")
    first = {"bos_token": "", "eos_token": "</s>", "pad_token": "<p>"}
    assert tokens == (first if mark else {**first, "bos_token": "<s>", "eos_token": "<end>", "cls_token": "<c>"})


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (REASONING, ROUNDS),
        (MARKED, [said("user", "a"), said("assistant", "b", reasoning=None)]),
        (NAMED + "{{ mask_token }}{{ image_token }}{{ documents }}", [said("user", "a")]),
        (
            "{{ strftime_now('%d %b') }}{{ tools | tojson }}{{ messages[0].thinking }}",
            [said("user", "", reasoning="t")],
        ),
        ("{% if strftime_now is defined and pad_token is defined and cls_token is not defined %}x{% endif %}", ROUNDS),
    ],
)
def test_transformers_renders_the_same(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], prompt: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    config = tokenizer_files(ByteTokenizer(), 64)["tokenizer_config.json"]
    tokens = {"bos_token": "<s>", "pad_token": "<p>", "image_token": "<i>", "extra_special_tokens": {"a_token": "<a>"}}
    others = {"unk_token": {"content": "<u>", "lstrip": False, "normalized": False, "rstrip": False}, "sep_token": "-"}
    chat = written(tmp_path, template, tokenizer_config={**config, **tokens}, special_tokens_map=others)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    tools = [{"type": "function", "function": {"name": "find", "description": "é < 1"}}]
    expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
    assert chat.text(messages, tools, add_generation_prompt=prompt) == expected


def test_transformers_marks_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    chat = written(tmp_path, MARKED)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    messages = [said("user", "a"), said("assistant", "bc"), said("user", "c"), said("assistant", "")]
    made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    mask = [int(is_answer) for text, is_answer in chat.spans(messages) for _ in ByteTokenizer().encode(text)]
    assert list(made["assistant_masks"]) == mask and sum(mask) == len("bc<|end|>") + len("<|end|>")


TURNS = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("ending", "answers"),
    [
        (
            "{% if add_generation_prompt %}<|assistant|>{% else %}</s>{% endif %}",
            ["a<|end|>", "<|end|>", "c<|end|></s>"],
        ),
        ("{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}", ["a<|end|>", "<|end|>", "c<|end|>"]),
        ("{% if add_generation_prompt %}<|assistant|>{% endif %}", ["a<|end|>", "<|end|>", "c<|end|>"]),
    ],
)
def test_texts_may_end_otherwise_than_their_turns_and_prompts_begin_thoughts(ending: str, answers: list[str]) -> None:
    chat = ChatFormat(sequence=64, template=TURNS + ending)
    messages = [
        said("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(["q", "a", "q", "", "q", "c"])
    ]
    parts = chat.spans(messages)
    assert "".join(text for text, _ in parts) == chat.text(messages)
    assert [text for text, is_answer in parts if is_answer] == answers
