"""Checkpoints written in the background: the same files, one at a time, and errors that end the run."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import ranks
import torch
from reporters import Listener
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from octavo.errors import CheckpointError, Interrupted, RunError
from octavo.lab.train import checkpoint, train
from octavo.lab.train.background import BackgroundWriter
from octavo.lab.train.config import RunConfig
from octavo.lab.train.events import Logged, Saved
from octavo.lab.train.parallel import SINGLE_PROCESS, Launch, Ranks

Configure = Callable[..., RunConfig]
PLAIN: dict[str, Any] = {"config": {"seed": 1}, "loader": {"samples": 7}}


def tensors(value: float = 1.0) -> dict[str, dict[str, Tensor]]:
    return {"fp8": {"model.w": torch.full((3, 5), value), "optimizer.w.step": torch.tensor(value)}}


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def in_background(configure: Configure, name: str = "run", **run: Any) -> RunConfig:
    every = {"steps": 4, "checkpoint_every": 1, "checkpoint_write": "background", "baseline": False}
    config = configure(run={**every, **run})
    return config.with_run(out=config.run.out.with_name(name))


def test_files_are_those_of_a_checkpoint_that_is_waited_for(tmp_path: Path) -> None:
    writer = BackgroundWriter(SINGLE_PROCESS)
    writer.save(tmp_path / "background", 3, tensors(), PLAIN, 1)
    written = writer.wait()
    expected = checkpoint.save(tmp_path / "waited", 3, tensors(), PLAIN, keep=1)
    assert written == (3, tmp_path / "background" / expected.name)
    assert files(written.path) == files(expected)
    assert writer.wait() is None and writer.ended() is None


def test_what_changes_after_the_copy_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args, **options: may_write.wait() and save(*args, **options))
    writer = BackgroundWriter(SINGLE_PROCESS)
    named, plain = tensors(1.0), {**PLAIN, "guard": {"losses": [1.0]}}
    writer.save(tmp_path, 1, named, plain, 1)
    named["fp8"]["model.w"].fill_(2.0)
    plain["guard"]["losses"].append(2.0)
    assert writer.ended() is None  # nothing has waited for it
    with pytest.raises(RuntimeError, match="a checkpoint of step 1 is still being written"):
        writer.save(tmp_path, 2, named, plain, 1)
    may_write.set()
    writer.wait()
    found = checkpoint.load(tmp_path / "step-000001")
    assert torch.equal(found.tensors["fp8"]["model.w"], torch.full((3, 5), 1.0))
    assert found.state["guard"] == {"losses": [1.0]}


def test_the_memory_of_the_copy_is_kept_where_it_fits(tmp_path: Path) -> None:
    writer = BackgroundWriter(SINGLE_PROCESS)
    seen = []
    for step, change in enumerate(({}, {}, {"model.w": torch.full((2, 2), 3.0)}), start=1):
        writer.save(tmp_path, step, {"fp8": tensors(float(step))["fp8"] | change}, PLAIN, 5)
        writer.wait()
        seen.append(writer._copies["fp8"]["model.w"].data_ptr())
        assert len(checkpoint.find(tmp_path)) == step
    assert seen[0] == seen[1] != seen[2]
    found = [checkpoint.load(path).tensors["fp8"]["model.w"] for path in checkpoint.find(tmp_path)]
    assert [float(x[0, 0]) for x in found] == [1.0, 2.0, 3.0] and found[2].shape == (2, 2)


def test_an_error_is_raised_when_its_end_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = BackgroundWriter(SINGLE_PROCESS)
    writer.save(tmp_path, 1, tensors(), PLAIN, 1)
    writer.wait()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with patch.object(checkpoint, "_finish", side_effect=full):
        writer.save(tmp_path, 2, tensors(), PLAIN, 1)
        with pytest.raises(CheckpointError, match=r"step-000002: cannot be written \(No space left"):
            writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    writer.save(tmp_path, 2, tensors(), PLAIN, 1)
    writer.close(60)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_run_has_the_checkpoints_and_bits_of_one_that_waits(configure: Configure) -> None:
    waited, beside = (in_background(configure, name, checkpoint_write=name) for name in ("wait", "background"))
    listener = Listener()
    train(waited)
    train(beside, reporters=[listener])
    assert [saved.step for saved in listener.of(Saved)] == [1, 2, 3, 4]
    paths = [checkpoint.find(config.run.out / "checkpoints") for config in (waited, beside)]
    assert [path.name for path in paths[0]] == [path.name for path in paths[1]] == ["step-000003", "step-000004"]
    for one, other in zip(*paths, strict=True):
        found = [
            {name: content for name, content in files(path).items() if name != "state.json"} for path in (one, other)
        ]
        assert found[0] == found[1]
    listener = Listener()
    train(in_background(configure, "background", steps=5, checkpoint_write="wait"), reporters=[listener], resume=True)
    assert [event.step for event in listener.of(Logged)] == [5]  # how it is written may change


def test_an_error_ends_the_run_in_the_next_step(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    config, finish = in_background(configure, steps=50, log_every=1), checkpoint._finish

    def fails(temporary: Path, final: Path, state: Any) -> None:
        if final.name == "step-000002":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finish(temporary, final, state)

    monkeypatch.setattr(checkpoint, "_finish", fails)
    listener = Listener()
    with pytest.raises(CheckpointError, match=r"step-000002: cannot be written .*good checkpoint is .*step-000001"):
        train(config, reporters=[listener])
    assert listener.of(Logged)[-1].step in (2, 3)  # the next checkpoint, of step 3, waits for it
    assert [path.name for path in (config.run.out / "checkpoints").iterdir()] == ["step-000001"]


def test_a_run_that_is_stopped_or_fails_completes_what_is_being_written(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = checkpoint._finish
    monkeypatch.setattr(checkpoint, "_finish", lambda *args: time.sleep(0.2) or finish(*args))
    stopped = in_background(configure, "stopped", steps=50, checkpoint_every=0, log_every=1)
    with pytest.raises(Interrupted):
        train(stopped, reporters=[Listener(Logged, lambda: os.kill(os.getpid(), signal.SIGTERM), step=2)])
    assert len(checkpoint.find(stopped.run.out / "checkpoints")) == 1
    failed = in_background(configure, "failed", steps=50, checkpoint_every=2, log_every=1)
    with pytest.raises(ZeroDivisionError):
        train(failed, reporters=[Listener(Logged, lambda: 1 / 0, step=3)])
    assert [path.name for path in (failed.run.out / "checkpoints").iterdir()] == ["step-000002"]


def test_a_directory_that_was_removed_meanwhile_is_rescued(configure: Configure) -> None:
    config = in_background(configure, steps=50, log_every=1)

    def move() -> None:
        config.run.out.rename(config.run.out.with_name("moved"))

    with pytest.raises(RunError, match="was removed or renamed"):
        train(config, reporters=[Listener(Logged, move, step=2)])


def written(rank: int, count: int, folder: str) -> dict[str, list[str]]:
    """Return what a rank says of three checkpoints with a sharded tensor, by what fails on rank 1 in the second."""
    own = Ranks(launch=Launch(rank, count))
    sharded = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (count,)), [Shard(0)])
    said: dict[str, list[str]] = {"": [], "save_file": []}
    for fails in said:
        writer = BackgroundWriter(own)
        for step in (1, 2, 3):
            error = OSError(errno.ENOSPC, "No space left")
            is_faulty = step == 2 and rank == 1 and fails
            with patch.object(checkpoint, fails, side_effect=error) if is_faulty else nullcontext():
                named = {"fp8": {**tensors(float(rank))["fp8"], "model.sharded": sharded * step}}
                writer.save(Path(folder, fails), step, named, PLAIN, 5)
                while (found := _asked(writer)) is None:
                    time.sleep(0.01)
            said[fails].append(found)
            own.barrier()
    return said


def _asked(writer: BackgroundWriter) -> str | None:
    try:
        ended = writer.ended()
    except CheckpointError as error:
        return str(error)
    return None if ended is None else ended.path.name


def test_all_ranks_learn_of_the_end_in_the_same_step(tmp_path: Path) -> None:
    first, second = ranks.run(written, 2, str(tmp_path), timeout=120)
    assert first == second
    assert first[""] == ["step-000001", "step-000002", "step-000003"]
    assert first["save_file"][::2] == ["step-000001", "step-000003"] and "No space left" in first["save_file"][1]
    for fails, kept in (("", [1, 2, 3]), ("save_file", [1, 3])):
        paths = checkpoint.find(tmp_path / fails)
        assert [path.name for path in paths] == [checkpoint.name_of(step) for step in kept]
        for step, path in zip(kept, paths, strict=True):
            assert checkpoint.load(path).tensors["fp8"]["model.sharded"].tolist() == [0.0, step, 2.0 * step, 3.0 * step]
