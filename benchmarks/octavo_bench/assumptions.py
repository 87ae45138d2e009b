"""Assumptions of the estimate of a step on many GPUs: models, schemes, links, and overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2
from pathlib import Path
from typing import Any

from octavo._util import config_reader
from octavo.errors import ConfigError
from octavo.kernels.wire.message import GROUP
from octavo.lab.models.config import ModelConfig

PEER = "bf16"
"""Baseline scheme."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """Computation, communication and memory of a step."""

    about: str
    implementation: str
    """Implementation of kind `step` that provides its rates."""
    measured_as: str
    """Implementation of kind `distributed` that the estimate for 4 GPUs is compared with."""
    states: str
    """Tier of the optimizer."""
    weight: str
    """dtype of a rank's shard of a weight."""
    gradient: str
    """dtype of gradients, before and after their reduction."""
    weight_wire: float
    """Bytes per weight of a block in an all-gather. Embedding and head are sent in BF16."""
    gradient_wire: float
    """Bytes per gradient in a reduction."""
    embedding_by_rows: bool
    """Whether only the looked-up rows of the embedding are sent, in BF16, if that is less."""
    activation_wire: float
    """Bytes per activation, or gradient of one, in an all-gather of tensor parallelism, and per activation between
    stages. Reduce-scatters, and gradients between stages, are in BF16."""
    gathered: float
    """Bytes in memory per gathered weight of a block; FP8: codes and transposed codes."""
    gemm_tflops: float | None = None
    """GEMM rate of blocks; the head has BF16's. None: as measured."""
    attention_tflops: float | None = None
    """Rate of causal attention, counted as half of the full square. None: as measured."""
    elementwise_ps: float | None = None
    """Picoseconds of all other kernels per value saved by a block. None: as measured."""
    optimizer_ps: float | None = None
    """Picoseconds per parameter. None: as measured."""
    activation_bytes: float | None = None
    """Bytes per value saved by a block for backward. None: as measured."""


def _llama(dim: int, ffn: int, layers: int, heads: int) -> ModelConfig:
    return ModelConfig(vocab=128256, dim=dim, ffn=ffn, layers=layers, heads=heads, kv_heads=8, sequence=8192)


MODELS = {
    "8B": _llama(dim=4096, ffn=14336, layers=32, heads=32),
    "70B": _llama(dim=8192, ffn=28672, layers=80, heads=64),
    "175B": ModelConfig(architecture="gpt", vocab=50304, dim=12288, layers=96, heads=96, sequence=2048),
}
"""Llama 3 (arXiv 2407.21783, table 3) of two sizes, and GPT-3 (arXiv 2005.14165, table 2.1)."""

_BF16 = Scheme(
    about="BF16 weights, FP32 gradients",
    implementation="bf16",
    measured_as="bf16",
    states="fp32",
    weight="float32",
    gradient="float32",
    weight_wire=2,
    gradient_wire=4,
    embedding_by_rows=False,
    activation_wire=2,
    gathered=2,
)
_LEAN = replace(
    _BF16,
    about="BF16 weights, BF16 gradients, states without FP32",
    measured_as="bf16, lean",
    states="exact",
    weight="bfloat16",
    gradient="bfloat16",
    gradient_wire=2,
)
_FP8 = replace(
    _LEAN,
    about="FP8 weights, BF16 gradients",
    implementation="octavo folded",
    measured_as="octavo folded, bf16 gradients, fp8 states",
    states="fp8",
    weight_wire=1,
    activation_wire=1,
)
_FP8_BLOCK = replace(
    _FP8,
    about="FP8 weights, FP8 gradients with a scale for 128, the embedding by rows",
    measured_as="octavo folded, fp8-block",
    gradient_wire=1 + 1 / GROUP,
    embedding_by_rows=True,
)
SCHEMES = {PEER: _BF16, "bf16, lean": _LEAN, "fp8": _FP8, "fp8, fp8-block": _FP8_BLOCK}


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """Assumptions of the estimate; a TOML file can override each key."""

    gpus: tuple[int, ...] = (64, 512, 4096)
    """Numbers of GPUs."""
    batch_tokens: int = 2**24
    """Tokens per step over all GPUs, the same for every number of GPUs."""
    models: dict[str, ModelConfig] = field(default_factory=lambda: dict(MODELS))
    """By name."""
    schemes: dict[str, Scheme] = field(default_factory=lambda: dict(SCHEMES))
    """By name; `bf16` is the baseline."""
    gpus_per_host: int = 8
    """GPUs per host, all connected by NVLink."""
    memory_gib: float = 139.0
    """Memory per GPU."""
    reserved_gib: float = 8.0
    """Part of it for CUDA, NCCL, the loss in chunks, and fragmentation."""
    nvlink_gb_per_s: float = 450.0
    """NVLink bandwidth per GPU, in one direction."""
    nvlink_efficiency: float = 0.7
    """Share of that bandwidth reached by collectives."""
    nvlink_latency_us: float = 2.0
    """Latency of a hop within a host."""
    network_gbit_per_s: float = 400.0
    """Bandwidth of a GPU's network card, in one direction."""
    network_efficiency: float = 0.85
    """Share of that bandwidth reached by collectives."""
    network_latency_us: float = 6.0
    """Latency of a hop between hosts."""
    overlap: float = 0.5
    """Share of the time of data-parallel collectives that is hidden behind computation, if there is enough of it."""
    tensor_overlap: float = 0.0
    """The same for tensor-parallel collectives, whose results the next GEMM needs."""
    pipeline_chunks: int = 1
    """Chunks of layers per stage: 1 is 1F1B; N are interleaved and divide the bubble by N."""
    row_scale_bytes: float = 4.0
    """Bytes sent per row of an FP8 weight, or per token of FP8 activations, for its scale."""
    recomputed: float = 1 / 3
    """Share of the blocks' work that is repeated if activations are recomputed."""

    def __post_init__(self) -> None:
        if PEER not in self.schemes:
            raise ConfigError(f"scaling: the scheme '{PEER}', the baseline, is missing.")
        for name in ("overlap", "tensor_overlap", "nvlink_efficiency", "network_efficiency"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"scaling: {name} = {getattr(self, name)}: a share is from 0 to 1.")
        whole = (*self.gpus, self.batch_tokens, self.gpus_per_host, self.pipeline_chunks)
        rates = (self.nvlink_gb_per_s, self.nvlink_efficiency, self.network_gbit_per_s, self.network_efficiency)
        if not all(number > 0 for number in (*whole, *rates)):
            raise ConfigError("scaling: GPUs, tokens, chunks and rates of links must be positive.")

    @property
    def links(self) -> Links:
        """The links, at the bandwidth reached by collectives."""
        return Links(
            inside=self.nvlink_gb_per_s * 1e9 * self.nvlink_efficiency,
            outside=self.network_gbit_per_s / 8 * 1e9 * self.network_efficiency,
            hop_inside=self.nvlink_latency_us * 1e-6,
            hop_outside=self.network_latency_us * 1e-6,
        )


def load(file: Path | None = None) -> Assumptions:
    """Return the assumptions, overridden by the keys, models and schemes of a TOML file.

    Raises:
        ConfigError: an unknown key, or an impossible value.
    """
    if file is None:
        return Assumptions()
    return config_reader.read(
        Assumptions, _merged(config_reader.to_dict(Assumptions()), config_reader.read_file(file)), str(file)
    )


def _merged(known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    changed = {
        key: _merged(known[key], value) if isinstance(value, Mapping) and isinstance(known.get(key), Mapping) else value
        for key, value in given.items()
    }
    return {**known, **changed}


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective."""

    hosts: int
    per_host: int
    """Ranks on each host."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.hosts * self.per_host


@dataclass(frozen=True, slots=True)
class Links:
    """Links between GPUs, per direction: bytes per second, and seconds per hop."""

    inside: float
    """Between GPUs of one host."""
    outside: float
    """Between hosts, per GPU."""
    hop_inside: float
    hop_outside: float

    def rate(self, group: Group) -> float:
        """Return the bytes per second through each rank."""
        return self.inside if group.hosts == 1 else min(group.per_host * self.outside, self.inside)

    def gather(self, size: float, group: Group) -> float:
        """Return the seconds of a ring all-gather or reduce-scatter; `size`: bytes of the whole tensor."""
        if group.ranks == 1 or not size:
            return 0.0
        hops = (group.hosts - 1) * self.hop_outside + group.hosts * (group.per_host - 1) * self.hop_inside
        return hops + bound(size, group.ranks, self.rate(group))

    def all_reduce(self, size: float, group: Group) -> float:
        """Return the seconds of an all-reduce, by two rings or by a tree of hosts, whichever is faster."""
        if group.ranks == 1 or not size:
            return 0.0
        up = ceil(log2(group.hosts)) * self.hop_outside + (group.per_host - 1) * self.hop_inside
        return min(2 * self.gather(size, group), 2 * (up + size / self.rate(group)))

    def send(self, size: float) -> float:
        """Return the seconds of a message from one host to another."""
        return self.hop_outside + size / self.outside


def bound(size: float, ranks: int, rate: float) -> float:
    """Return the lower bound, in seconds, of an all-gather of `size` bytes: each rank receives all other shards."""
    return (ranks - 1) / ranks * size / rate
