"""Time experts: one mixture layer against PyTorch's BF16 grouped GEMM, and layers of a Qwen3-MoE in the Trainer.

The rivals of the layer compute the same: tokens are sorted, gathered, multiplied by `torch._grouped_mm`, weighted and
summed. The fastest of them, eager or compiled, is the baseline. Routing is uniform and drawn once. Kept memory is that
of tensors saved by autograd, without weights; codes of weights are counted separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from octavo import Policy, convert
from octavo._util.dist import is_first_rank
from octavo.conversion import enable
from octavo.distributed import expert_parallel, rank_loads
from octavo.kernels import record
from octavo_bench import hf
from octavo_bench.implementations import BF16
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, device_named, known
from octavo_bench.ranks import process_group
from octavo_bench.results import Row
from octavo_bench.timing import Case, attempt, attempts, beside, beside_first, made_in_bf16, median_ms


class Shape(NamedTuple):
    """Sizes of a layer of experts."""

    dim: int
    ffn: int
    experts: int
    each: int
    """Experts per token."""
    tokens: int

    @property
    def name(self) -> str:
        """The cell of the column `workload`."""
        return f"{self.dim} x {self.ffn} x {self.experts}, top {self.each}, {self.tokens} tokens"


LAYERS = tuple(Shape(2048, 768, 128, 8, tokens) for tokens in (16384, 32768))
"""The experts of Qwen3-30B-A3B."""
SMALL = (Shape(64, 32, 4, 2, 64),)
RIVAL = "bf16 torch._grouped_mm"
TRAINER = "4 layers of Qwen3-30B-A3B in the Trainer, 2 x 4096 tokens"
WITH_HEAD = " + fp8 head"
MODES = {"trainer": "eager", "compiled": "compiled", "causal": "compiled, no mask"}
"""Names of the Trainer's modes, by part of the benchmark."""
TRAINER_MODES = dict(zip(MODES, ("eager", "torch_compile", "torch_compile_causal"), strict=True))
PARTS = ("layer", *MODES, "parallel")
STEPS = 8
KIND = Kind(
    name="moe",
    keys={"workload": str, "implementation": str, "ms": float, "ratio_to_bf16": float},
    columns=(
        ("workload", "{workload}"),
        ("implementation", "{implementation}"),
        ("ms", "{ms:.2f}"),
        ("BF16 / this", "{ratio_to_bf16:.2f}"),
        ("activations kept, MiB", "{kept_mib:.0f}"),
        ("weight codes kept, MiB", "{kept_weight_codes_mib:.0f}"),
    ),
    names=2,
    told=(("fallbacks", "{fallbacks}"),),
    session=("hardware", "workload"),  # a machine's results do not replace another's
)


class Mixture(nn.Module):
    """Experts with SwiGLU by PyTorch's own grouped GEMM, without loops or host synchronisation."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        options: Any = {"device": device, "dtype": torch.bfloat16}
        self.gate_up = nn.Parameter(torch.randn(shape.experts, 2 * shape.ffn, shape.dim, **options) * shape.dim**-0.5)
        self.down = nn.Parameter(torch.randn(shape.experts, shape.dim, shape.ffn, **options) * shape.ffn**-0.5)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts of each token (T, D)."""
        found, order = ids.flatten().sort(stable=True)
        every = torch.arange(len(self.gate_up), device=x.device)
        ends = torch.searchsorted(found, every, right=True).int()
        source = order // ids.shape[1]
        gate, up = grouped_mm(x[source], self.gate_up.mT, ends).chunk(2, dim=-1)
        y = grouped_mm(F.silu(gate) * up, self.down.mT, ends) * weights.flatten()[order, None].to(x.dtype)
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        return y[place].view(len(x), ids.shape[1], -1).sum(1)


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return the result of PyTorch's grouped GEMM."""
    return torch._grouped_mm(a, b, offs=ends)


class Way(NamedTuple):
    """An implementation of a layer."""

    name: str
    recipe: str = BF16
    inputs: Any = "bf16"
    compiled: bool = False


WAYS = (
    Way(RIVAL),
    Way(f"{RIVAL}, compiled", compiled=True),
    Way("octavo folded", "folded"),
    Way("octavo folded, compiled", "folded", compiled=True),
    Way("octavo folded, activation inputs in FP8", "folded", "fp8"),
    Way("octavo folded_fast", "folded_fast"),
)


def bench_layers(shapes: Sequence[Shape], device: str, repeats: int) -> Iterator[Row]:
    """Yield a row per layer and implementation: forward and backward, to x, the routing weights and all weights.

    Ratios of earlier rows are updated when a faster rival is measured.
    """
    for shape in shapes:
        given, found = _inputs(shape, device), list[Row]()
        for way in WAYS:
            about: Row = {"workload": shape.name, "implementation": way.name}
            found.append(attempt(about, partial(_measure, shape, way, given, device, repeats), device))
            rivals = [row for row in found if row["implementation"].startswith(RIVAL) and "ms" in row]
            best = min(rivals, key=lambda row: float(row["ms"]), default={})
            for row in found:
                row |= beside(row, best)
            yield found[-1]


def _inputs(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, dy = torch.randn(2, shape.tokens, shape.dim, device=device, dtype=torch.bfloat16)
    weights, ids = torch.randn(shape.tokens, shape.experts, device=device).softmax(1).topk(shape.each)
    return x.requires_grad_(), ids, weights.detach().requires_grad_(), dy


def _measure(shape: Shape, way: Way, given: tuple[Tensor, ...], device: str, repeats: int) -> Row:
    module: nn.Module = Mixture(shape, device)
    if way.recipe != BF16:
        policy = Policy(min_gain=0, activation_inputs=way.inputs)
        plan = convert(nn.ModuleDict({"experts": module}), way.recipe, policy=policy)
        if plan.fp8_layers != 2:
            raise RuntimeError(f"the plan has {plan.fp8_layers} layers in FP8: {plan.layers[0].reason}")
    x, ids, weights, dy = given
    inputs = [x, weights, *module.parameters()]
    kept = _kept(module, given)
    call: Any = torch.compile(module) if way.compiled else module

    def step() -> None:
        torch.autograd.grad(call(x, ids, weights), inputs, dy)

    with record() as ledger:  # of eager code: an open ledger changes compiled code
        torch.autograd.grad(module(x, ids, weights), inputs, dy)
    ms = median_ms(step, device, repeats, seconds=1.0, queued=False)
    flops = 18 * shape.tokens * shape.each * shape.dim * shape.ffn
    row = {"ms": round(ms, 3), "tflops": round(flops / ms / 1e9, 1), **kept}
    return row | ({"fallbacks": "; ".join(map(str, ledger.fallbacks))} if ledger.fallbacks else {})


def _kept(module: nn.Module, given: tuple[Tensor, ...]) -> Row:
    """Return the MiB saved for backward: of activations, and of codes of weights."""
    x, ids, weights, _ = given
    owned = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    seen: dict[int, tuple[int, bool]] = {}
    shapes = {parameter.shape for parameter in module.parameters()}  # not sizes: codes of gate may have the same

    def keep(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in owned:
            seen[memory.data_ptr()] = memory.nbytes(), tensor.element_size() == 1 and tensor.shape in shapes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x, ids, weights)
    both = [sum(size for size, is_weight in seen.values() if is_weight is wanted) for wanted in (False, True)]
    return {"kept_mib": round(both[0] / 2**20, 3), "kept_weight_codes_mib": round(both[1] / 2**20, 3)}


# --- in the Trainer --------------------------------------------------------------------------------------------------


def bench_trainer(device: str, recipe: str, mode: str) -> Iterator[Row]:
    """Yield a row per precision: a step of Transformers' Trainer, its optimizer included.

    With so few layers the head has most FLOPs of the model, so FP8 is timed with and without it.

    Args:
        mode: a key of `MODES`.
    """
    cases: list[Case] = [
        ({"workload": TRAINER, "implementation": f"{precision}, {MODES[mode]}"},
         partial(_train, device, precision, mode))
        for precision in (BF16, recipe, recipe + WITH_HEAD)
    ]  # fmt: skip
    return beside_first(attempts(cases, device))


def _model(device: str) -> nn.Module:
    from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "vocab_size": 151936,
    }
    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    if device == "cpu":
        sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "vocab_size": 128}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    each = min(8, sizes["num_experts"] // 2)
    config = Qwen3MoeConfig(**sizes, **heads, num_hidden_layers=4, num_experts_per_tok=each, use_cache=False)
    config._experts_implementation = "grouped_mm"
    with made_in_bf16(device):
        return Qwen3MoeForCausalLM(config)


def _train(device: str, precision: str, mode: str) -> Row:
    torch.manual_seed(0)
    model, length, share = _model(device), 4096 if device == "cuda" else 32, 0.0
    if precision != BF16:
        policy = Policy(min_gain=0, keep_defaults=not precision.endswith(WITH_HEAD))
        plan = convert(model, precision.removesuffix(WITH_HEAD), policy=policy, tokens=2 * length)
        fp8 = sum(row.count * row.shape[0] * row.shape[1] for row in plan.layers if row.is_fp8)
        share = fp8 / sum(row.count * row.shape[0] * row.shape[1] for row in plan.layers)
    found = hf.train(model, 2, length, TRAINER_MODES[mode], device=device, steps=STEPS)
    return found | {"fp8_share": round(share, 4)}


# --- on several ranks ------------------------------------------------------------------------------------------------


def bench_parallel(shapes: Sequence[Shape], device: str, repeats: int) -> Iterator[Row]:
    """Time experts sharded over the ranks of torchrun, in FP8 and in BF16, on tokens of every rank.

    Every rank must call this; only rank 0 yields rows.
    """
    with process_group():
        ranks = dist.get_world_size()
        for shape in shapes:
            torch.manual_seed(0)
            model = nn.ModuleDict({"experts": Mixture(shape, device)})
            convert(model, "folded", policy=Policy(min_gain=0))
            expert_parallel(model, init_device_mesh(device, (ranks,)))
            torch.manual_seed(dist.get_rank())
            given, name = _inputs(shape, device), f"{shape.name} per rank, {ranks} ranks"
            cases: list[Case] = [
                ({"workload": name, "implementation": f"octavo {precision}"},
                 partial(_in_parallel, model, precision, given, device, repeats))
                for precision in (BF16, "folded")
            ]  # fmt: skip
            yield from (row for row in beside_first(attempts(cases)) if is_first_rank())


def _in_parallel(
    model: nn.ModuleDict, precision: str, given: tuple[Tensor, Tensor, Tensor, Tensor], device: str, repeats: int
) -> Row:
    enable(model, precision != BF16)
    x, ids, weights, dy = given
    inputs = [x, weights, *model.parameters()]

    def step() -> None:
        torch.autograd.grad(model["experts"](x, ids, weights), inputs, dy)

    ms = median_ms(step, device, repeats, seconds=0.0, queued=False)  # a fixed number of calls, equal on all ranks
    return {"ms": round(ms, 3), "rank_load": round(rank_loads(model)["experts"], 3)}


def command(
    *,
    only: Names = (),
    recipe: str = "folded",
    device: str = "auto",
    repeats: int = 20,
    output: Output = TO_STDOUT,
) -> int:
    """Time a layer of experts against BF16 grouped GEMMs, and a Qwen3-MoE in Transformers' Trainer.

    Examples:

        octavo bench moe
        octavo bench moe --only layer
        octavo bench moe --only trainer --only compiled --recipe folded_fast
        torchrun --nproc-per-node 2 -m octavo bench moe --only parallel

    Parameters
    ----------
    only
        layer, trainer (eager), compiled (the Trainer with torch_compile), causal (the same without an attention mask)
        or parallel; the first three by default.
    recipe
        Recipe in the Trainer.
    device
        cuda or cpu; auto takes the GPU if there is one.
    repeats
        Timed calls of a layer; the median is reported.
    """
    device, shapes = device_named(device), LAYERS if device_named(device) == "cuda" else SMALL
    parts = [known("--only", part, PARTS, "part") for part in only] or PARTS[:3]
    benches = {
        "layer": partial(bench_layers, shapes, device, repeats),
        **{part: partial(bench_trainer, device, recipe, part) for part in MODES},
        "parallel": partial(bench_parallel, shapes, device, repeats),
    }
    rows = (row for part in PARTS if part in parts for row in benches[part]())
    return output.finish(KIND, rows, device=device, only=only, recipe=recipe, repeats=repeats)
