"""What the README promises first: one line to install, and a handful of lines for one's own model."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_first_blocks_are_one_line_to_install_two_commands_and_the_example() -> None:
    blocks = re.findall(r"^```(?:bash|python)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert blocks[0] == 'pip install ".[dashboard,serving]"\n'
    assert [line.split()[1] for line in blocks[1].splitlines()] == ["doctor", "pilot"]
    assert "octavo.convert(model)" in blocks[2]
    assert blocks[3] == "make demo\nmake test\n"


def test_the_first_screen_has_what_why_install_and_the_example() -> None:
    lines = README.splitlines()
    assert lines.index("optimizer.step()") < 60
    assert "FP8 training" in lines[2]


def test_the_order_of_the_readme() -> None:
    sections = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert sections == [
        *("Start", "Convert a model", "See it at work", "Results", "Recipes", "When not to use it", "Documentation"),
    ]


@pytest.mark.parametrize("name", ["speed", "memory", "loss"])
def test_each_table_of_results_is_short(name: str) -> None:
    results = README.split(f"<!-- table: readme-{name} -->")[1].split("<!-- end -->")[0]
    rows = [line for line in results.splitlines() if line.startswith("| ") and "---" not in line]
    assert 2 <= len(rows) <= 12
    assert max(map(len, rows)) <= 180


def test_the_readme_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 180 and max(map(len, lines)) <= 300


def test_pictures_exist_in_light_and_dark() -> None:
    found = set(re.findall(r'(?:src|srcset)="(docs/pictures/[^"]+)"', README))
    assert {Path(name).name for name in found} >= {
        "hero-light.svg",
        "hero-dark.svg",
        "dashboard-dark.png",
    }
    assert [name for name in found if not (ROOT / name).is_file()] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("target", "command"),
    [("demo", "octavo train --preset demo --out runs/demo"), ("test", "python -m pytest")],
)
def test_make_would_run(target: str, command: str) -> None:
    dry = ["make", "--dry-run", "--always-make", target]
    shown = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f".venv/bin/{command}" in shown


def test_an_old_python_is_one_clear_line(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\ncase "$2" in *version_info*) exit 1;; *) echo 3.9.2;; esac\n')
    old.chmod(0o755)
    find = ["/bin/sh", str(ROOT / ".ci/find-python")]
    done = subprocess.run(find, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("octavo: needs Python 3.11 or newer, and 'python3' is 3.9.2.")


def test_a_new_python_is_found_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "python3.12").symlink_to(sys.executable)
    find = ["/bin/sh", str(ROOT / ".ci/find-python")]
    done = subprocess.run(find, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert done.stdout == "python3.12\n"
    asked = subprocess.run([*find, "no-such"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert asked.returncode == 1 and "'no-such' is not there" in asked.stderr


def test_octavo_on_a_model_of_hugging_face_takes_fifteen_lines() -> None:
    code = re.search(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert code is not None and "transformers" in code[1]
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 15


def test_extras_are_spelled_so_that_every_shell_takes_them() -> None:
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "log")]
    texts = {path: path.read_text() for path in [*pages, *(ROOT / "src").rglob("*.py")]}
    found = {path: re.findall(r"pip install.*?(\S*)\[[a-z,]+\]", text) for path, text in texts.items()}
    named = [(path.name, before) for path, all_of_them in found.items() for before in all_of_them]
    assert len(named) > 8
    assert [each for each in named if not re.search(r'"(octavo|\.)$', each[1])] == []


def test_dependencies_are_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = {_name(line) for line in project["dependencies"]}
    develop = {_name(line) for line in extras["dev"]} - {"octavo"}
    optional = {_name(line) for extra in extras if extra != "dev" for line in extras[extra]}
    page = (ROOT / "docs/reference/dependencies.md").read_text()
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    explained = [re.findall(r"^\| (?!package|extra|---)(.+?) \|", section, re.MULTILINE) for section in sections]
    assert set(explained[0]) == needed
    assert set(explained[1]) == set(extras) - {"dev"}
    assert all(name in sections[1] for name in optional)
    assert set(explained[2]) == develop


def test_wheels_for_an_offline_machine_are_all_but_pytorch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    own, build = project["project"], project["build-system"]["requires"]
    needed = {_name(line) for line in (*own["dependencies"], *own["optional-dependencies"]["dashboard"], *build)}
    (downloaded,) = re.findall(r"pip download .*--dest wheels (.*)", (ROOT / "Makefile").read_text())
    assert needed - {"torch"} <= set(downloaded.split())


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9_-]+", requirement)
    assert match is not None
    return match[0]
