from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import synthetic_run

from octavo.monitor.export import export
from octavo.monitor.store import RunReader, RunWriter
from octavo.monitor.tensorboard import _float32, crc32c


def records(path: Path) -> Iterator[bytes]:
    """Yield the payloads of a TFRecord file, by its definition; every check sum holds."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        (check,) = struct.unpack_from("<I", content, at + 8)
        assert unmask(check) == crc32c(content[at : at + 8])
        payload = content[at + 12 : at + 12 + length]
        (check,) = struct.unpack_from("<I", content, at + 12 + length)
        assert unmask(check) == crc32c(payload)
        yield payload
        at += 16 + length


def unmask(value: int) -> int:
    rotated = (value - 0xA282EAD8) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def fields(message: bytes) -> dict[int, list[Any]]:
    """Return a protocol buffer by the wire format: field number -> values."""
    found: dict[int, list[Any]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            value: Any = varint()
        elif kind == 2:
            size = varint()
            value, at = message[at : at + size], at + size
        else:
            size = {1: 8, 5: 4}[kind]
            (value,) = struct.unpack_from({1: "<d", 5: "<f"}[kind], message, at)
            at += size
        found.setdefault(tag >> 3, []).append(value)
    return found


def read(path: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Return (step, wall clock, value) by tag."""
    series: dict[str, list[tuple[int, float, float]]] = {}
    for payload in records(path):
        event = fields(payload)
        for summary in event.get(5, []):
            for value in fields(summary)[1]:
                tag, number = fields(value)[1][0].decode(), fields(value)[2][0]
                series.setdefault(tag, []).append((event[2][0], event[1][0], number))
    return series


def test_the_check_sum() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def test_scalars_and_aggregates_are_read_back(tmp_path: Path) -> None:
    synthetic_run(tmp_path / "run", layers=3, steps=300, telemetry_every=50, spike_at=0)
    (path,) = export(tmp_path / "run", "tensorboard", tmp_path / "logs")
    assert ".tfevents." in path.name
    assert fields(next(records(path)))[3] == [b"brain.Event:2"]
    series, run = read(path), RunReader(tmp_path / "run")
    for key in ("loss_fp8", "gap_percent"):
        expected = run.scalar(key)
        assert [step for step, _, _ in series[key]] == expected.first.tolist()
        assert [value for _, _, value in series[key]] == pytest.approx(expected.low.tolist(), rel=1e-6)
    assert [(step, wall) for step, wall, _ in series["fp8/flushed_max"]] == [
        (step, pytest.approx(1.7e9 + 0.1 * step)) for step in range(50, 301, 50)
    ]
    assert "time" not in series and len(series) <= 12 + 9


def test_large_steps_and_values(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as run:
        run.write_step(2**40, {"loss": 1e300, "gap": float("-inf")}, t=1.0)
    (path,) = export(tmp_path, "tensorboard", tmp_path)
    assert read(path) == {"loss": [(2**40, 1.0, float("inf"))], "gap": [(2**40, 1.0, float("-inf"))]}
    assert _float32(-1e300) == float("-inf") and _float32(1.5) == 1.5


def test_tensorboard_itself_reads_it(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    synthetic_run(tmp_path / "run", layers=1, steps=20)
    (path,) = export(tmp_path / "run", "tensorboard", tmp_path / "logs")
    found = accumulators.EventAccumulator(str(path.parent))
    found.Reload()
    assert len(found.Scalars("loss_fp8")) == 20 and "fp8/amax_max" in found.Tags()["scalars"]
