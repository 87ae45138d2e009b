from __future__ import annotations

from collections.abc import Callable

from octavo.bench.results import Result
from octavo.bench.tables.distributed import distributed

MakeResult = Callable[..., Result]


def test_a_line_an_implementation_beside_the_first(result: MakeResult) -> None:
    keys = ("workload", "implementation", "tokens_per_s_per_gpu", "ratio_to_bf16", "peak_gib", "wire_bytes")
    rows = [
        dict(zip(keys, ("8b", "bf16", 10000.4, 1, 60.0, 46_600_000_000), strict=True)),
        dict(zip(keys, ("8b", "octavo", 15000.0, 1.5, 33.0, 17_242_000_000), strict=True)),
        {"workload": "8b", "implementation": "other", "error": "OutOfMemoryError: full"},
    ]
    lines = distributed(result("distributed", *rows)).splitlines()
    assert lines[2:] == [
        "| 8b | bf16 | 10,000 | 1.00 | 60.0 | 46.6 |  |  |",
        "| 8b | octavo | 15,000 | 1.50 | 33.0 | 17.2 | -45 % | -63 % |",
        "| 8b | other | failed: OutOfMemoryError: full |  |  |  |  |  |",
    ]
