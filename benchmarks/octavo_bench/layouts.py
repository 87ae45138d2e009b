"""Estimate of a step on many GPUs in one layout: seconds, bytes sent and stored; and the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from octavo.lab.memory.forecast import GIB
from octavo.lab.models.config import ModelConfig
from octavo.lab.models.flops import matmul_parameters
from octavo_bench.assumptions import Assumptions, Group, Scheme


class Layout(NamedTuple):
    """Layout of a model on GPUs: `tensor` within a host, then `shard`, then `replicas`, stages outermost."""

    tensor: int
    stages: int
    shard: int
    """Ranks that share weights, gradients and states (FSDP)."""
    replicas: int
    """Copies of such a group (HSDP)."""
    sequences: int
    """Sequences per micro-batch."""
    gathers_once: bool = False
    """Weights stay gathered, and gradients whole, for all micro-batches of a step."""
    recomputes: bool = False
    """Blocks save only their input."""

    def __str__(self) -> str:
        parts = [f"TP {self.tensor}"] if self.tensor > 1 else []
        parts += [f"PP {self.stages}"] if self.stages > 1 else []
        parts.append(f"FSDP {self.shard}" + (f" x {self.replicas}" if self.replicas > 1 else ""))
        parts.append(f"{self.sequences} seq.")
        parts += ["gathered once"] if self.gathers_once else []
        parts += ["recomputed"] if self.recomputes else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model in one scheme on a number of GPUs."""

    model: ModelConfig
    scheme: Scheme
    head_tflops: float
    """GEMM rate of the head, that of BF16."""
    assumptions: Assumptions
    gpus: int
    batch_tokens: int

    @property
    def block_weights(self) -> int:
        """Weights of one block."""
        return (matmul_parameters(self.model) - self.head_weights) // self.model.layers

    @property
    def head_weights(self) -> int:
        """Weights of the head, and of the embedding."""
        return self.model.vocab * self.model.dim


class Estimate(NamedTuple):
    """One step on the busiest GPU: seconds, bytes sent, bytes stored."""

    layout: Layout
    compute: float
    """GEMMs, attention, element-wise passes and the optimizer."""
    bubble: float
    """Waiting for other stages."""
    communication: float
    """All collectives, hidden or not."""
    exposed: float
    """The part that is not hidden."""
    sent: dict[str, float]
    memory: dict[str, float]

    @property
    def seconds(self) -> float:
        """Total time."""
        return self.compute + self.bubble + self.exposed


def estimate(case: Case, layout: Layout) -> Estimate:
    """Estimate a step in one layout."""
    data = data_parallel(case, layout)
    tensor = tensor_parallel(case, layout)
    compute, update = compute_seconds(case, layout)
    micro = micro_batches(case, layout)
    hidden = min(case.assumptions.overlap * data.seconds, compute / (micro if layout.gathers_once else 1))
    exposed_tensor = (1 - case.assumptions.tensor_overlap) * tensor.seconds
    idle = (layout.stages - 1) / (micro * case.assumptions.pipeline_chunks)
    stages = between_stages(case, layout)
    return Estimate(
        layout=layout,
        compute=compute + update,
        bubble=idle * (compute + exposed_tensor),
        communication=data.seconds + tensor.seconds + stages.seconds,
        exposed=data.seconds - hidden + exposed_tensor + stages.seconds,
        sent={**data.sent, **tensor.sent, **stages.sent},
        memory=memory_bytes(case, layout),
    )


def micro_batches(case: Case, layout: Layout) -> int:
    """Return the micro-batches of a data-parallel rank per step."""
    return case.batch_tokens // (layout.shard * layout.replicas * layout.sequences * case.model.sequence)


def compute_seconds(case: Case, layout: Layout) -> tuple[float, float]:
    """Return the seconds of forward and backward of a GPU, and of its optimizer.

    6 FLOPs per weight and token; attention as `octavo.lab.models.flops_per_token` counts it. Work is split evenly over
    tensor-parallel ranks and stages.
    """
    model, scheme = case.model, case.scheme
    assert scheme.gemm_tflops and scheme.attention_tflops and scheme.optimizer_ps and scheme.elementwise_ps is not None
    tokens = case.batch_tokens / (layout.shard * layout.replicas)
    blocks = 6 * model.layers * case.block_weights / (scheme.gemm_tflops * 1e12)
    blocks += 6 * model.layers * model.dim * model.sequence / (scheme.attention_tflops * 1e12)
    blocks += model.layers * kept_values(model) * scheme.elementwise_ps * 1e-12
    head = 6 * case.head_weights / (case.head_tflops * 1e12)
    again = 1 + (case.assumptions.recomputed if layout.recomputes else 0)
    split = layout.tensor * layout.stages
    return tokens * (again * blocks + head) / split, shard_parameters(case, layout) * scheme.optimizer_ps * 1e-12


def stage_weights(case: Case, layout: Layout) -> tuple[float, float]:
    """Return the weights of a GPU's stage, unsharded: of its blocks, and of embedding and head, or one of them."""
    blocks = case.model.layers / layout.stages * case.block_weights
    ends = case.head_weights * (2 if layout.stages == 1 else 1)
    return blocks / layout.tensor, ends / layout.tensor


def shard_parameters(case: Case, layout: Layout) -> float:
    """Return the parameters stored and updated per GPU."""
    return sum(stage_weights(case, layout)) / layout.shard


class Traffic(NamedTuple):
    """Seconds of collectives, and bytes sent per GPU."""

    seconds: float
    sent: dict[str, float]


def data_parallel(case: Case, layout: Layout) -> Traffic:
    """Return the all-gathers of weights, reduce-scatters of gradients, and their all-reduce over replicas.

    Blocks are gathered in forward and again in backward, embedding and head once; gradients are reduced in every
    micro-batch. With `gathers_once` all of these happen once per step. Between replicas, gradient shards are reduced
    once. An embedding sent by rows is sent so in every micro-batch, one row per token, duplicates included.
    """
    links, scheme = case.assumptions.links, case.scheme
    shard, replicas = data_groups(case, layout)
    blocks, ends = stage_weights(case, layout)
    layers = case.model.layers / layout.stages
    weight = scheme.weight_wire + (case.assumptions.row_scale_bytes / case.model.dim if scheme.weight_wire < 2 else 0)
    micro = 1 if layout.gathers_once else micro_batches(case, layout)
    passes = 1 if layout.gathers_once else 2
    rows = embedding_rows(case, layout)
    ends -= case.head_weights if rows else 0  # the rest is gathered
    gather = passes * layers * links.gather(blocks / layers * weight, shard) + links.gather(2 * ends, shard)
    reduce = layers * links.gather(blocks / layers * scheme.gradient_wire, shard)
    reduce += links.gather(ends * scheme.gradient_wire, shard)
    own = shard_parameters(case, layout) * scheme.gradient_wire
    across = links.all_reduce(own, replicas)
    away, away_replicas = (1 - 1 / ranks for ranks in (layout.shard, layout.replicas))
    return Traffic(
        micro * (gather + reduce) + across + 2 * links.gather(rows, shard),
        {
            "weights": away * (micro * (passes * blocks * weight + 2 * ends) + rows),
            "gradients": away * (micro * (blocks + ends) * scheme.gradient_wire + rows) + 2 * away_replicas * own,
        },
    )


def embedding_rows(case: Case, layout: Layout) -> float:
    """Return the bytes of rows that a GPU looks up in a step, in BF16; 0 if the embedding is gathered whole.

    It is gathered whole where that takes fewer bytes, where tensor parallelism splits it, and with stages, as the
    busiest GPU then has the head.
    """
    if not case.scheme.embedding_by_rows or layout.tensor > 1 or layout.stages > 1:
        return 0.0
    micro, tokens = micro_batches(case, layout), layout.sequences * case.model.sequence
    rows = 2.0 * micro * tokens * case.model.dim
    return rows if rows < 2 * (1 if layout.gathers_once else micro) * case.head_weights else 0.0


def data_groups(case: Case, layout: Layout) -> tuple[Group, Group]:
    """Return the ranks that share a model, and those with the same shard."""
    room = max(case.assumptions.gpus_per_host // layout.tensor, 1)
    inside = min(layout.shard, room)
    copies = min(layout.replicas, room // inside)
    return Group(layout.shard // inside, inside), Group(layout.replicas // copies, copies)


def tensor_parallel(case: Case, layout: Layout) -> Traffic:
    """Return the collectives of tensor and sequence parallelism (arXiv 2205.05198, section 4.2.2), inside a host.

    Attention and feed-forward each gather their input in forward, and the gradient and the input again in backward;
    they reduce-scatter their result in forward and its gradient in backward.
    """
    if layout.tensor == 1:
        return Traffic(0.0, {"tensor parallel": 0.0})
    group, scheme = Group(1, layout.tensor), case.scheme
    scale = case.assumptions.row_scale_bytes / case.model.dim if scheme.activation_wire < 2 else 0
    tokens = layout.sequences * case.model.sequence
    values = tokens * case.model.dim
    each = [(6, values * (scheme.activation_wire + scale)), (4, values * 2.0)]
    layers = micro_batches(case, layout) * case.model.layers / layout.stages
    seconds = layers * sum(count * case.assumptions.links.gather(size, group) for count, size in each)
    sent = layers * sum(count * size for count, size in each) * (1 - 1 / layout.tensor)
    return Traffic(seconds, {"tensor parallel": sent})


def between_stages(case: Case, layout: Layout) -> Traffic:
    """Return the messages between stages; only those that fill and drain the pipeline are exposed."""
    values = layout.sequences * case.model.sequence * case.model.dim / layout.tensor
    sizes = (values * case.scheme.activation_wire, values * 2.0)
    links, chunks = case.assumptions.links, case.assumptions.pipeline_chunks
    sent = micro_batches(case, layout) * chunks * sum(sizes) if layout.stages > 1 else 0.0
    return Traffic((layout.stages - 1) * sum(links.send(size) for size in sizes), {"pipeline": sent})


def memory_bytes(case: Case, layout: Layout) -> dict[str, float]:
    """Return the bytes per GPU by kind: shard, gathered tensors, activations."""
    scheme, model = case.scheme, case.model
    assert scheme.activation_bytes is not None
    own, (blocks, ends) = shard_parameters(case, layout), stage_weights(case, layout)
    layers = model.layers / layout.stages
    kept = state_bytes(scheme)
    # All blocks, or two: the current one and the next.
    resident = 1.0 if layout.gathers_once or layout.shard == 1 else min(2 / layers, 1.0)
    ends -= case.head_weights if embedding_rows(case, layout) else 0
    gathered = resident * blocks * scheme.gathered + ends * 2
    whole = (resident * blocks + ends) * kept["gradient"] if layout.shard > 1 else 0.0
    at_once = min(micro_batches(case, layout), layout.stages) * layout.sequences * model.sequence / layout.tensor
    one_block = kept_values(model) * scheme.activation_bytes
    per_token = layers * one_block
    if layout.recomputes:
        per_token = layers * 2 * model.dim + one_block / min(micro_batches(case, layout), layout.stages)
    return {
        "weights": own * kept["weight"],
        "states": own * sum(kept.get(kind, 0.0) for kind in ("master", "first", "second")),
        "gradients": own * kept["gradient"] + whole,
        "gathered": gathered,
        "activations": at_once * per_token,
    }


_STATE_BYTES: dict[tuple[str, str, str], dict[str, float]] = {}


def state_bytes(scheme: Scheme) -> dict[str, float]:
    """Return the bytes per parameter of weight, gradient and states, by kind, as `octavo.optim` keeps them."""
    key = scheme.states, scheme.weight, scheme.gradient
    if key not in _STATE_BYTES:
        import torch

        from octavo.optim import bytes_per_parameter

        weight, gradient = getattr(torch, scheme.weight), getattr(torch, scheme.gradient)
        _STATE_BYTES[key] = bytes_per_parameter(scheme.states, weight=weight, gradient=gradient)
    return _STATE_BYTES[key]


def fits(case: Case, layout: Layout) -> bool:
    """Return whether a layout fits into a GPU's memory."""
    free = case.assumptions.memory_gib - case.assumptions.reserved_gib
    return sum(memory_bytes(case, layout).values()) <= free * GIB


def layouts(case: Case) -> Iterator[Layout]:
    """Yield all layouts of powers of two that the GPUs, the batch and the layers allow, whether they fit or not."""
    total = case.batch_tokens // case.model.sequence
    for tensor in _powers(min(case.assumptions.gpus_per_host, case.model.key_value_heads)):
        for stages in _powers(case.model.layers):
            data, rest = divmod(case.gpus, tensor * stages)
            if rest or not data or total % data or case.model.layers % (stages * case.assumptions.pipeline_chunks):
                continue
            for shard in (size for size in _powers(data) if data % size == 0):
                for sequences in (count for count in _powers(total // data) if (total // data) % count == 0):
                    for once in (False, True):
                        for again in (False, True):
                            yield Layout(tensor, stages, shard, data // shard, sequences, once, again)


def _powers(largest: int) -> list[int]:
    return [2**exponent for exponent in range(largest.bit_length()) if 2**exponent <= largest]


def best(case: Case) -> Estimate | None:
    """Return the fastest layout that fits, or None."""
    return min((estimate(case, layout) for layout in layouts(case) if fits(case, layout)), key=_rank, default=None)


def _rank(found: Estimate) -> tuple[float, float]:
    return found.seconds, sum(found.memory.values())


def kept_values(model: ModelConfig) -> int:
    """Return the values per token that a block saves for backward, as in plain PyTorch with fused attention.

    Both inputs of residual sums, both outputs of norms, the attention's output; Q, K and V; the feed-forward's hidden
    values: gate, up and their product, or before and after GELU.
    """
    keys = model.key_value_heads * model.head_dim
    hidden = (3 if model.architecture == "llama" else 2) * model.ffn_dim
    return 5 * model.dim + model.dim + 2 * keys + hidden
