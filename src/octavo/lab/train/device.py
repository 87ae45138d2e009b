"""The device of a run: its choice, its name, and the garbage collector while steps run on it."""

from __future__ import annotations

import gc
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from octavo.errors import ConfigError

WARM_UP_STEPS = 3
"""Steps after which compilation has usually finished."""


def resolve(name: str) -> torch.device:
    """Return the device called `name`; `auto` is the first CUDA device if there is one, else the CPU.

    Raises:
        ConfigError: unknown name, or the device does not exist.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"run.device: '{name}' is none of auto, cpu, cuda, cuda:INDEX.")
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"run.device: no CUDA device is available to torch {torch.__version__}; use --device cpu.")
    if int(index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"run.device: '{name}' does not exist; CUDA devices: {torch.cuda.device_count()}.")
    return torch.device("cuda", int(index or 0))


def use(name: str) -> torch.device:
    """Return the device called `name`; a GPU becomes the current one, which timers, profilers and CUDA graphs use.

    Raises:
        ConfigError: see `resolve`.
    """
    device = resolve(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def describe(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor and its number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} thread{'s' * (threads > 1)}"


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def gc_frozen(device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step; once steps are warm it hides existing objects from the collector.

    A full collection visits every object. Compilers leave several hundred thousand, so that it takes as long as a GPU
    step, at a different step on each rank, and all other ranks wait. On a CPU nothing is frozen. Objects frozen here
    are unfrozen when the block ends; a collector that was already frozen is left as it is.
    """
    steps, froze = 0, False

    def after_step() -> None:
        nonlocal steps, froze
        steps += 1
        if steps == WARM_UP_STEPS and device.type == "cuda" and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            froze = True

    try:
        yield after_step
    finally:
        if froze:
            gc.unfreeze()
