"""`octavo bench KIND`: commands by name, whose files are imported lazily."""

from __future__ import annotations

from cyclopts import App

from octavo.lab.cli.lazy import add_commands

COMMANDS = {
    "demo": "demo:command",
    "control": "control:command",
    "parity": "parity:command",
    "portability": "portability:command",
    "step": "step:command",
    "host": "host:command",
    "hf": "hf:command",
    "clients": "clients:command",
    "gemm": "gemm:command",
    "kernels": "kernels:command",
    "phases": "phases:command",
    "moe": "moe:command",
    "optimizer": "optimizer:command",
    "memory": "memory:command",
    "checkpoints": "checkpoints:command",
    "distributed": "distributed:command",
    "scaling": "scaling:command",
    "faults": "faults:command",
    "downstream": "downstream:command",
    "robustness": "campaign:command",
    "tables": "tables:command",
    "pictures": "pictures:command",
    "ages": "ages:command",
}
"""Command -> file and function."""

bench = App(name="bench")
add_commands(bench, "octavo_bench", COMMANDS)
