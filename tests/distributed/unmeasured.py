"""Compile without measuring how long guards take: PyTorch empties the processor's caches for that, 26 ms per graph.

It logs that time and decides nothing by it.
"""

import torch


def latency(*_: object) -> float:
    """Stand for `torch._C._dynamo.guards.profile_guard_manager`."""
    return 0.0


torch._C._dynamo.guards.profile_guard_manager = latency  # type: ignore[attr-defined]  # before torch._dynamo imports it by name
