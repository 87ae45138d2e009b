"""The range of a format is that of its definition."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic import synthetic_run

from octavo.lab.monitor.dashboard import answers
from octavo.lab.monitor.dashboard.answers import ANSWERS, RANGES, answer, format_range, outside
from octavo.lab.monitor.dashboard.runs import runs_below
from octavo.numerics import formats


@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_those_of_the_formats(name: str) -> None:
    fmt = getattr(formats, name.upper())
    assert RANGES[name] == (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal)


@pytest.mark.parametrize(("name", "dtype"), [("E4M3 row", torch.float8_e4m3fn), ("e5m2 tensor", torch.float8_e5m2)])
def test_edges_are_where_codes_change(name: str, dtype: torch.dtype) -> None:
    held = format_range(name)
    assert held is not None

    def coded(exponent: float) -> float:
        return float(torch.tensor(2.0**exponent).to(dtype).float())

    assert coded(held["lowest"] + 0.01) > 0 and coded(held["lowest"] - 0.01) == 0
    assert coded(held["highest"]) == pytest.approx(RANGES[held["format"]][0])
    below = coded(held["normal"] + math.log2(0.76))  # a subnormal code: spaced as the smallest one
    assert below % RANGES[held["format"]][2] == 0


@pytest.mark.parametrize("operand", ["bf16", ""])
def test_nothing_is_claimed_of_what_is_not_known(operand: str) -> None:
    assert format_range(operand) is None


def test_shares_outside_are_of_whole_bins() -> None:
    held = format_range("e4m3")  # from 2^-10 to 2^8.8
    assert held is not None
    counts = np.array([4, 2, 1, 3], dtype=np.uint32)
    assert outside(counts, -12, held) == (0.6, 0.0)
    assert outside(counts, 7, held) == (0.0, 0.4)
    assert outside(np.zeros(3, dtype=np.uint32), 0, held) == (0.0, 0.0)


def test_a_poll_of_a_run_four_times_as_long_takes_no_more_memory(tmp_path: Path) -> None:
    query = {"run": ["."], "layer": ["layers.0.attention.wo"], "stat": ["flushed"], "role": ["input"]}
    peaks = []
    for steps in (3_000, 12_000):
        synthetic_run(tmp_path / str(steps), layers=7, steps=steps, telemetry_every=8)
        known = runs_below(tmp_path / str(steps))
        tracemalloc.start()
        for poll in range(2):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            for name in ANSWERS:
                answer(known, name, query)
            kept, peak = (bytes_ - before for bytes_ in tracemalloc.get_traced_memory())
            assert poll == 0 or kept < 400_000
        tracemalloc.stop()
        known.close()
        peaks.append(peak)
    assert peaks[1] < 1.3 * peaks[0] < 4e6  # points that are drawn, not steps


def test_samples_are_whole_lines_and_damaged_ones_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic_run(tmp_path / "run", layers=7, steps=60)
    known, path = runs_below(tmp_path), tmp_path / "run" / "samples.jsonl"
    lines = [{"step": step, "prompt": "a", "text": {"fp8": "b" * 50}} for step in range(9)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 9')
    assert answer(known, "samples", {"run": ["run"]}) == {"samples": lines, "more": False, "damaged": 0}
    monkeypatch.setattr(answers, "SAMPLES_BYTES", 300)
    assert answer(known, "samples", {"run": ["run"]}) == {"samples": lines[-2:], "more": True, "damaged": 0}
    path.write_text(f'{{"step": 1, "pr\n{json.dumps(lines[0])}\n{{}}\n')
    assert answer(known, "samples", {"run": ["run"]}) == {"samples": lines[:1], "more": False, "damaged": 2}
    path.unlink()
    assert answer(known, "samples", {"run": ["run"]}) == {"samples": [], "more": False, "damaged": 0}
    known.close()


def test_a_console_is_a_file_of_the_run_itself(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "run", layers=7, steps=60)
    known, path = runs_below(tmp_path), tmp_path / "run" / "console.log"
    assert answer(known, "console", {"run": ["run"]}) == {"text": None, "before": 0}
    path.write_bytes(b"x\xff\n")
    assert answer(known, "console", {"run": ["run"]}) == {"text": "x\ufffd\n", "before": 0}
    path.rename(tmp_path / "secret")
    path.symlink_to(tmp_path / "secret")
    assert answer(known, "console", {"run": ["run"]}) == {"text": None, "before": 0}
    known.close()
