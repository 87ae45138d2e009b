"""`octavo bench KIND`: commands by name, whose files are imported lazily."""

from __future__ import annotations

from cyclopts import App

from octavo.lab.cli.lazy import add_commands

COMMANDS = {
    "demo": "demo:command",
    "control": "control:command",
    "compare": "compare:command",
    "data-parallel": "data_parallel:command",
    "parity": "parity:command",
    "portability": "portability:command",
    "stress": "stress:command",
    "step": "step:command",
    "host": "host:command",
    "hf": "hf:command",
    "clients": "clients:command",
    "pilot": "pilot:command",
    "gemm": "gemm:command",
    "kernels": "kernels:command",
    "phases": "phases:command",
    "moe": "moe:command",
    "optimizer": "optimizer:command",
    "tiers": "tiers:command",
    "memory": "memory:command",
    "reduce": "reduce:command",
    "distributed": "distributed:command",
    "rank": "distributed:rank",
    "scaling": "scaling:command",
    "faults": "faults:command",
    "finetune": "finetune:command",
    "downstream": "downstream:command",
    "robustness": "campaign:command",
    "tables": "tables:command",
    "pictures": "pictures:command",
    "ages": "ages:command",
}
"""Command -> file and function."""

bench = App(name="bench")
add_commands(bench, "octavo_bench", COMMANDS)
