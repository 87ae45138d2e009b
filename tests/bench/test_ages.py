from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from octavo_bench import ages

FILE = "2026-11-21-nvidia-h200-gemm.json"
LINE = f"Measured on nvidia-h200 (torch 2.11) with `octavo bench gemm`: `{FILE}`."


def git(root: Path, *arguments: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(root), *author, *arguments], check=True, capture_output=True)


def commit(root: Path, name: str, text: str, day: str = "2026-11-21") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    git(root, "add", name)
    git(root, "commit", "-m", name, "--date", f"{day}T12:00:00")


def forget() -> None:
    """Forget what was read of Git: the clone has changed since."""
    ages.age.cache_clear()
    ages.has_history.cache_clear()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    git(tmp_path, "init", "-q")
    commit(tmp_path, "src/octavo/kernels/gemm/__init__.py", "1")
    commit(tmp_path, f"benchmarks/results/{FILE}", "{}")
    forget()
    return tmp_path


def test_only_commits_to_the_measured_code_count(clone: Path) -> None:
    commit(clone, "src/octavo/nn/linear.py", "1")
    assert ages.age(FILE, clone) == (FILE, 0, ("src/octavo/kernels",))
    assert ages.with_ages(LINE, clone) == LINE
    commit(clone, "src/octavo/kernels/gemm/__init__.py", "2")
    commit(clone, "src/octavo/kernels/new.py", "1")
    forget()
    assert ages.with_ages(f"text\n{LINE}\n", clone) == (
        f"text\n{LINE} *Measured before 2 commits to `src/octavo/kernels`: today's figures may differ.*\n"
    )


def test_measuring_again_starts_anew(clone: Path) -> None:
    commit(clone, "src/octavo/kernels/gemm/__init__.py", "2")
    commit(clone, f"benchmarks/results/{FILE}", '{"again": 1}')
    assert ages.age(FILE, clone) == (FILE, 0, ("src/octavo/kernels",))


def test_a_later_edit_of_a_file_makes_its_figures_no_newer(clone: Path) -> None:
    commit(clone, "src/octavo/kernels/gemm/__init__.py", "2", "2026-11-22")
    commit(clone, f"benchmarks/results/{FILE}", '{"a field": "renamed"}', "2026-11-23")
    assert ages.age(FILE, clone) == (FILE, 1, ("src/octavo/kernels",))


def test_figures_committed_after_midnight_have_an_age(clone: Path) -> None:
    late = FILE.replace("2026-11-21", "2026-11-20")
    commit(clone, f"benchmarks/results/{late}", "{}")
    commit(clone, "src/octavo/kernels/gemm/__init__.py", "2")
    assert ages.age(late, clone) == (late, 1, ("src/octavo/kernels",))


def test_a_file_that_a_sentence_names_gets_no_age(clone: Path) -> None:
    commit(clone, "src/octavo/kernels/gemm/__init__.py", "2")
    assert ages.with_ages(f"See `{FILE}`.", clone) == f"See `{FILE}`."


def test_without_history_nothing_is_said(clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(clone, "src/octavo/kernels/gemm/__init__.py", "2")
    (clone / ".git").rename(clone / "no-git")
    assert ages.with_ages(LINE, clone) == LINE
    assert ages.command(root=clone) == 1 and "ages are unknown" in capsys.readouterr().out


def test_a_shallow_clone_and_its_worktrees_count_nothing_and_others_count_all(clone: Path, tmp_path: Path) -> None:
    commit(clone, "src/octavo/kernels/gemm/__init__.py", "2")
    counted = ages.age(FILE, clone)
    assert counted is not None and counted.commits == 1
    for depth, expected in ((("--depth", "2"), None), ((), counted)):
        copy = tmp_path / f"copy{len(depth)}"
        git(tmp_path, "clone", "-q", *depth, clone.as_uri(), str(copy))
        git(copy, "worktree", "add", "--detach", "tree")
        assert ages.has_history(copy) == ages.has_history(copy / "tree") == (expected is not None)
        assert ages.age(FILE, copy) == ages.age(FILE, copy / "tree") == expected


def test_every_measured_path_exists_and_every_kind_is_one() -> None:
    from octavo_bench.results import schemas

    assert ages.MEASURED.keys() <= schemas().keys()
    named = {path for paths in (*ages.MEASURED.values(), ages.KERNELS) for path in paths}
    assert [path for path in sorted(named) if not (ages.ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("file", "first"),
    [
        ("2026-11-23-nvidia-h200-data-parallel.json", "src/octavo/kernels"),
        ("2026-11-23-amd-epyc-1-thread-clients.json", "src/octavo/kernels"),
        ("2026-11-21-nvidia-h200-step.json", "src/octavo/kernels"),
        ("2026-11-21-amd-epyc-faults-first.json", "src/octavo/lab/guard"),
        ("2026-11-22-paper-scaling.json", "benchmarks/octavo_bench/scaling.py"),
    ],
)
def test_the_kind_is_read_from_the_name(file: str, first: str) -> None:
    assert ages.paths_of(file)[0] == first
