"""A run on several ranks, as torchrun starts them: who does what, how models are sharded, what ranks tell each other.

Each rank has its part of every batch; where layers are cut (`parallel.tensor`), or blocks are in stages
(`parallel.pipeline`), the ranks that share them have the same part. Weights, gradients and optimizer states are sharded
by FSDP2 (`octavo.distributed`). Rank 0 alone writes and prints. In a run of one process nothing here does anything.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from octavo.errors import ConfigError
from octavo.kernels.uploads import upload
from octavo.tensor import is_distributed
from octavo.train import device as devices
from octavo.train.config import ParallelConfig, RunConfig
from octavo.train.cutting import check_cut
from octavo.train.staging import check_stages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from octavo.distributed import Scheme, ShardPlan, TensorParallelPlan
    from octavo.distributed.health.heartbeat import Heartbeat

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Launch:
    """What torchrun, or who starts ranks in its place, says in the environment."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    """Among those of this host."""
    host: str = "0"
    restarts: int = 0
    """How often torchrun has started all ranks again, after a failure."""
    of_host: int = 1
    """How many ranks are on this host."""

    @classmethod
    def read(cls) -> Launch:
        """Return what the environment says; one rank where it says nothing."""
        known = os.environ.get
        rank, ranks = int(known("RANK", "0")), int(known("WORLD_SIZE", "1"))
        restarts, of_host = int(known("TORCHELASTIC_RESTART_COUNT", "0")), int(known("LOCAL_WORLD_SIZE", str(ranks)))
        return cls(rank, ranks, int(known("LOCAL_RANK", str(rank))), known("GROUP_RANK", "0"), restarts, of_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of a run, as one of them sees them."""

    launch: Launch = field(default_factory=Launch)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    device: torch.device | None = None
    """The device of this rank, where there are several."""
    mesh: DeviceMesh | None = None
    heartbeat: Heartbeat | None = None
    store: Store | None = None

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.launch.rank

    @property
    def count(self) -> int:
        """How many there are."""
        return self.launch.ranks

    @property
    def parts(self) -> int:
        """How many parts a batch is split into: ranks that share layers, or stages of them, have the same one."""
        return self.count // (self.parallel.tensor * self.parallel.pipeline)

    @property
    def part(self) -> int:
        """Which of them is this rank's."""
        return self.rank // self.parallel.tensor % self.parts

    @property
    def place(self) -> int:
        """Which of the ranks of a pipeline this is."""
        return self.rank // (self.count // self.parallel.pipeline)

    @property
    def stages(self) -> dist.ProcessGroup | None:
        """The ranks of this rank's pipeline; None where there is none."""
        return None if self.mesh is None or self.parallel.pipeline == 1 else self.mesh.get_group("pipeline")

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def at(self, step: int) -> None:
        """Say that a step begins, counted from 1."""
        if self.heartbeat is not None:
            self.heartbeat.at(step)

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.count > 1:
            dist.barrier()

    def by_first(self, action: Callable[[], object]) -> None:
        """Let the first rank do something, before any rank goes on."""
        if self.is_first:
            action()
        self.wait()

    def in_turn(self, key: str, work: Callable[[], T]) -> T:
        """Return `work()`. On each host its first rank does it first, however long it takes: it fills a cache."""
        if self.store is None:
            return work()
        from octavo.distributed.health.watch import UNHURRIED

        self.at(UNHURRIED)
        store, mine = self.store, f"{key}.{self.launch.host}"
        if self.launch.local_rank != 0:
            _until(lambda: store.check([mine]))
        result = work()
        store.set(mine, "")
        store.add(key, 1)
        _until(lambda: store.add(key, 0) == self.count)
        self.at(0)
        return result

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of x over the ranks, the same on all of them.

        In a pipeline it is that of the ranks that know x; the others give 0.
        """
        if self.count == 1:
            return x
        total = x.clone()
        dist.all_reduce(total)
        return total / (self.count // self.parallel.pipeline)

    def norm_of_stages(self, norm: Tensor) -> Tensor:
        """Return the L2 norm of what all stages of a pipeline have, from that of this rank's."""
        squares = norm.float().square()
        dist.all_reduce(squares, group=self.stages)
        return squares.sqrt()

    def own_rows(self, rows: int) -> list[int]:
        """Return which of the rows of a batch are this rank's: as many in each part, the first again where too few."""
        each = -(-rows // self.parts)
        return [row % rows for row in range(self.part * each, (self.part + 1) * each)]

    def all_rows(self, values: Tensor, rows: int) -> Tensor:
        """Return a value (rows,) for each row of a batch, from those of `own_rows` on each rank that knows them."""
        if self.count == 1:
            return values
        everyone = [torch.empty_like(values) for _ in range(self.count)]
        dist.all_gather(everyone, values.contiguous())
        of_stage = self.count // self.parallel.pipeline
        first = of_stage * self.parallel.last
        return torch.cat(everyone[first : first + of_stage : self.parallel.tensor])[:rows]

    def same(self, value: T) -> T:
        """Return the first rank's value."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def first_of(self, text: str) -> str:
        """Return the text of the first rank that has any, named where it is another rank's; all ranks call it."""
        if self.count == 1:
            return text
        found: list[str | None] = [None] * self.count
        dist.all_gather_object(found, text)
        return next((f"{said} on rank {rank}" for rank, said in enumerate(found) if said), "")

    def cut(self, model: nn.Module, *, sequence: bool = True) -> TensorParallelPlan | None:
        """Cut the layers of a converted model in place, before it is sharded; return how. None where they stay whole.

        Args:
            sequence: whether tokens are cut too; not in a stage of a pipeline.

        Raises:
            UnsupportedError: a layer whose recipe keeps scales.
        """
        if self.mesh is None or self.parallel.tensor == 1:
            return None
        from octavo.distributed import tensor_parallel

        return tensor_parallel(model, self.mesh["tensor"], sequence=sequence)

    def reduction(self) -> Scheme | None:
        """Return what sums the gradients of a model over the ranks that share its shards; None where FSDP2 does.

        All ranks call it.
        """
        name = self.parallel.reduction
        if self.mesh is None or name == "fp32" or (self.parallel.reduce is None and _shards(self.mesh) == 1):
            return None
        from octavo.distributed import reduction

        return reduction(name, self._levels() if name == "two-level" else None)

    def shard(
        self, model: nn.Module, reduction: Scheme | None = None, *, reshard: bool | None = None
    ) -> ShardPlan | None:
        """Shard a converted model, or a stage of it, in place; return how it is gathered. None with one rank.

        Args:
            reduction: what `reduction` returned.
            reshard: whether what was gathered for a forward pass is gathered again for the backward pass.
        """
        if self.mesh is None:
            return None
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from octavo.distributed import BF16_GRADIENTS_POLICY, BF16_POLICY, shard

        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        if self.parallel.gather == "bf16":
            each_is_reduced = reduction is not None and self.parallel.pipeline == 1
            policy = BF16_GRADIENTS_POLICY if each_is_reduced else BF16_POLICY
        embedding = getattr(model, "tok_embeddings", None)  # which later stages have not
        by_rows = [embedding] if self.parallel.embedding == "rows" and embedding is not None else []
        return shard(
            model,
            _copies(self.mesh),
            mp_policy=policy,
            by_rows=by_rows,
            reshard_after_forward=reshard,
            reduce=reduction,
        )

    def send_tokens(self, tokens: Tensor, device: torch.device, models: Sequence[nn.Module], parts: int) -> Tensor:
        """Return tokens of the host on the device, for models that take them in so many parts."""
        if self.mesh is None or self.parallel.embedding == "whole":
            return upload(tokens, device)
        from octavo.distributed import send_tokens

        return send_tokens(tokens, device, *models, parts=parts)

    def _levels(self) -> DeviceMesh:
        """Return of the ranks that share shards the hosts, and those of a host."""
        from torch.distributed.device_mesh import init_device_mesh

        assert self.device is not None
        sizes = levels(self.parallel, self.count, self.launch.of_host)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=LEVELS)["hosts", "ranks"]


_runs = itertools.count()
"""Of this process, one after another: the same number on all ranks."""
ALONE = Ranks()
"""A run of one process."""
LEVELS = ("copies", "hosts", "ranks", "tensor")
"""Dimensions of all ranks for a reduction in two levels: it is over the two in the middle."""


@contextmanager
def ranks_of(config: RunConfig) -> Iterator[Ranks]:
    """Yield the ranks that this process is one of, connected while the block runs.

    Raises:
        ConfigError: what was started is not what `[parallel]` asks for, or the run cannot be split over so many.
        SystemExit: another rank has failed, and said why.
    """
    launch = Launch.read()
    device = _device(config.run.device, launch)
    _check(config, launch)
    if launch.ranks == 1:
        yield ALONE
        return
    from octavo.distributed.health.heartbeat import Heartbeat

    timeout = config.parallel.timeout
    # The heartbeat knows who is missing, so that it shall be the first to see it.
    patient = timedelta(seconds=2 * timeout + 60)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    common, _, _ = next(rendezvous("env://", timeout=patient))
    # A prefix of its own: a group reads the addresses that one before it has left.
    run = f"octavo/{launch.restarts}/{next(_runs)}"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(f"{run}/group", common),
        rank=launch.rank,
        world_size=launch.ranks,
        timeout=patient,
    )
    mesh = _mesh(config.parallel, device, launch.ranks)
    groups = {*mesh.get_all_groups()} | ({dist.group.WORLD} if dist.group.WORLD is not None else set())
    beats, store = (PrefixStore(f"{run}/{part}", _connection(patient)) for part in ("beats", "work"))
    with Heartbeat(beats, launch.rank, launch.ranks, timeout=timeout, groups=[*groups]) as heartbeat:
        yield Ranks(launch=launch, parallel=config.parallel, device=device, mesh=mesh, heartbeat=heartbeat, store=store)
        dist.barrier()
    dist.destroy_process_group()  # after an error it could wait for ranks that are gone


def whole(x: Tensor) -> Tensor:
    """Return what is spread over ranks as a whole tensor on each; all ranks call it."""
    result: Tensor = x.full_tensor() if is_distributed(x) else x  # type: ignore[attr-defined]
    return result


def levels(parallel: ParallelConfig, ranks: int, of_host: int) -> tuple[int, int, int, int]:
    """Return the sizes of `LEVELS`. Of the ranks that share a model's shards each host has the same number.

    Args:
        ranks: of the run.
        of_host: how many of them, one after another, are on a host.

    Raises:
        ConfigError: a host ends between ranks that share a layer, or hosts have different numbers.
    """
    tensor, copies = parallel.tensor, parallel.data * parallel.pipeline
    of_copy = ranks // copies
    fewer, more = sorted((of_host, of_copy))
    if more % fewer or of_host % tensor:
        raise ConfigError(
            f"parallel.reduce: 'two-level' sums within each host first, and {of_copy} ranks that have a model, or a"
            f" stage of it, do not go evenly with hosts of {of_host} ranks (parallel.tensor = {tensor}). Take"
            " 'fp8-block'."
        )
    return copies, of_copy // fewer, fewer // tensor, tensor


def _device(name: str, launch: Launch) -> torch.device:
    if launch.ranks == 1:
        return devices.resolve(name)
    if ":" in name:
        raise ConfigError(f"run.device: '{name}' is one device, and there are {launch.ranks} ranks. Say 'cuda'.")
    device = devices.resolve(name)
    return device if device.type == "cpu" else devices.resolve(f"cuda:{launch.local_rank}")


def _check(config: RunConfig, launch: Launch) -> None:
    parallel, run, ranks = config.parallel, config.run, launch.ranks
    others = parallel.data * parallel.tensor * parallel.pipeline
    shards = parallel.shard or max(ranks // others, 1)
    wanted = others * shards
    if wanted != ranks:
        asked = f"data = {parallel.data}, shard = {parallel.shard or 'all others'}"
        asked += f", tensor = {parallel.tensor}" if parallel.tensor > 1 else ""
        asked += f", pipeline = {parallel.pipeline}" if parallel.pipeline > 1 else ""
        raise ConfigError(
            f"parallel: {asked} want {wanted} ranks, and {ranks} {'was' if ranks == 1 else 'were'} started. Start the"
            f" run with torchrun --nproc-per-node {wanted} -m octavo train ..., or change them."
        )
    if ranks == 1:
        return
    together = parallel.tensor * parallel.pipeline
    parts = ranks // together
    if run.batch % (run.accumulate * parts):
        who = f"{parts} ranks" if together == 1 else f"{parts} groups of {together} ranks"
        raise ConfigError(
            f"run.batch: {run.batch} sequences cannot be split evenly over {who} with {run.accumulate} parts"
            f" each. Take a multiple of {run.accumulate * parts}."
        )
    check_cut(config, shards)
    check_stages(config)
    if run.bf16_first_steps or run.bf16_last_share:
        raise ConfigError(
            "run.bf16_first_steps, run.bf16_last_share: on several ranks the weights of FP8 layers arrive as FP8 codes,"
            " in BF16 steps too. Leave both at 0, or train in one process."
        )
    if parallel.reduce not in (None, "fp32") and shards == 1 and parallel.data > 1:
        raise ConfigError(
            f"parallel.reduce: '{parallel.reduce}' is for ranks that share the shards of a model, and with data ="
            f" {parallel.data} on {ranks} ranks none do: copies are summed in FP32. Take a smaller data, or 'fp32'."
        )
    if parallel.reduce == "two-level":
        levels(parallel, ranks, launch.of_host)


def _mesh(parallel: ParallelConfig, device: torch.device, ranks: int) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    data, tensor, pipeline = parallel.data, parallel.tensor, parallel.pipeline
    if tensor * pipeline > 1:
        sizes = {"data": data, "shard": ranks // (data * tensor * pipeline)}
        sizes = ({"pipeline": pipeline} if pipeline > 1 else {}) | sizes | ({"tensor": tensor} if tensor > 1 else {})
        return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if data == 1:
        return init_device_mesh(device.type, (ranks,))
    return init_device_mesh(device.type, (data, ranks // data), mesh_dim_names=("data", "shard"))


def _copies(mesh: DeviceMesh) -> DeviceMesh:
    """Return of a mesh what models are sharded over: all but the ranks that share layers, or stages of them."""
    if mesh.ndim < 3:
        return mesh
    return mesh["shard"] if mesh["data"].size() == 1 else mesh["data", "shard"]


def _shards(mesh: DeviceMesh) -> int:
    """Return how many ranks share a copy."""
    copies = _copies(mesh)
    return copies.size(copies.ndim - 1)


def _connection(timeout: timedelta) -> Store:
    """Return another connection to the store that brings the ranks together: torchrun's, or that of rank 0."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: Store = dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return store


def _until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.05)
