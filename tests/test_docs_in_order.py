"""The docs followed by a newcomer: every file and command in reading order, in one directory.

Runs are shortened (`shortened`); what needs a network, several ranks or a browser, and what measures, is left out.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.lab.cli.main import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
DEVELOPERS = ("pytest", "hypothesis", "ruff", "mypy", "playwright", "ml_dtypes", "matplotlib", "mkdocs")
"""Packages of the extra `dev` alone: a user does not have them."""
LEFT_OUT = re.compile(
    r"octavo (bench (?!portability)|dashboard|pilot config.json --batch|train .*--tracker|doctor .*--trace"
    r"|dump .*tensorboard|.*(--shard|--loss-scale|--fits))"
)
PAGES = [
    DOCS / name
    for name in re.findall(r"\]\(((?:tutorial|how-to)/[\w-]+\.md)\)", (DOCS / "pages.md").read_text(encoding="utf-8"))
]
BLOCK = re.compile(
    r"^(<!-- not run: [^\n]*)?\n*^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


SMALL = {"dim": 32, "layers": 1, "heads": 2, "sequence": 32, "steps": 4, "checkpoint_every": 2, "batch": 2}
SMALL |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}


def small(text: str) -> str:
    """Return a file of settings for a run of a few steps, a Hugging Face config of a small model."""
    for key, value in SMALL.items():
        text = re.sub(rf'^({key} = |  "{key}": )\d+', rf"\g<1>{value}", text, flags=re.MULTILINE)
    return text


def shortened(command: str) -> str:
    """Return the same command for a run of a few steps of the preset `tiny`."""
    for pattern, by in (
        (r"--preset (demo|parity-\S+)", "--preset tiny"),
        (r"--steps [1-9]\d*", "--steps 4"),
        (r"--checkpoint-every \d+", "--checkpoint-every 2"),
        (r"--(\S*tokens) \d+", r"--\1 512"),
        (r"--verify \d+", "--verify 2"),
        (r"step-\d+", "step-000004"),
        (r"--batches \d+", "--batches 2"),
    ):
        command = re.sub(pattern, by, command)
    if re.match(r"octavo (eval|localize)\b(?!.* --tokens)", command):
        command += " --tokens 512"
    if re.match(r"octavo train (mine|packed)\.toml(?!.*--dry-run)", command):
        command += " --eval-tokens 512"
    if re.match(r"octavo train --preset tiny(?!.*--steps)", command):
        command += " --steps 4 --eval-tokens 512"
    if re.match(r"octavo (train|plan) --preset tiny(?!.*(layers|runs/source))", command):
        command += " --model.layers 1"
    if re.match(r"octavo pilot(?!.*--steps)", command):
        command += " --steps 3"
    if re.match(r"octavo plan .*--memory", command) and "--no-baseline" in command:
        command += " --compile off"  # tracing is most of a forecast, and one of them is of compiled blocks
    if command == "make demo":
        return "octavo train --preset tiny --model.layers 1 --steps 4 --out runs/demo --overwrite"
    return command


def followed(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the files of a page, each with its text, and its commands, each with an empty text."""
    for skipped, language, title, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if skipped:
            continue
        if title:
            yield title, text
        elif language == "bash":
            yield from ((line.partition("  #")[0].strip(), "") for line in text.splitlines() if line.strip())


def run(command: str) -> int:
    """Run a command of `octavo`, or a script, in this process, and return its exit code."""
    if command.startswith("python "):
        runpy.run_path(command.removeprefix("python "))
        return 0
    with pytest.raises(SystemExit) as done:
        main(shlex.split(command)[1:])
    return int(done.value.code or 0)


def test_every_page_is_followed_in_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # the cache of texts is new, too
    for name in DEVELOPERS:
        monkeypatch.setitem(sys.modules, name, None)
    failed, ran = [], 0
    for page in PAGES:
        for what, text in followed(page):
            if text:
                (tmp_path / what).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / what).write_text(small(text), encoding="utf-8")
                continue
            command = shortened(what)
            if not re.match(r"octavo |python \w+\.py$", command) or LEFT_OUT.match(command):
                continue
            ran += 1
            code = run(command)
            said = capsys.readouterr()
            if code != 0:
                failed.append(f"{page.relative_to(DOCS)}: {what}: exit {code}: {said.err.strip()[-300:]}")
    assert ran > 40
    assert failed == []
