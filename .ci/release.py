"""Build the sdist and see that it is a clone without its history: every tracked file, and what the README asks to run.

`make sdist` runs it. On a commit with a tag `v...` it also compares the tag, the version of the package and the
changelog; the version is stated once, in `octavo.__version__`, so that an sdist and a copy without Git have it too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/test_readme.py", "tests/test_docs.py", "tests/test_release.py", "tests/bench/tables", "tests/_util")
"""Tests of what lies outside the package: pages, results, build files."""


def output(*words: str) -> list[str]:
    """Return the lines that a command prints in the clone."""
    return subprocess.run(words, cwd=ROOT, text=True, capture_output=True, check=True).stdout.splitlines()


def version() -> str:
    """Return the version that the package states."""
    text = (ROOT / "src/octavo/__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def check_tag(stated: str) -> str:
    """Return what the tags of this commit say; a tag of another version ends the script."""
    tags = [tag for tag in output("git", "tag", "--points-at", "HEAD") if re.match(r"v\d", tag)]
    wrong = [tag for tag in tags if tag != f"v{stated}"]
    if wrong:
        sys.exit(f"tag {wrong[0]}, but octavo.__version__ is '{stated}'")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if tags and not re.search(rf"^## \[{re.escape(stated)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        sys.exit(f"CHANGELOG.md has no '## [{stated}] - DATE' for tag {tags[0]}")
    return f"tag {tags[0]}" if tags else "no tag on this commit"


def build(out: Path) -> Path:
    """Return the unpacked sdist."""
    subprocess.run([sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT], check=True, capture_output=True)
    [archive] = out.glob("*.tar.gz")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", archive], check=True, capture_output=True)
    with tarfile.open(archive) as packed:
        packed.extractall(out, filter="data")
    return out / archive.name.removesuffix(".tar.gz")


def check_files(unpacked: Path) -> int:
    """Return how many files the sdist has; one that is missing or not tracked ends the script."""
    tracked = set(output("git", "ls-files"))
    packed = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    if differ := sorted(tracked ^ (packed - {"PKG-INFO"})):
        sys.exit(f"sdist and clone differ in {len(differ)} files: {', '.join(differ[:9])}")
    return len(packed)


def main() -> None:
    """Build, compare, and run."""
    stated = version()
    print(f"octavo {stated}: {check_tag(stated)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        unpacked = build(Path(folder))
        print(f"sdist: {check_files(unpacked)} files, those of the clone", flush=True)
        paths = os.pathsep.join(str(unpacked / name) for name in ("src", "benchmarks"))
        env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        for words in (
            ["octavo", "train", "--preset", "demo", "--steps", "2", "--out", "runs/demo"],
            ["pytest", *TESTS],
        ):
            subprocess.run([sys.executable, "-m", *words], cwd=unpacked, env=env, check=True)
    print("sdist: the demo trains, its tests pass")


if __name__ == "__main__":
    main()
