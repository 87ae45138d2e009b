from __future__ import annotations

from octavo_bench.distributed import KIND
from octavo_bench.render import Row

OF_ALL = {
    "workload": "8b",
    "layout": "data",
    "ranks": 4,
    "shape": {"layers": 32, "dim": 4096, "vocab": 128256, "sequence": 8192},
    "compiled": True,
}


def measured(name: str, speed: float, ratio: float, gib: float, wire: int, loss: float, **more: object) -> Row:
    row = {"implementation": name, "tokens_per_s_per_gpu": speed, "ratio_to_bf16": ratio, "peak_gib": gib}
    return OF_ALL | row | {"wire_bytes": wire, "losses": [5.0, loss]} | more


def test_a_line_an_implementation_beside_bf16_of_its_run() -> None:
    rows = [
        measured("bf16", 10000.4, 1, 60.0, 46_600_000_000, 4.0, waited_ms=800.0),
        measured("octavo", 15000.0, 1.5, 33.0, 17_242_000_000, 4.00004, waited_ms=600.0),
        OF_ALL | {"implementation": "other", "error": "OutOfMemoryError: full"},
        measured("bf16", 9999.0, 1, 60.0, 20_000_000_000, 4.0, waited_ms=900.0),
        measured("octavo", 15000.0, 1.5, 30.0, 10_000_000_000, 4.0, waited_ms=600.0),
        measured("bf16", 9000.0, 1, 60.0, 1, 4.1, layout="tensor 2"),
    ]
    title, _, *lines = KIND.markdown(rows).splitlines()
    assert title.startswith("**8b**, 32 layers") and "4 GPUs" in title and "compiled" in title
    assert lines[2:] == [
        "| data | bf16 | 10,000 | 1.00 | 1.00 | 60.0 | 46.6 |  |  | 4.0000 |",
        "| data | octavo | 15,000 | 1.50 | 1.33 | 33.0 | 17.2 | -45 % | -63 % | 4.0000 |",
        "| data | other | failed: OutOfMemoryError: full |  |  |  |  |  |  |  |",
        "| data | bf16 | 9,999 | 1.00 | 1.00 | 60.0 | 20.0 |  |  | 4.0000 |",
        "| data | octavo | 15,000 | 1.50 | 1.50 | 30.0 | 10.0 | -50 % | -50 % | 4.0000 |",
        "| tensor 2 | bf16 | 9,000 | 1.00 |  | 60.0 | 0.0 |  |  | 4.1000 |",
    ]
