"""TensorBoard event files: the scalars of a run, and aggregates of its telemetry.

PyTorch's writer needs the large package tensorboard, while the format is small. A file is a sequence of TFRecords
`length, its CRC, payload, its CRC`; the payload is a protocol buffer `Event`:

    Event   1: wall_time (double)  2: step (int64)  3: file_version (string)  5: summary (Summary)
    Summary 1: value (Value, repeated)      Value 1: tag (string)  2: simple_value (float)

There is no series per tensor: TensorBoard becomes slow with thousands. The CRC is CRC-32C (RFC 3720, appendix B.4),
rotated right by 15 bits plus 0xA282EAD8.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from octavo.monitor.store import RunReader
from octavo.monitor.trackers import aggregates

_POLYNOMIAL = 0x82F63B78


def write_tensorboard(run: RunReader, folder: Path) -> list[Path]:
    """Write one event file into `folder`; open it with `tensorboard --logdir`."""
    path = folder / f"events.out.tfevents.{_start(run):.0f}.octavo"
    with path.open("wb") as file:
        file.write(_record(_event(_start(run), 0, version="brain.Event:2")))
        for step, wall, values in _steps(run):
            file.write(_record(_event(wall, step, values)))
    return [path]


def _start(run: RunReader) -> float:
    sessions = run.sessions
    return sessions[0].started if sessions else 0.0


def _steps(run: RunReader) -> Iterator[tuple[int, float, Mapping[str, float]]]:
    """Yield (step, wall clock, values): the scalars first, then the aggregates."""
    by_step: dict[int, dict[str, float]] = {}
    for key, series in run.scalars().items():
        for step, value in zip(series.first.tolist(), series.low.tolist(), strict=True):
            by_step.setdefault(step, {})[key] = value
    start, times = _start(run), {step: values.pop("time", 0.0) for step, values in by_step.items()}
    for step, values in sorted(by_step.items()):
        yield step, times[step] or start, values
    for steps, matrices in run.snapshots():
        for step, values_of_step in zip(steps.tolist(), matrices, strict=True):
            yield step, times.get(step) or start, aggregates(values_of_step, run.stats)


def _event(wall: float, step: int, values: Mapping[str, float] | None = None, *, version: str = "") -> bytes:
    parts = [b"\x09" + struct.pack("<d", wall), b"\x10" + _varint(step)]
    if version:
        parts.append(_field(3, version.encode()))
    if values:
        parts.append(_field(5, b"".join(_field(1, _value(tag, value)) for tag, value in values.items())))
    return b"".join(parts)


def _value(tag: str, value: float) -> bytes:
    return _field(1, tag.encode()) + b"\x15" + struct.pack("<f", _float32(value))


def _float32(value: float) -> float:
    """Round to the range of FP32: larger values become infinite."""
    return value if abs(value) <= 3.4028234663852886e38 or value != value else float("inf") * (1 if value > 0 else -1)


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def _record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + _masked(length) + payload + _masked(payload)


def _masked(content: bytes) -> bytes:
    crc = crc32c(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(content: bytes) -> int:
    """Return the CRC-32C of bytes."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _table() -> list[int]:
    table = list(range(256))
    for _ in range(8):
        table = [value >> 1 ^ (_POLYNOMIAL if value & 1 else 0) for value in table]
    return table


_TABLE = _table()
