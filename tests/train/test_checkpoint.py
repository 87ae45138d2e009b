from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from octavo.errors import CheckpointError, NonFiniteError
from octavo.train import checkpoint


def tensors(value: float = 1.0) -> dict[str, dict[str, Tensor]]:
    return {"fp8": {"model.w": torch.full((3, 5), value), "optimizer.w.step": torch.tensor(value)}}


def save(directory: Path, step: int, value: float = 1.0, *, keep: int = 2) -> Path:
    return checkpoint.save(
        directory, step, tensors(value), {"config": {"seed": 1}, "loader": {"samples": 7}}, keep=keep
    )


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    loaded = checkpoint.load(save(tmp_path, 12, 0.1))
    assert loaded.step == 12
    assert loaded.state["config"] == {"seed": 1}
    assert loaded.state["loader"] == {"samples": 7}
    for name, tensor in tensors(0.1)["fp8"].items():
        assert torch.equal(loaded.tensors["fp8"][name], tensor)


def test_the_newest_are_kept_in_the_order_of_steps_not_of_names(tmp_path: Path) -> None:
    for step in (999_998, 999_999, 1_000_000):
        save(tmp_path, step)
    assert [p.name for p in checkpoint.find(tmp_path)] == ["step-999999", "step-1000000"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1000000"


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("missing", ["fp8.safetensors", "state.json"])
def test_missing_file_is_named_and_the_one_before_offered(tmp_path: Path, missing: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (path / missing).unlink()
    with pytest.raises(CheckpointError, match=rf"step-000002/{missing}: cannot be read .*resume from step-000001"):
        checkpoint.load(path)


@pytest.mark.parametrize("name", ["fp8.safetensors", "state.json"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated_file_is_named(tmp_path: Path, name: str, share: float) -> None:
    path = save(tmp_path, 1)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=f"{name}: truncated"):
        checkpoint.load(path)


def test_malformed_tensors_of_the_right_size(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    file = path / "fp8.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(CheckpointError, match="damaged: its SHA-256"):
        checkpoint.load(path)


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"format": 1, "step": 1, "config": {}, "files": 3}', b"\xff\xfe"])
def test_state_that_is_none(tmp_path: Path, content: bytes) -> None:
    path = save(tmp_path, 1)
    (path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state.json: truncated or malformed"):
        checkpoint.load(path)


def test_format_of_another_version(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    (path / "state.json").write_text(json.dumps({**state, "format": 99}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="checkpoint format 99"):
        checkpoint.load(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    broken = tensors()
    broken["fp8"]["model.w"][1, 2] = value
    path = checkpoint.save(tmp_path, 1, broken, {"config": {}}, keep=1)
    with pytest.raises(NonFiniteError, match=r"1 of 15 values of 'model\.w'"):
        checkpoint.load(path)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
# The words of safetensors 0.8.0 on a full disk.
FULL_INSIDE = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("checkpoint.save_file", FULL_INSIDE),
        ("checkpoint.flush", FULL),
        ("checkpoint.Path.write_text", FULL),
    ],
)
def test_no_space_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: Exception) -> None:
    before = save(tmp_path, 1)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(f"octavo.train.{function}", fail)
        with pytest.raises(CheckpointError, match=r"No space left.*last good checkpoint is .*step-000001"):
            save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.load(before).step == 1
    assert checkpoint.load(save(tmp_path, 2)).step == 2


def test_interrupted_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.train.checkpoint.flush", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_killed_process_are_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".writing-step-000001").mkdir()
    (tmp_path / ".writing-step-000001" / "fp8.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.load(save(tmp_path, 1)).step == 1


def test_discard_removes_all_of_it_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / ".writing-step-000002").mkdir()
    (tmp_path / "notes").mkdir()
    checkpoint.discard(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]
