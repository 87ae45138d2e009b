from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from octavo._util.git import head_commit

HOOKS = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *AUTHOR, *arguments]
    return subprocess.run(command, env=HOOKS, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    git(tmp_path, "init", "--quiet", str(folder))
    (folder / "file").write_text("one")
    git(folder, "add", "file")
    git(folder, "commit", "--quiet", "-m", "one")
    return folder


def test_a_branch_packed_references_a_detached_head_and_a_folder_below(clone: Path) -> None:
    commit = git(clone, "rev-parse", "HEAD")[:12]
    assert head_commit(clone) == commit
    git(clone, "pack-refs", "--all")
    assert not list((clone / ".git" / "refs" / "heads").iterdir()) and head_commit(clone) == commit
    git(clone, "checkout", "--quiet", "--detach")
    (clone / "below").mkdir()
    assert head_commit(clone / "below") == commit


def test_a_linked_worktree_and_a_submodule(clone: Path, tmp_path: Path) -> None:
    git(clone, "worktree", "add", "--quiet", "-b", "other/branch", str(tmp_path / "linked"))
    (tmp_path / "linked" / "file").write_text("two")
    git(tmp_path / "linked", "commit", "--quiet", "-am", "two")
    assert head_commit(tmp_path / "linked") == git(clone, "rev-parse", "other/branch")[:12] != head_commit(clone)

    git(tmp_path, "init", "--quiet", "outer")
    git(tmp_path / "outer", "submodule", "--quiet", "add", str(clone), "inner")
    assert (tmp_path / "outer" / "inner" / ".git").is_file()
    assert head_commit(tmp_path / "outer" / "inner") == head_commit(clone)


def test_a_clone_without_a_commit_and_a_folder_without_a_clone(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "empty")
    assert head_commit(tmp_path / "empty") is None
    assert head_commit(Path("/")) is None


@pytest.mark.parametrize(
    "head", ["ref: ../../secret", "ref: refs/../../secret", "ref: /etc/passwd", "", "\xff", "ref: "]
)
def test_a_head_that_leads_elsewhere(tmp_path: Path, head: str) -> None:
    (tmp_path / "secret").write_text("a" * 40)
    (tmp_path / "clone" / ".git" / "refs").mkdir(parents=True)
    (tmp_path / "clone" / ".git" / "HEAD").write_text(head)
    assert head_commit(tmp_path / "clone") is None


def test_a_pipe_in_place_of_a_file_does_not_block(clone: Path) -> None:
    (clone / ".git" / "HEAD").unlink()
    os.mkfifo(clone / ".git" / "HEAD")
    assert head_commit(clone) is None


def test_references_that_name_each_other(clone: Path) -> None:
    for name, other in (("one", "two"), ("two", "one")):
        (clone / ".git" / "refs" / "heads" / name).write_text(f"ref: refs/heads/{other}\n")
    (clone / ".git" / "HEAD").write_text("ref: refs/heads/one\n")
    assert head_commit(clone) is None
