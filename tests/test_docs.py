"""README and docs are true: examples run, commands and files are accepted, links lead somewhere."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo
from octavo import recipes
from octavo._util.config_reader import to_dict
from octavo.lab.cli.main import app
from octavo.lab.train.config import RunConfig, assemble, load_preset, presets
from octavo_bench import api
from octavo_bench.cli import COMMANDS

ROOT = Path(__file__).parents[1]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
PAGES = [*TOP, *sorted(ROOT.glob("docs/**/*.md"))]
CURRENT = [page for page in PAGES if page.parent.name != "log" and page.name != "CHANGELOG.md"]
"""Pages that name nothing of the past."""
OPENED = [page for page in sorted(ROOT.glob("docs/*/*.md")) if page.parent.name != "log"]
OPENED = [page for page in OPENED if page.stem not in ("parity-protocol", "parity-results")]  # fixed, and its tables
SECTIONS = {section.name for section in dataclasses.fields(RunConfig)}
FIGURE = re.compile(r"\d[\d.,]*\s?(?:%|ms\b|dB\b|GiB\b|TFLOP|tokens/s|times as fast|x faster)")


def blocks(page: Path, language: str) -> Iterator[str]:
    """Yield the code blocks of a page, without those under a `<!-- not run: why -->`."""
    for fence in re.finditer(
        r"^([^\n]*)\n+```(\w+)(?: title=[^\n]*)?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    ):
        if fence[2] == language and not fence[1].startswith("<!-- not run:"):
            yield fence[3]


def every_block(language: str) -> Iterator[tuple[Path, str]]:
    """Yield the code blocks of all pages."""
    for page in PAGES:
        yield from ((page, code) for code in blocks(page, language))


def prose(page: Path) -> str:
    """Return a page without its code and without its generated tables."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^<!-- (?:table|closed): .*?^<!-- end -->$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(blocks(page, "python"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    for code in blocks(page, "python"):
        few = re.sub(r"(num_hidden_layers=)4, (vocab_size=)8192", r"\g<1>1, \g<2>512", code)  # of the same width
        exec(compile(few, str(page), "exec"), namespace)


def test_files_are_accepted() -> None:
    for page, code in every_block("toml"):
        settings = tomllib.loads(code)
        if SECTIONS & set(settings):
            assemble(load_preset("tiny", cuda=False), (str(page), settings))  # a page may show a part of a file
        else:
            recipes.load(settings, str(page))


def test_links_lead_somewhere() -> None:
    targets = [(page, t) for page in PAGES for t in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", prose(page))]
    assert len(targets) > 100
    assert [(page.name, target) for page, target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", OPENED, ids=lambda page: page.stem)
def test_a_page_opens_with_what_it_gives_and_a_command(page: Path) -> None:
    title, first, *_ = page.read_text().split("\n\n")
    assert title.startswith("# ") and not first.startswith(("#", "|", "```", "<", "-", "!"))  # a sentence
    lines = page.read_text().splitlines()
    assert next((i for i, line in enumerate(lines) if line.startswith("```")), len(lines)) < 16


def test_make_targets_exist() -> None:
    known = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for _, code in every_block("bash") for name in re.findall(r"\bmake ([a-z]+)", code)}
    assert named and named <= known


def test_commands_are_accepted() -> None:
    lines = {line for _, code in every_block("bash") for line in code.splitlines() if line.startswith("octavo ")}
    assert len(lines) > 100
    for line in sorted(lines):
        command, _, _ = app.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
        name = line.split()[1]
        where = "octavo_bench." if name == "bench" else "octavo.lab.cli."
        assert f"{command.__module__}.".startswith(where), line
        assert name in ("bench", command.__name__.removesuffix("_")), line


def test_no_figure_is_typed() -> None:
    pages = [page for page in PAGES if page.parent.name != "log"]  # a notebook: what was expected is nowhere measured
    assert [(page.name, figure) for page in pages for figure in FIGURE.findall(prose(page))] == []


def test_the_reference_has_every_command_and_flag() -> None:
    text = (ROOT / "docs/reference/cli.md").read_text()
    sections = dict(re.findall(r"^## octavo (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    commands = {name for name in app if not name.startswith("-")}
    assert sections.keys() == commands
    assert [name for name in COMMANDS if f"| `{name}` |" not in sections["bench"]] == []
    missing = []
    for command in commands - {"bench"}:
        for argument in app[command].assemble_argument_collection():
            of_a_run = any("." in name for name in argument.names)  # a setting: the reference of the run file has it
            if not of_a_run and "*" not in argument.names:
                pattern = "|".join(rf"(?<![\w-]){re.escape(name)}\b" for name in argument.names)
                missing += [f"{command} {argument.name}"] * (re.search(pattern, sections[command]) is None)
    assert missing == []


def test_help_names_every_preset() -> None:
    told = app["train"].default_command.__doc__
    assert told is not None and [name for name in presets() if name not in told] == []


def test_the_api_page_names_what_users_import() -> None:
    page = (ROOT / "docs/reference/api.md").read_text()
    headings = re.findall(r"^### (octavo\S+)$", page, re.MULTILINE)
    assert headings == api.names()
    assert [name for name in headings if not callable(api.named(name))] == []
    modules = {"__version__", "calibration", "distributed", "guard", "lab", "optim"}
    assert {f"octavo.{name}" for name in octavo.__all__ if name not in modules} <= {*headings}


def test_files_of_the_repository_that_pages_name_exist() -> None:
    path = re.compile(r"`((?:src|tests|benchmarks)/[\w./-]+)")
    named = [(page, name) for page in CURRENT for name in path.findall(prose(page))]
    assert len(named) > 100
    assert [(page.name, name) for page, name in named if not (ROOT / name).exists()] == []


def test_names_of_octavo_that_pages_use_exist() -> None:
    named = {(page.name, name) for page in CURRENT for name in re.findall(r"`(octavo(?:\.[A-Za-z_]\w*)+)", prose(page))}
    assert len(named) > 50
    ours = [each for each in named if ".integrations." not in each[1]]  # those need the libraries themselves
    assert sorted(each for each in ours if not _exists(each[1])) == []


def test_settings_that_pages_name_exist() -> None:
    config = to_dict(assemble(load_preset("tiny", cuda=False)))
    known = {f"{section}.{key}" for section, keys in config.items() for key in keys} | {"run.sqlite"}
    setting = re.compile(r"`((?:data|guard|lora|parallel|run)\.[a-z_\d]+)")
    named = {(page.name, name) for page in CURRENT for name in setting.findall(prose(page))}
    assert len(named) > 50
    assert sorted(each for each in named if each[1] not in known) == []


def _exists(name: str) -> bool:
    """Return whether a dotted name is that of a module, an attribute or a field."""
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        parent, _, last = name.rpartition(".")
        return last in getattr(pkgutil.resolve_name(parent), "__dataclass_fields__", {})
    return True
