"""Chat templates as Hugging Face's tokenizers have them: Jinja in a sandbox, rendered as `apply_chat_template` does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

from octavo._util.config_reader import blaming, read_file, read_text
from octavo.errors import DataError

TEMPLATE = (
    "{% for message in messages %}{{ message.role + ':\\n' + message.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
"""Template of tokenizers that have none."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's thoughts: the first is the one that templates read, and is set from the others."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MARK = "_octavo_mark"


def read_template(tokenizer: Path) -> tuple[str, dict[str, str]]:
    """Return the template in the folder of a tokenizer's .json file, or `TEMPLATE`; and its special tokens by name.

    Of several templates by name it is `default`, or the only one.

    Raises:
        DataError: a file cannot be read, or has several templates and none of them is the default.
    """
    config, named, jinja = (
        tokenizer.with_name(name)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    )
    settings = read_file(config, DataError) if config.is_file() else {}
    text = read_text(jinja, DataError) if jinja.is_file() else ""
    with blaming(config, DataError):
        template = text or _chosen(settings.get("chat_template") or TEMPLATE)
        tokens = {"bos_token": "", "eos_token": "", **_tokens(settings)}  # templates add them to other texts
    # As in transformers: where tokens were added, tokenizer_config.json has them all.
    if "added_tokens_decoder" not in settings and named.is_file():
        others = read_file(named, DataError)
        with blaming(named, DataError):
            tokens |= _tokens(others)
    return template, tokens


def begin_token(tokenizer: Path) -> str | None:
    """Return the token that `tokenizer_config.json` beside a tokenizer's .json file puts before texts, if it does.

    Raises:
        DataError: the file cannot be read.
    """
    config = tokenizer.with_name("tokenizer_config.json")
    settings = read_file(config, DataError) if config.is_file() else {}
    return _tokens(settings).get("bos_token") if settings.get("add_bos_token") is True else None


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return the text of a template with these values.

    Raises:
        DataError: it is malformed, or refuses them.
    """
    from jinja2 import TemplateError

    try:
        return str(_compiled(template).render(**values))
    except (
        TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise DataError(f"the chat template refuses the messages ({error})") from error


def marks_answers(template: str) -> bool:
    """Return True if a template marks what the model generates: `{% generation %}...{% endgeneration %}`."""
    return _GENERATION.search(template) is not None


def generated(template: str, values: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the text of a template in parts, alternately outside and inside of its blocks `{% generation %}`.

    Raises:
        DataError: see `render`.
    """
    mark = uuid4().hex  # in no message
    parts = render(template, {**values, _MARK: mark}).split(mark)
    return [(text, bool(number % 2)) for number, text in enumerate(parts)]


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.nodes import CallBlock, ContextReference
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `{% generation %}`, between two marks if the values have one."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_marked", [ContextReference()]), [], [], body).set_lineno(line)

        def _marked(self, context: Any, caller: Any) -> str:
            mark = context.get(_MARK, "")
            return f"{mark}{caller()}{mark}"

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as templates of Hugging Face expect it: Jinja's own filter sorts keys and escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens in a file by name, such as `bos_token`; a token is a text or has `content`."""
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    if isinstance(more := settings.get("extra_special_tokens"), dict):
        named |= more
    tokens = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}  # others: add_bos_token and such


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


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates expect them: without fields that are null, and thoughts by every name."""
    plain = []
    for message in messages:
        fields = {name: value for name, value in message.items() if value is not None}
        thoughts = next((fields[name] for name in REASONING if name in fields), None)
        if thoughts is not None:
            fields = {"thinking": thoughts, **fields, "reasoning_content": thoughts}
        plain.append(fields)
    return plain
