"""`octavo bench`: measure, and write result files. Importing a file adds its commands."""

from octavo_bench.cli import accuracy, distributed, faults, memory, optimizer, reduce, scaling, speed, tables, telemetry
from octavo_bench.cli.app import bench

__all__ = [
    "accuracy",
    "bench",
    "distributed",
    "faults",
    "memory",
    "optimizer",
    "reduce",
    "scaling",
    "speed",
    "tables",
    "telemetry",
]
