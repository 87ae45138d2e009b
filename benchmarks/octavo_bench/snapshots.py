"""BF16's share of a block in a file, which the arms of a later session on the same machine continue.

A block of a large size takes longer than some sessions; without this a session that ends in it loses all of it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from octavo_bench.lanes import Snapshot


def save(snapshot: Snapshot, path: Path) -> None:
    """Write a snapshot; the file appears whole or not at all."""
    tensors: dict[str, Tensor] = {"losses": snapshot.losses, "at": snapshot.at}
    tensors |= {f"weight {number}": weight for number, weight in enumerate(snapshot.weights)}
    tensors |= {f"buffer {name}": buffer for name, buffer in snapshot.buffers.items()}
    for number, moments in enumerate(snapshot.moments):
        tensors |= {f"moment {number} {name}": value for name, value in moments.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, partial)
    partial.replace(path)


def load(path: Path, device: torch.device) -> Snapshot:
    """Return the snapshot of a file on a device."""
    weights: dict[int, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    moments: dict[int, dict[str, Tensor]] = {}
    with safe_open(path, "pt", device=str(device)) as file:
        for key in file.keys():  # noqa: SIM118 - no mapping
            kind, _, name = key.partition(" ")
            if kind == "weight":
                weights[int(name)] = file.get_tensor(key)
            elif kind == "buffer":
                buffers[name] = file.get_tensor(key)
            elif kind == "moment":
                number, _, name = name.partition(" ")
                moments.setdefault(int(number), {})[name] = file.get_tensor(key)
        losses, at = file.get_tensor("losses"), file.get_tensor("at")
    in_order = [weights[number] for number in range(len(weights))]
    return Snapshot(in_order, buffers, [moments[number] for number in range(len(weights))], losses, at)
