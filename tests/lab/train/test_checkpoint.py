from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ranks
import torch
from safetensors import SafetensorError
from states import write_state
from torch import Tensor

from octavo._util.checksums import file_entry
from octavo.errors import CheckpointError, NonFiniteError
from octavo.lab.train import checkpoint
from octavo.lab.train.parallel import Launch, Ranks


def tensors(value: float = 1.0) -> dict[str, dict[str, Tensor]]:
    return {"fp8": {"model.w": torch.full((3, 5), value), "optimizer.w.step": torch.tensor(value)}}


def save(directory: Path, step: int, value: float = 1.0, *, keep: int = 2) -> Path:
    return checkpoint.save(
        directory, step, tensors(value), {"config": {"seed": 1}, "loader": {"samples": 7}}, keep=keep
    )


def test_the_run_of_a_checkpoint_that_is_named_from_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "run" / "checkpoints", 12)
    for folder, name in ((path, "."), (path.parent, "step-000012"), (path.parent, "../checkpoints/step-000012")):
        monkeypatch.chdir(folder)
        assert checkpoint.load(Path(name)).run == tmp_path / "run"


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


def test_the_one_before_is_that_of_the_step_before_not_of_the_name(tmp_path: Path) -> None:
    save(tmp_path, 999_999)
    path = save(tmp_path, 1_000_000)
    (path / "fp8.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"Remove .*step-1000000 to resume from step-999999"):
        checkpoint.load(path)
    (tmp_path / "step-999999/fp8.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read \([^)]*\)\.$"):
        checkpoint.load(tmp_path / "step-999999")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("back_to", "left"), [(12, [5, 10]), (10, [5, 10]), (9, [5]), (5, [5]), (4, [5]), (0, [5])], ids=str
)
def test_a_rollback_removes_later_checkpoints_but_never_the_only_one(
    tmp_path: Path, back_to: int, left: list[int]
) -> None:
    assert not checkpoint.roll_back(tmp_path / "nowhere", back_to)
    for step in (5, 10):
        save(tmp_path, step)
    assert checkpoint.roll_back(tmp_path, back_to) == (back_to < 5)
    assert names(tmp_path) == [checkpoint.name_of(step) for step in left]
    assert checkpoint.load(tmp_path / "step-000005").rolled_back_to == (back_to if back_to < 5 else None)
    assert checkpoint.load(save(tmp_path, 5)).rolled_back_to is None


def test_what_is_saved_stays_and_replaces_checkpoints_of_later_steps(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 10)
    assert checkpoint.load(save(tmp_path, 8, keep=1)).step == 8
    assert names(tmp_path) == ["step-000008"]


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_kill_while_a_checkpoint_of_the_same_step_is_written_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    save(tmp_path, 1, 1.0, keep=1)
    rename, calls = Path.rename, []

    def killed(self: Path, target: Path) -> Path:
        calls.append(self)
        if len(calls) == killed_at:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 1, 2.0, keep=1)
    found = checkpoint.latest(tmp_path)
    assert found is not None and found.name == ("step-000001", ".old-step-000001")[killed_at - 1]
    assert checkpoint.load(found).tensors["fp8"]["model.w"][0, 0] == 1
    assert checkpoint.load(save(tmp_path, 1, 3.0, keep=1)).tensors["fp8"]["model.w"][0, 0] == 3
    assert names(tmp_path) == ["step-000001"]


def test_an_old_checkpoint_counts_like_any_other_until_its_replacement_is_there(tmp_path: Path) -> None:
    save(tmp_path, 1).rename(tmp_path / ".old-step-000001")
    save(tmp_path, 2, keep=3)
    assert [path.name for path in checkpoint.find(tmp_path)] == [".old-step-000001", "step-000002"]
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-000003"]
    (tmp_path / ".old-step-000003").mkdir()
    (tmp_path / ".writing-step-000002").mkdir()
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step-000003", "step-000004"]


def test_a_checkpoint_that_someone_else_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    found = checkpoint.find(tmp_path)
    shutil.rmtree(found[0])
    monkeypatch.setattr(checkpoint, "find", lambda _: found)
    checkpoint.roll_back(tmp_path, 0)
    checkpoint._remove(found[0])
    assert names(tmp_path) == []


@pytest.mark.parametrize("prune", [lambda path: save(path, 3, keep=1), lambda path: checkpoint.roll_back(path, 1)])
def test_a_kill_while_checkpoints_are_removed_leaves_no_partial_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prune: Callable[[Path], object]
) -> None:
    for step in (1, 2):
        save(tmp_path, step)

    def half(path: Path, **_: Any) -> None:
        if path.is_dir():
            (path / "state.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("octavo._util.files.shutil.rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path)
    assert all(checkpoint.load(path) for path in checkpoint.find(tmp_path))


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
    with pytest.raises(CheckpointError, match=f"{name}: (truncated|malformed json)"):
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
    with pytest.raises(CheckpointError, match=r"state\.json: (malformed json|damaged|must be UTF-8|expected a table)"):
        checkpoint.load(path)


def rewritten(path: Path, **changes: Any) -> None:
    """Change values of state.json, and write its checksum anew."""
    write_state(path, {**json.loads((path / "state.json").read_text(encoding="utf-8")), **changes})


@pytest.mark.parametrize("step", [-3, True, 18.7, float("nan"), "5", None, [1]])
def test_a_step_that_is_none_is_refused(tmp_path: Path, step: Any) -> None:
    path = save(tmp_path, 1)
    rewritten(path, step=step)
    with pytest.raises(CheckpointError, match=r"state\.json: damaged .*is no number of steps"):
        checkpoint.load(path)


def test_a_state_without_its_checksum_is_refused_unless_it_is_of_the_first_format(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    del state["sha256"]
    (path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"state\.json: damaged: its SHA-256 is missing"):
        checkpoint.load(path)
    sizes = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    (path / "state.json").write_text(json.dumps({**state, "format": 1, "files": sizes}), encoding="utf-8")
    assert checkpoint.load(path).step == 1


@pytest.mark.parametrize("step", [5, 6, 99, -5, True, 2.5, float("nan"), None])
@pytest.mark.parametrize("is_signed", [False, True])
def test_a_rollback_to_no_earlier_step_is_refused(tmp_path: Path, step: Any, is_signed: bool) -> None:
    path = save(tmp_path, 5)
    content = {"step": step, "from": 5}
    signed = {**content, "sha256": checkpoint._digest(content)} if is_signed else {"step": step}
    (path / "rolled-back.json").write_text(json.dumps(signed))
    with pytest.raises(CheckpointError, match=r"rolled-back\.json: damaged .*is no number of steps below 5"):
        checkpoint.load(path)


def test_a_rollback_to_another_step_than_was_written_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    checkpoint.roll_back(tmp_path, 2)
    file = path / "rolled-back.json"
    file.write_text(file.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(CheckpointError, match=r"rolled-back\.json: damaged: its content is not that of its SHA-256"):
        checkpoint.load(path)
    file.write_text('{"step": 2}\n')  # as earlier versions wrote it
    assert checkpoint.load(path).rolled_back_to == 2


@pytest.mark.parametrize("name", ["state.json", "rolled-back.json", "fp8.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    path = save(tmp_path, 1)
    (path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read \(a pipe, socket or device"):
        checkpoint.load(path)


def test_state_that_was_changed(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    text = (path / "state.json").read_text(encoding="utf-8")
    (path / "state.json").write_text(text.replace('"step": 1', '"step": 3'), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"state\.json: damaged: its content is not that of its SHA-256"):
        checkpoint.load(path)


def test_a_file_that_may_not_be_read_is_never_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)

    def denied(*_: object) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(CheckpointError, match=r"state\.json: cannot be read \(Permission denied\)\.$"):
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
        patched.setattr(f"octavo.lab.train.{function}", fail)
        with pytest.raises(CheckpointError, match=r"No space left.*last good checkpoint is .*step-000001"):
            save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.load(before).step == 1
    assert checkpoint.load(save(tmp_path, 2)).step == 2


def test_interrupted_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.lab.train.checkpoint.flush", interrupt)
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
    (tmp_path / ".old-step-000001").mkdir()
    (tmp_path / ".old-step-000003").mkdir()
    (tmp_path / "notes").mkdir()
    checkpoint.discard(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (Path("exploded"),)


def test_a_pickled_index_of_an_earlier_version_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, 1)
    (path / "sharded").mkdir()
    index = path / "sharded/.metadata"
    index.write_bytes(pickle.dumps(Bomb()))
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    del state["sha256"]
    sizes = {"fp8.safetensors": state["files"]["fp8.safetensors"]["bytes"], "sharded/.metadata": index.stat().st_size}
    (path / "state.json").write_text(json.dumps({**state, "format": 1, "files": sizes}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"with a pickle as index, which can run code.* convert it once"):
        checkpoint.load(path)
    assert not Path("exploded").exists()


@pytest.mark.parametrize("format", [1, 2])
def test_files_outside_the_checkpoint_are_not_read(tmp_path: Path, format: int) -> None:
    path = save(tmp_path, 1)
    outside = save(tmp_path / "other", 1) / "fp8.safetensors"
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    entry = file_entry(outside) if format == 2 else outside.stat().st_size
    (path / "state.json").write_text(json.dumps({**state, "format": format, "files": {str(outside): entry}}))
    with pytest.raises(CheckpointError, match=r"state.json: .*leads out of the checkpoint"):
        checkpoint.load(path)


FAULTS = [("_begin", 0), ("save_file", 1), ("_finish", 0), ("_remove", 0)]
"""What fails while a checkpoint is written, and the rank on which it does."""


def faulty(rank: int, count: int, folder: str) -> list[str]:
    """Return what a rank says of checkpoints that one of two cannot write, and of one that rank 1 cannot read."""
    own, said = Ranks(launch=Launch(rank, count)), []

    def saved(step: int) -> Path:
        return checkpoint.save(Path(folder), step, tensors(), {"config": {}, "loader": {}}, keep=1, ranks=own)

    saved(0)
    for step, (function, on) in enumerate(FAULTS, start=1):
        error = CheckpointError("no more") if function == "_remove" else OSError(errno.ENOSPC, "No space left")
        with patch.object(checkpoint, function, side_effect=error) if rank == on else nullcontext():
            said.append(ranks.refusal(CheckpointError, lambda step=step: saved(step)))
    last = saved(len(FAULTS) + 1)
    if rank == 1:
        (last / "fp8.rank-1.safetensors").write_bytes(b"")
    own.barrier()
    return [*said, ranks.refusal(CheckpointError, lambda: checkpoint.load(last, ranks=own))]


def test_all_ranks_learn_that_one_cannot_write_or_read(tmp_path: Path) -> None:
    first, second = ranks.run(faulty, 2, str(tmp_path), timeout=60)
    assert first == second
    assert ["No space left" in text for text in first[:-1]] == [True, True, True, False] and first[3] == "no more"
    assert re.search(r"step-000005/fp8\.rank-1\.safetensors: truncated", first[-1])
    assert names(tmp_path) == ["step-000005"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_any_value_that_is_not_finite_is_noticed_and_no_sum_that_overflows(dtype: torch.dtype) -> None:
    largest = torch.full((4, 700), torch.finfo(dtype).max).to(dtype)
    assert checkpoint.first_non_finite({"model.w": largest, "random.cpu": torch.full((1,), torch.nan)}) == ""
    for faults in ([torch.nan], [torch.inf, -torch.inf], [-torch.inf]):
        if dtype == torch.float8_e4m3fn:
            faults = [torch.nan] * len(faults)  # it has no infinities
        broken = torch.zeros(2800)
        broken[7 : 7 + len(faults)] = torch.tensor(faults)
        said = checkpoint.first_non_finite({"model.w": broken.to(dtype).view(4, 700)})
        assert said == f"{len(faults)} of 2800 values of 'model.w' are NaN or infinite"
