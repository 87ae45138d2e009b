"""`octavo bench KIND`: the commands by name. A file is imported when its command is called."""

from __future__ import annotations

from cyclopts import App

from octavo.cli.lazy import add_commands

COMMANDS = {
    "clients": "clients:command",
    "compare": "compare:command",
    "data-parallel": "data_parallel:command",
    "demo": "demo:command",
    "distributed": "distributed:command",
    "faults": "faults:command",
    "finetune": "finetune:command",
    "gemm": "gemm:command",
    "hf": "hf:command",
    "host": "host:command",
    "kernels": "kernels:command",
    "localize": "localize:command",
    "memory": "memory:command",
    "moe": "moe:command",
    "optimizer": "optimizer:command",
    "parity": "parity:command",
    "phases": "phases:command",
    "pictures": "pictures:command",
    "pilot": "pilot:command",
    "portability": "portability:command",
    "rank": "distributed:rank",
    "reduce": "reduce:command",
    "robustness": "robustness:command",
    "scaling": "scaling:command",
    "step": "step:command",
    "stress": "stress:command",
    "tables": "tables:command",
    "telemetry": "telemetry:command",
    "tiers": "tiers:command",
}
"""File and function by name."""

bench = App(name="bench")
add_commands(bench, "octavo_bench", COMMANDS)
