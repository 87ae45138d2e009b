"""What a release needs: an sdist that is a clone, versions and Pythons that agree wherever they are named."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PYTHONS = [
    match[1]
    for line in PROJECT["project"]["classifiers"]
    if (match := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))
]


def git(*arguments: str) -> list[str]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"git: {done.stderr.strip()}")
    return done.stdout.splitlines()


def test_the_sdist_has_every_entry_of_a_clone() -> None:
    named = {entry.removeprefix("/") for entry in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    assert {path.split("/")[0] for path in git("ls-files")} == named


def test_the_sdist_names_what_is_there() -> None:
    named = [entry.removeprefix("/") for entry in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_tag_is_the_version_and_the_changelog_has_it() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\](?: - .+)?$", changelog, re.MULTILINE)
    assert headings[0] in ("Unreleased", octavo.__version__)
    tags = [tag for tag in git("tag", "--points-at", "HEAD") if re.match(r"v\d", tag)]
    assert set(tags) <= {f"v{octavo.__version__}"}
    assert not tags or octavo.__version__ in headings


def test_pythons_are_the_same_in_metadata_wheel_and_workflow() -> None:
    minors = [int(version.removeprefix("3.")) for version in PYTHONS]
    assert minors == [*range(minors[0], minors[-1] + 1)]
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    wheel = re.search(r"^VERSIONS = \((.*)\)$", (ROOT / ".ci/wheel.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert wheel is not None and re.findall(r'"([\d.]+)"', wheel[1]) == PYTHONS
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert re.findall(r'"(3\.\d+)"', workflow)[:3] == [PYTHONS[0], PYTHONS[0], PYTHONS[-1]]


def test_the_oldest_pytorch_of_the_workflow_is_that_of_the_package() -> None:
    (oldest,) = (
        line.removeprefix("torch>=") for line in PROJECT["project"]["dependencies"] if line.startswith("torch>")
    )
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"torch==([\d.]+)", workflow) == [f"{oldest}.0"]


def test_a_forge_runs_what_the_script_runs_and_its_targets_exist() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    script, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in (".ci/run", "Makefile"))
    assert "run: .ci/run" in workflow
    targets = re.findall(r"^make (\w+)$", script, re.MULTILINE)
    assert {"test", "clients", "lint", "types", "layers", "site", "sdist", "wheel"} == {*targets}
    targets += re.findall(r"run: make (\w+)", workflow)
    assert "kernels" in targets  # minutes of compiling: where a forge has them
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_the_licence_names_its_holder() -> None:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    (author,) = PROJECT["project"]["authors"]
    assert "[yyyy]" not in licence and re.search(rf"^ +Copyright \d{{4}} {author['name']}$", licence, re.MULTILINE)
