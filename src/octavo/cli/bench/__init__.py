"""`octavo bench`: measure, and write result files. Importing a file adds its commands."""

from octavo.cli.bench import accuracy, distributed, faults, memory, optimizer, reduce, scaling, speed, telemetry
from octavo.cli.bench.app import bench

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
    "telemetry",
]
