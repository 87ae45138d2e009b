"""Time experts: one layer of a mixture beside PyTorch's BF16 grouped GEMM, and layers of a Qwen3-MoE in the Trainer.

The rivals of the layer compute the same: tokens are sorted, gathered, multiplied by `torch._grouped_mm`, weighted and
summed. The best of them, eager or compiled, is the baseline. Routing is uniform and drawn once. What backward keeps
is the memory of tensors that autograd saves, weights not counted, and codes of weights apart.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from octavo import Policy, convert
from octavo.conversion import enable
from octavo.distributed import expert_parallel, rank_loads
from octavo.kernels import record
from octavo.train.timing import milliseconds, synchronize, warm_up
from octavo_bench.cli import TO_STDOUT, Names, Output, command_line, device_named
from octavo_bench.hf import leave_out_mask
from octavo_bench.results import Row, failure


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
"""Of the Trainer, by part of the benchmark. Compiled, transformers masks attention, see `octavo_bench.hf`."""
WARM_UP_STEPS, STEPS = 4, 8


class Mixture(nn.Module):
    """Experts with SwiGLU by PyTorch's own grouped GEMM, without a loop and without waiting for the host."""

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
    """Return the products of PyTorch's grouped GEMM."""
    return torch._grouped_mm(a, b, offs=ends)


class Way(NamedTuple):
    """An implementation of a layer."""

    name: str
    recipe: str = "bf16"
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


def bench_layers(shapes: Sequence[Shape], device: str, repeats: int, report: Callable[[Row], None]) -> list[Row]:
    """Return a row per layer and implementation: forward and backward, to x, the routing weights and all weights."""
    rows: list[Row] = []
    for shape in shapes:
        given, found = _inputs(shape, device), list[Row]()
        for way in WAYS:
            row: Row = {"workload": shape.name, "implementation": way.name}
            try:
                row |= _measure(shape, way, given, device, repeats)
            except Exception as error:  # one that fails must not lose the others
                row["error"] = failure(error)
            torch._dynamo.reset()
            found.append(row)
            best = min((r["ms"] for r in found if r["implementation"].startswith(RIVAL) and "ms" in r), default=0)
            for each in found:  # those before, too: a later rival may be faster
                if "ms" in each:
                    each["ratio_to_bf16"] = round(best / each["ms"], 3)
            report(row)
        rows += found
    return rows


def _inputs(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, dy = torch.randn(2, shape.tokens, shape.dim, device=device, dtype=torch.bfloat16)
    weights, ids = torch.randn(shape.tokens, shape.experts, device=device).softmax(1).topk(shape.each)
    return x.requires_grad_(), ids, weights.detach().requires_grad_(), dy


def _measure(shape: Shape, way: Way, given: tuple[Tensor, ...], device: str, repeats: int) -> Row:
    module: nn.Module = Mixture(shape, device)
    if way.recipe != "bf16":
        policy = Policy(min_gain=0, activation_inputs=way.inputs)
        plan = convert(nn.ModuleDict({"experts": module}), way.recipe, policy=policy)
        if plan.fp8_layers != 2:
            raise RuntimeError(f"the plan has {plan.fp8_layers} products in FP8: {plan.layers[0].reason}")
    x, ids, weights, dy = given
    inputs = [x, weights, *module.parameters()]
    kept = _kept(module, given)
    call: Any = torch.compile(module) if way.compiled else module

    def step() -> None:
        torch.autograd.grad(call(x, ids, weights), inputs, dy)

    with record() as ledger:  # of eager code: while a ledger is open, compiled code is another
        torch.autograd.grad(module(x, ids, weights), inputs, dy)
    warm_up(step, device)
    ms = statistics.median(milliseconds(step, device, repeats))
    flops = 18 * shape.tokens * shape.each * shape.dim * shape.ffn
    row = {"ms": round(ms, 3), "tflops": round(flops / ms / 1e9, 1), **kept}
    return row | ({"fallbacks": "; ".join(map(str, ledger.fallbacks))} if ledger.fallbacks else {})


def _kept(module: nn.Module, given: tuple[Tensor, ...]) -> Row:
    """Return the MiB that backward keeps: of activations, and of codes of weights."""
    x, ids, weights, _ = given
    owned = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    seen: dict[int, tuple[int, bool]] = {}
    shapes = {parameter.shape for parameter in module.parameters()}  # not sizes: codes of gate may be as many

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


def bench_trainer(device: str, recipe: str, mode: str, report: Callable[[Row], None]) -> None:
    """Report a row per precision: the median step of Transformers' Trainer, its optimizer included.

    The head of so few layers has most FLOPs of the model, so FP8 is timed with it and without.

    Args:
        mode: a value of `MODES`.
    """
    base = 0.0
    for precision in ("bf16", recipe, recipe + WITH_HEAD):
        row: Row = {"workload": TRAINER, "implementation": f"{precision}, {mode}"}
        try:
            row |= _train(device, precision, mode)
            base = row["ms"] if precision == "bf16" else base
            row["ratio_to_bf16"] = round(base / row["ms"], 3) if base else 0.0
        except Exception as error:
            row["error"] = failure(error)
        torch._dynamo.reset()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        report(row)


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
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Qwen3MoeForCausalLM(config)
        finally:
            torch.set_default_dtype(before)


def _train(device: str, precision: str, mode: str) -> Row:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import TrainerCallback

    torch.manual_seed(0)
    model, length = _model(device), 4096 if device == "cuda" else 32
    share = 0.0
    if precision != "bf16":
        policy = Policy(min_gain=0, keep_defaults=not precision.endswith(WITH_HEAD))
        plan = convert(model, precision.removesuffix(WITH_HEAD), policy=policy, tokens=2 * length)
        fp8 = sum(row.count * row.shape[0] * row.shape[1] for row in plan.layers if row.is_fp8)
        share = fp8 / sum(row.count * row.shape[0] * row.shape[1] for row in plan.layers)
    if mode == MODES["causal"]:
        leave_out_mask(model)
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            synchronize(device)
            times.append(-time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize(device)
            times[-1] += time.perf_counter()

    vocabulary = int(cast(Any, model).config.vocab_size)
    tokens = torch.randint(vocabulary, (2 * (WARM_UP_STEPS + STEPS), length), device="cpu")
    optimizer = "adamw_torch_fused" if device == "cuda" else "adamw_torch"
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            place, max_steps=WARM_UP_STEPS + STEPS, per_device_train_batch_size=2, bf16=device == "cuda",
            torch_compile=mode != MODES["trainer"], optim=optimizer, save_strategy="no", report_to=[],
            logging_strategy="no", disable_tqdm=True, use_cpu=device == "cpu", dataloader_pin_memory=False,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in tokens]
        trained = Trainer(model, arguments, train_dataset=data, callbacks=[Clock()]).train()
    ms = 1e3 * statistics.median(times[WARM_UP_STEPS:])
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    row = {"ms": round(ms, 2), "loss": round(trained.training_loss, 4), "fp8_share": round(share, 4)}
    return row | {"peak_gib": round(peak, 2)}


# --- on several ranks ------------------------------------------------------------------------------------------------


def bench_parallel(shapes: Sequence[Shape], device: str, repeats: int, report: Callable[[Row], None]) -> None:
    """Time experts that are divided over the ranks of torchrun, in FP8 and in BF16, on tokens of every rank."""
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks = dist.get_world_size()
    for shape in shapes:
        torch.manual_seed(0)
        model = nn.ModuleDict({"experts": Mixture(shape, device)})
        convert(model, "folded", policy=Policy(min_gain=0))
        expert_parallel(model, init_device_mesh(device, (ranks,)))
        torch.manual_seed(dist.get_rank())
        x, ids, weights, dy = _inputs(shape, device)
        inputs, base = [x, weights, *model.parameters()], 0.0
        for precision in ("bf16", "folded"):
            row: Row = {"workload": f"{shape.name} per rank, {ranks} ranks", "implementation": f"octavo {precision}"}
            try:
                enable(model, precision != "bf16")
                step = partial(_step, model["experts"], (x, ids, weights), inputs, dy)
                for _ in range(3):
                    step()
                dist.barrier()
                row["ms"] = round(statistics.median(milliseconds(step, device, repeats)), 3)
                base = row["ms"] if precision == "bf16" else base
                row |= {
                    "ratio_to_bf16": round(base / row["ms"], 3),
                    "rank_load": round(rank_loads(model)["experts"], 3),
                }
            except Exception as error:
                row["error"] = failure(error)
            if dist.get_rank() == 0:
                report(row)
    dist.destroy_process_group()


def _step(module: nn.Module, given: tuple[Tensor, ...], inputs: list[Tensor], dy: Tensor) -> None:
    torch.autograd.grad(module(*given), inputs, dy)


# --- the command -----------------------------------------------------------------------------------------------------


def profile(shape: Shape, device: str) -> Iterator[str]:
    """Yield lines: the kernels of one step of the folded layer, longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    module, (x, ids, weights, dy) = Mixture(shape, device), _inputs(shape, device)
    convert(nn.ModuleDict({"experts": module}), "folded", policy=Policy(min_gain=0))
    for _ in range(3):
        torch.autograd.grad(module(x, ids, weights), [x, weights, *module.parameters()], dy)
    with profiler(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as found:
        torch.autograd.grad(module(x, ids, weights), [x, weights, *module.parameters()], dy)
        synchronize(device)
    events = sorted(found.key_averages(), key=lambda e: -e.device_time_total)[:24]
    for event in events:
        yield f"{event.device_time_total / 1e3:8.3f} ms  {event.count:>3} x  {event.key[:100]}"


def command(
    *,
    only: Names = (),
    recipe: str = "folded",
    device: str = "auto",
    repeats: int = 20,
    output: Output = TO_STDOUT,
) -> int:
    """Time a layer of experts beside BF16 grouped GEMMs, and a Qwen3-MoE in Transformers' Trainer.

    Examples:

        octavo bench moe
        octavo bench moe --only layer
        octavo bench moe --only trainer --only compiled --recipe folded_fast
        torchrun --nproc-per-node 2 -m octavo bench moe --only parallel

    Parameters
    ----------
    only
        layer, trainer (eager), compiled (the Trainer with torch_compile), causal (the same, and no mask for
        attention), profile or parallel; the first three by default.
    recipe
        Recipe in the Trainer.
    device
        cuda or cpu; auto takes the GPU if there is one.
    repeats
        Calls of a layer that are timed; the median counts.
    """
    device = device_named(device)
    parts = only or ("layer", "trainer", "compiled")
    line = command_line("octavo bench moe", only=only, recipe=recipe, repeats=repeats)
    rows, show = list[Row](), output.lines(_name, _figures)

    def report(row: Row) -> None:
        show(row)
        rows.append(row)
        output.save("moe", rows, line, device=device)  # in case a later row ends the process

    shapes = LAYERS if device == "cuda" else SMALL
    if "profile" in parts:
        for each in profile(shapes[0], device):
            output.say(each)
    if "layer" in parts:
        bench_layers(shapes, device, repeats, report)
    if "parallel" in parts:
        bench_parallel(shapes, device, repeats, report)
    for part, mode in MODES.items():
        if part in parts:
            bench_trainer(device, recipe, mode, report)
    return output.finish("moe", rows, line, device=device) if rows else 0


def _name(row: Row) -> str:
    return f"{row['workload']}  {row['implementation']:<42}"


def _figures(row: Row) -> str:
    kept = f"  keeps {row['kept_mib']:.0f} + {row['kept_weight_codes_mib']:.0f} MiB" if "kept_mib" in row else ""
    return f"{row['ms']:>9.3f} ms  {row['ratio_to_bf16']:.3f} of bf16{kept}{'  ' + row.get('fallbacks', '')}"
