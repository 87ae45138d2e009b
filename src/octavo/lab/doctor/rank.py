"""One rank of the check of collectives: `python -m octavo.lab.doctor.rank RANK RANKS BACKEND FOLDER`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ELEMENTS = 4099
"""Elements sent from rank to rank. Not a multiple of 16, so that no two parts are equal."""
SUMMED = (torch.float32, torch.bfloat16)
SENT = (*SUMMED, torch.uint8)
"""Dtypes that Octavo sends: gradients, and bytes for codes."""


class CollectiveCase(NamedTuple):
    """One collective: input, result and expected result, all small integers."""

    name: str
    own: Tensor
    result: Tensor
    want: Tensor
    call: Callable[[Tensor, Tensor], object]
    """(result, own)."""


def cases(rank: int, ranks: int, device: torch.device) -> Iterator[CollectiveCase]:
    """Yield every collective in every dtype."""
    all_RE = torch.stack([_numbers(r, ranks, device) for r in range(ranks)])
    own, total, part = all_RE[rank], all_RE.sum(dim=0), slice(ELEMENTS * rank, ELEMENTS * (rank + 1))
    for dtype in SUMMED:
        name, x = str(dtype)[6:], own.to(dtype)
        yield CollectiveCase(f"all_reduce of {name}", x, x.clone(), total.to(dtype), lambda y, x: dist.all_reduce(y))
        yield CollectiveCase(
            f"reduce_scatter of {name}", x, x.new_empty(ELEMENTS), total[part].to(dtype), dist.reduce_scatter_tensor
        )
    for dtype in SENT:
        name, x = str(dtype)[6:], own.to(dtype)
        gathered, exchanged = all_RE.flatten().to(dtype), all_RE[:, part].flatten().to(dtype)
        yield CollectiveCase(
            f"all_gather of {name}", x, torch.empty_like(gathered), gathered, dist.all_gather_into_tensor
        )
        yield CollectiveCase(f"all_to_all of {name}", x, torch.empty_like(exchanged), exchanged, dist.all_to_all_single)
        yield CollectiveCase(
            f"broadcast of {name}", x, x.clone(), all_RE[0].to(dtype), lambda y, x: dist.broadcast(y, 0)
        )


def wrong(rank: int, made: Sequence[CollectiveCase] | Iterator[CollectiveCase]) -> list[str]:
    """Run every collective; return one line per wrong result."""
    errors = []
    for case in made:
        case.call(case.result, case.own)
        if not torch.equal(case.result, case.want):
            share = float((case.result != case.want).float().mean())
            errors.append(f"{case.name}: {100 * share:.3g} % of the elements on rank {rank} are wrong")
    return errors


SENT_BYTES = {"cuda": 2**28, "cpu": 2**22}
"""Bytes that all ranks together gather when the bandwidth is measured."""


def bandwidth(ranks: int, device: torch.device, repeats: int = 5) -> float:
    """Return the bandwidth of an all-gather in GB/s: what each rank receives, (ranks - 1) / ranks of the result.

    It is NCCL's bus bandwidth, comparable with what a link can carry in one direction.
    """
    own = torch.zeros(SENT_BYTES[device.type] // ranks, dtype=torch.uint8, device=device)
    result, seconds = own.new_empty(own.numel() * ranks), []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_gather_into_tensor(result, own)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return own.numel() * (ranks - 1) / statistics.median(seconds[1:]) / 1e9


def _numbers(rank: int, ranks: int, device: torch.device) -> Tensor:
    """Return the input of a rank, (ranks x ELEMENTS,), integers from 0 to 15: sums over 17 ranks are exact in BF16."""
    return (torch.arange(ranks * ELEMENTS, device=device) * 7 + rank * 3) % 16


def main(arguments: Sequence[str]) -> None:
    """Connect, run every collective, and write errors and bandwidth to `FOLDER/RANK.json`."""
    rank, ranks, backend, place = int(arguments[0]), int(arguments[1]), arguments[2], Path(arguments[3])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(backend, f"file://{place}/store", timedelta(seconds=60), ranks, rank)
    errors = wrong(rank, cases(rank, ranks, device))
    found = {"errors": errors, "gb_per_s": bandwidth(ranks, device)}
    (place / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
