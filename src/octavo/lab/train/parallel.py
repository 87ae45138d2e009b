"""The ranks of a run, as torchrun starts them: parts of a batch, collectives, device mesh, heartbeat.

Each rank has its part of every batch. Ranks that share layers (`parallel.tensor`) or form a pipeline
(`parallel.pipeline`) have the same part. Only rank 0 writes and prints. In a run of one process everything here is a
no-op. `octavo.lab.train.sharding` distributes a model over the ranks.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from octavo._util.dist import gather, on_first_rank, together
from octavo.errors import ConfigError
from octavo.lab.train import device as devices
from octavo.lab.train.config import ParallelConfig, RunConfig
from octavo.lab.train.parallel_checks import check_parallel
from octavo.tensor import is_distributed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from octavo.distributed.health.heartbeat import Heartbeat

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launch:
    """The environment of a rank, as set by torchrun or another launcher."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    """Rank within this host."""
    host: str = "0"
    restarts: int = 0
    """Number of times that torchrun has restarted all ranks after a failure."""
    ranks_per_host: int = 1
    """Number of ranks on this host."""

    @classmethod
    def read(cls) -> Launch:
        """Return the launch described by the environment; a single rank if nothing is set."""
        known = os.environ.get
        rank, ranks = known("RANK", "0"), known("WORLD_SIZE", "1")
        return cls(
            rank=int(rank),
            ranks=int(ranks),
            local_rank=int(known("LOCAL_RANK", rank)),
            host=known("GROUP_RANK", "0"),
            restarts=int(known("TORCHELASTIC_RESTART_COUNT", "0")),
            ranks_per_host=int(known("LOCAL_WORLD_SIZE", ranks)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of a run, seen from one of them."""

    launch: Launch = field(default_factory=Launch)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: torch.device | None = None
    """Device of this rank; None in a run of one process."""
    mesh: DeviceMesh | None = None
    heartbeat: Heartbeat | None = None
    store: Store | None = None
    context: DeviceMesh | None = None
    """The ranks that share the tokens of sequences with this one; None if none do."""
    group: dist.ProcessGroup | None = None
    """Process group of `barrier`, `on_first`, `together` and `gather`; None: PyTorch's default."""

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.launch.rank

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self.launch.ranks

    @property
    def parts(self) -> int:
        """Number of parts that a batch is split into; ranks that share layers, stages or sequences share one."""
        return self.count // (self.parallel.tensor * self.parallel.pipeline * self.parallel.context)

    @property
    def part(self) -> int:
        """Index of this rank's part."""
        return self.rank // (self.parallel.tensor * self.parallel.context) % self.parts

    @property
    def pipeline_rank(self) -> int:
        """Rank within the pipeline."""
        return self.rank // (self.count // self.parallel.pipeline)

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """Process group of this rank's pipeline; None without one."""
        return None if self.mesh is None or self.parallel.pipeline == 1 else self.mesh.get_group("pipeline")

    @property
    def is_first(self) -> bool:
        """True on the rank that writes and prints."""
        return self.rank == 0

    def begin_step(self, step: int) -> None:
        """Report to the heartbeat that a step begins, counted from 1."""
        if self.heartbeat is not None:
            self.heartbeat.at(step)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.count > 1:
            dist.barrier(self.group)

    def on_first(self, action: Callable[[], T]) -> T:
        """Return `action()` of rank 0, on all ranks; all raise its error (`octavo._util.dist.together`)."""
        return action() if self.count == 1 else cast(T, on_first_rank(action, self.group))

    def together(self, action: Callable[[], T]) -> T:
        """Return `action()` of this rank; if it raises on any, all raise (`octavo._util.dist.together`)."""
        return action() if self.count == 1 else together(action, self.group)

    def first_per_host(self, key: str, work: Callable[[], T]) -> T:
        """Return `work()`, run by the first rank of each host before the others, to fill a cache; no time limit."""
        if self.store is None:
            return work()
        from octavo.distributed.health.watch import UNHURRIED

        self.begin_step(UNHURRIED)
        store, mine = self.store, f"{key}.{self.launch.host}"
        if self.launch.local_rank != 0:
            _until(lambda: store.check([mine]))
        result = work()
        store.set(mine, "")
        store.add(key, 1)
        _until(lambda: store.add(key, 0) == self.count)
        self.begin_step(0)
        return result

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over the ranks, equal on all of them.

        In a pipeline it is the mean over the ranks of the last stage; the others pass 0.
        """
        if self.count == 1:
            return x
        total = x.clone()
        dist.all_reduce(total)
        return total / (self.count // self.parallel.pipeline)

    def pipeline_norm(self, norm: Tensor) -> Tensor:
        """Return the L2 norm over all stages of a pipeline, given that of this rank's stages."""
        squares = norm.float().square()
        dist.all_reduce(squares, group=self.pipeline_group)
        return squares.sqrt()

    def own_rows(self, rows: int, least: int = 0) -> list[int]:
        """Return the row indices of this rank in a batch.

        The batch is padded with its first rows to at least `least` rows, and to a multiple of the parts.
        """
        each = -(-max(rows, least) // self.parts)
        return [row % rows for row in range(self.part * each, (self.part + 1) * each)]

    def gather_rows(self, values: Tensor, rows: int) -> Tensor:
        """Return values (rows, ...) for all rows of a batch, gathered from the `own_rows` of each rank."""
        if self.count == 1:
            return values[:rows]
        everyone = [torch.empty_like(values) for _ in range(self.count)]
        dist.all_gather(everyone, values.contiguous())
        of_stage = self.count // self.parallel.pipeline
        first = of_stage * self.parallel.last
        each = self.parallel.tensor * self.parallel.context
        return torch.cat(everyone[first : first + of_stage : each])[:rows]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def first_text(self, text: str) -> str:
        """Return the first non-empty text over all ranks, with its rank if several run; all ranks call it."""
        if self.count == 1:
            return text
        return next((f"{said} on rank {rank}" for rank, said in enumerate(self.gather(text)) if said), "")

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on each of them; all ranks call it."""
        return [value] if self.count == 1 else gather(value, self.group)

    @property
    def is_greedy(self) -> bool:
        """True if every rank has all weights, and each optimizer state is whole on one rank."""
        return self.count > 1 and self.parallel.zero == "greedy"


_runs = itertools.count()
"""Counter of runs in this process: the same number on all ranks."""
SINGLE_PROCESS = Ranks()
"""The ranks of a run of one process."""


@contextmanager
def ranks_of(config: RunConfig) -> Iterator[Ranks]:
    """Yield the ranks of a run, connected while the block runs.

    Raises:
        ConfigError: the ranks started do not match `[parallel]`, or the run cannot be split over them.
        SystemExit: another rank has failed and reported why.
    """
    launch = Launch.read()
    device = _device(config.run.device, launch)
    check_parallel(config, launch.ranks, launch.ranks_per_host)
    if launch.ranks == 1:
        yield Ranks(launch=launch)  # torchrun restarts a single process too
        return
    from octavo.distributed.health.heartbeat import Heartbeat

    timeout = config.parallel.timeout
    # Longer than the heartbeat's timeout, so that the heartbeat, which can name the missing rank, fires first.
    patient = timedelta(seconds=2 * timeout + 60)
    common, _, _ = next(rendezvous("env://", timeout=patient))
    # Unique prefix: a process group would read addresses left in the store by an earlier one.
    run = f"octavo/{launch.restarts}/{next(_runs)}"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"{run}/group", common),
        rank=launch.rank,
        world_size=launch.ranks,
        timeout=patient,
    )
    mesh = _mesh(config.parallel, device, launch.ranks)
    context = _context_mesh(config.parallel.context, device, launch.ranks)
    groups = {*mesh.get_all_groups()} | ({dist.group.WORLD} if dist.group.WORLD is not None else set())
    groups |= set() if context is None else {context.get_group()}
    beats, store = (PrefixStore(f"{run}/{part}", _connection(patient)) for part in ("beats", "work"))
    host = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
    with Heartbeat(beats, launch.rank, launch.ranks, timeout=timeout, groups=[*groups], host=host) as heartbeat:
        yield Ranks(
            launch=launch,
            parallel=config.parallel,
            device=device,
            mesh=mesh,
            heartbeat=heartbeat,
            store=store,
            context=context,
        )
        dist.barrier()
    dist.destroy_process_group()  # after an error it could wait for ranks that are gone


def whole(x: Tensor) -> Tensor:
    """Return a DTensor gathered as a whole tensor on each rank, any other tensor unchanged; all ranks call it."""
    result: Tensor = x.full_tensor() if is_distributed(x) else x  # type: ignore[attr-defined]
    return result


def _device(name: str, launch: Launch) -> torch.device:
    if launch.ranks == 1:
        return devices.resolve(name)
    if ":" in name:
        raise ConfigError(f"run.device: '{name}' is one device, but {launch.ranks} ranks were started. Use 'cuda'.")
    device = devices.resolve(name)
    return device if device.type == "cpu" else devices.use(f"cuda:{launch.local_rank}")


def _mesh(parallel: ParallelConfig, device: torch.device, ranks: int) -> DeviceMesh:
    """Return the mesh of a run: `shard`, and each other dimension of more than one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {name: size for name, size in parallel.sizes(ranks).items() if size > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _context_mesh(size: int, device: torch.device, ranks: int) -> DeviceMesh | None:
    """Return the mesh of the neighbours that share sequences with this rank; None if none do."""
    if size == 1:
        return None
    from torch.distributed.device_mesh import DeviceMesh

    neighbours = [list(range(first, first + size)) for first in range(0, ranks, size)]
    group, _ = dist.new_subgroups_by_enumeration(neighbours)
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("context",))


def _connection(timeout: timedelta) -> Store:
    """Return another connection to torchrun's rendezvous store, or that of rank 0."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Store = dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return store


def _until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.05)
