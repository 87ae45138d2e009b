"""A run that is killed at any moment keeps every step it had committed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 50

PROGRAM = """
import os, random, signal, sqlite3, sys, time
from pathlib import Path
import numpy as np
from octavo.lab.monitor.store import STATS, RunReader, RunWriter, TensorRow

def snapshot(step):
    return np.arange(60 * len(STATS), dtype=np.float32).reshape(60, -1) * step

def write(path, done, told):
    run = RunWriter(path, keep_until=done)
    run.set_tensors([TensorRow(f"layer.{i}", "input") for i in range(60)])
    for step in range(done + 1, 10**9):
        run.write_step(step, {"loss": 1 / step, "twice": 2 * step}, snapshot(step))
        os.write(told, step.to_bytes(4, "big"))

def kill(path, done, delay):
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(reads)
        write(path, done, writes)
    os.close(writes)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = b""
    while part := os.read(reads, 2**20):
        told += part
    os.close(reads)
    return int.from_bytes(told[-4:], "big") if told else done

def check(path, committed):
    if not committed and not path.exists():
        return 0
    try:
        reader = RunReader(path)
    except Exception as error:
        assert not committed and "contains no run yet" in str(error), error
        return 0
    last = reader.last_step
    assert last >= committed, (last, committed)
    expected = list(range(1, last + 1))
    assert reader.snapshot_steps().tolist() == expected
    for key in ("loss", "twice", "time"):
        assert reader.scalar(key).first.tolist() == expected
    for step in {1, max(last // 2, 1), last} if last else ():
        assert np.array_equal(reader.snapshot(step)[1], snapshot(step)), step
    assert reader.heatmap("amax", "input", buckets=1).values.max(initial=0) == 59 * len(STATS) * last
    assert reader._all("PRAGMA integrity_check") == [("ok",)]
    reader.close()
    return last

random.seed(int(sys.argv[3]) if len(sys.argv) > 3 else 7)
steps = 0
for file in range(5):
    path, done = Path(sys.argv[1]) / f"{file}.sqlite", 0
    for _ in range(int(sys.argv[2]) // 5):
        done = check(path, kill(path, done, random.uniform(0.0, 0.06)))
    steps += done
print(steps)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_kill_nine_at_fifty_random_moments(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > KILLS  # they were killed while they wrote, not before
