"""`octavo bench clients`: training loops of other libraries, in BF16 and with the lines that users add for Octavo.

Each client trains a small Llama with compiled blocks on the same sequences: transformers' Llama, or torchtitan's own.
The FP8 run is repeated from the checkpoint that it saved half-way, by the client's own mechanism.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

import octavo
from octavo._util.optimizer_steps import after_outermost_step
from octavo.lab.train.timing import synchronize
from octavo.nn import GroupedLinear
from octavo.nn.conv import Convolution
from octavo.nn.linear import LinearLayer
from octavo_bench import results
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, device_named, known, positive
from octavo_bench.render import figures, has_failed
from octavo_bench.results import Row
from octavo_bench.timing import attempt, free, peak_gib

WARM_UP = 20
"""Untimed first steps, which compile and autotune."""
VOCABULARY = 8192
LAST = 5
"""Last steps, over which the loss is averaged."""


COLUMNS = (
    ("client", "{client}"),
    ("library", "{library} {version}"),
    ("lines", "{lines}"),
    ("layers in FP8", "{fp8_layers}"),
    ("loss relative to BF16", "{gap_percent:+z.2f} %"),
    ("resumed", "{resumed}"),
    ("graphs (BF16's)", "{graphs} ({bf16_graphs})"),
    ("graph breaks", "{graph_breaks}"),
)


def table(directory: Path) -> str:
    """Return one line per client, from a CPU result if there is one, with the speed on each GPU."""
    found = results.newest("clients", directory)
    gpus = [result for result in found if result.hardware.startswith("nvidia")]
    rows: dict[str, Row] = {}
    for result in sorted(found, key=gpus.__contains__):  # those of a CPU first
        for row in KIND.with_derived(result.rows):
            rows.setdefault(row["client"], {**row})
            if result in gpus and not has_failed(row):
                rows[row["client"]][result.hardware] = f"{row['ratio_to_bf16']:.2f}"
    speeds = [(f"times BF16's speed, {gpu.hardware}", f"{{{gpu.hardware}}}") for gpu in gpus]
    parts = [figures((*COLUMNS, *speeds), list(rows.values()), 2)] if rows else []
    return "\n\n".join([*parts, *(result.origin for result in found)])


KIND = Kind(
    name="clients",
    keys={
        "client": str, "library": str, "version": str, "lines": int, "fp8_layers": int, "gap_percent": float,
        "graphs": int, "graph_breaks": int, "ratio_to_bf16": float,
    },
    columns=COLUMNS,
    names=2,
    told=(("ms (BF16's)", "{ms:.1f} ({bf16_ms:.1f})"), ("times BF16's speed", "{ratio_to_bf16:.2f}")),
    derived=lambda row: {"resumed": {None: "", True: "bit for bit", False: "differs"}[row.get("resumes")]},
    tables={"clients": table},
    session=("hardware", "client"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Shape of the model and of its batches."""

    dim: int
    layers: int
    length: int
    batch: int
    lr: float

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.length


SIZES = {
    "cuda": Size(dim=2048, layers=4, length=2048, batch=8, lr=3e-4),
    "cpu": Size(dim=128, layers=2, length=24, batch=4, lr=1e-3),
}
"""By device. CPU times are meaningless, and the rest can be measured on a small model."""


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that count up by 1 to 16 from one of 64 tokens: learnable, without any text."""

    def __init__(self, count: int, length: int) -> None:
        draw = torch.Generator().manual_seed(0)
        start = torch.randint(64, (count, 1), generator=draw)
        self.ids = (start + torch.arange(length) * torch.randint(1, 17, (count, 1), generator=draw)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Clock:
    """Optimizer steps of a run: their number, the time after the warm-up, and the losses reported by its loop."""

    def __init__(self, steps: int) -> None:
        self.last, self.steps, self.losses = steps, 0, list[Tensor]()
        self.started = self.ended = 0.0

    def step(self, stepped: Sequence[Optimizer]) -> None:
        """Count a training step, of however many optimizers; synchronise only at the ends of the timed interval."""
        self.steps += 1
        if self.steps in (WARM_UP, self.last):
            synchronize("cuda" if torch.cuda.is_available() else "cpu")
            now = time.perf_counter()
            self.started, self.ended = (now, 0.0) if self.steps == WARM_UP else (self.started, now)

    def keep(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the loss of a forward pass, without synchronising."""
        if output.loss is not None:
            self.losses.append(output.loss.detach())

    @property
    def ms(self) -> float:
        """Milliseconds per step."""
        return 1e3 * (self.ended - self.started) / max(self.last - WARM_UP, 1)


@dataclass(kw_only=True, slots=True)
class Job:
    """One run of a client's loop."""

    size: Size
    device: str
    steps: int
    fp8: bool
    clock: Clock
    folder: Path
    """Directory of the checkpoint after half of the steps."""
    saves: bool = False
    """Whether to write it."""
    resumes: bool = False
    """Whether to train only the second half, from that checkpoint."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Checkpoint in memory, for loops without files of their own."""

    @property
    def half(self) -> int:
        """The step after which the checkpoint is written."""
        return self.steps // 2

    def data(self, sequences: int | None = None) -> Sequences:
        """Return the sequences, those of all steps by default."""
        return Sequences(sequences or self.size.batch * self.steps, self.size.length)

    def batches(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield the batches of the steps to train, numbered from 1, on the device."""
        loader = torch.utils.data.DataLoader(self.data(), batch_size=self.size.batch)
        for step, batch in enumerate(loader, start=1):
            if step > self.half or not self.resumes:
                yield step, {name: x.to(self.device, non_blocking=True) for name, x in batch.items()}

    def llama(self, compiled: bool = True) -> Any:
        """Return the model, its losses recorded by the clock; each block is compiled at its first call."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        heads = max(1, self.size.dim // 128)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=self.size.dim, intermediate_size=4 * self.size.dim, use_cache=False,
            num_hidden_layers=self.size.layers, num_attention_heads=heads, num_key_value_heads=heads,
        )  # fmt: skip
        with torch.device(self.device):
            model = LlamaForCausalLM(config)
        for layer in model.model.layers if compiled else ():
            layer.compile(backend=self.backend)
        model.register_forward_hook(self.clock.keep)
        return model

    @property
    def backend(self) -> str:
        """Backend of `torch.compile`: on a CPU only graphs are counted, so no code is generated."""
        return "inductor" if self.device == "cuda" else "aot_eager"

    def adamw(self, model: nn.Module, faster: int = 1) -> torch.optim.AdamW:
        """Return the optimizer, for loops that accept one."""
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=faster * self.size.lr, fused=self.device == "cuda")


def script(job: Job) -> nn.Module:
    """Train in a loop without a library."""
    model = job.llama()
    if job.fp8:
        octavo.convert(model)
    optimizer = job.adamw(model)
    if job.resumes:
        model.load_state_dict(job.kept["model"])
        optimizer.load_state_dict(job.kept["optimizer"])

    def save() -> None:
        job.kept = deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    _loop(job, model, optimizer, save)
    return model  # type: ignore[no-any-return]


def _loop(
    job: Job,
    model: nn.Module,
    optimizer: Any,
    save: Callable[[], Any],
    *,
    backward: Callable[[Tensor], Any] = Tensor.backward,
    autocast: bool = True,
) -> None:
    for step, batch in job.batches():
        with torch.autocast(job.device, torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == job.half and job.saves:
            save()


def trainer(job: Job) -> nn.Module:
    """Train by transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    return _fit(job, Trainer, TrainingArguments(**_arguments(job)), job.data())


def sft(job: Job) -> nn.Module:
    """Train by TRL's SFTTrainer, on tokenised sequences."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    settings = SFTConfig(**_arguments(job), max_length=job.size.length, gradient_checkpointing=False)
    data = Dataset.from_dict({"input_ids": job.data().ids.tolist()})
    return _fit(job, SFTTrainer, settings, data, processing_class=tokenizer)


def _arguments(job: Job) -> dict[str, Any]:
    return {
        "output_dir": str(job.folder), "max_steps": job.steps, "per_device_train_batch_size": job.size.batch,
        "learning_rate": job.size.lr, "bf16": True, "max_grad_norm": 0.0, "use_cpu": job.device == "cpu",
        "save_strategy": "steps" if job.saves else "no", "save_steps": job.half, "logging_steps": 1000,
        "report_to": [], "disable_tqdm": True,
    }  # fmt: skip


def _fit(job: Job, kind: Any, settings: Any, data: Any, **given: Any) -> nn.Module:
    from octavo.integrations.transformers import OctavoCallback

    callbacks = [OctavoCallback()] if job.fp8 else []
    made = kind(model=job.llama(), args=settings, train_dataset=data, callbacks=callbacks, **given)
    made.train(resume_from_checkpoint=str(job.folder / f"checkpoint-{job.half}") if job.resumes else None)
    trained: nn.Module = made.model
    return trained


def lightning(job: Job) -> nn.Module:
    """Train by Lightning's Trainer: an epoch is half of the steps, as it resumes at the end of one."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from octavo.integrations.lightning import OctavoPrecision

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]  # without lightning
        def __init__(self) -> None:
            super().__init__()
            self.model = job.llama()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Optimizer:
            return job.adamw(self)

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    quiet |= {"accelerator": "gpu" if job.device == "cuda" else "cpu", "devices": 1, "max_epochs": 2}
    quiet |= {"plugins": OctavoPrecision(device=job.device)} if job.fp8 else {"precision": "bf16-mixed"}
    quiet |= {"enable_checkpointing": job.saves, "callbacks": []}
    if job.saves:
        quiet["callbacks"] = [ModelCheckpoint(job.folder, "half-{epoch}", save_top_k=-1)]
    loader = torch.utils.data.DataLoader(job.data(job.size.batch * job.half), batch_size=job.size.batch)
    module = Module()
    resume = {"ckpt_path": job.folder / "half-epoch=0.ckpt", "weights_only": True} if job.resumes else {}
    lightning.Trainer(**quiet).fit(module, loader, **resume)
    return module


def fabric(job: Job) -> nn.Module:
    """Train in a loop over Lightning's Fabric."""
    from lightning.fabric import Fabric

    from octavo.integrations.lightning import FabricPrecision

    precision: Any = {"plugins": FabricPrecision(device=job.device)} if job.fp8 else {"precision": "bf16-mixed"}
    made = Fabric(accelerator="gpu" if job.device == "cuda" else "cpu", devices=1, **precision)
    model = job.llama()
    model, optimizer = made.setup(model, job.adamw(model))
    state = {"model": model, "optimizer": optimizer}
    if job.resumes:
        made.load(job.folder / "half.ckpt", state)
    _loop(
        job,
        model,
        optimizer,
        lambda: made.save(job.folder / "half.ckpt", state),
        backward=made.backward,
        autocast=False,
    )
    return model  # type: ignore[no-any-return]


def accelerate(job: Job) -> nn.Module:
    """Train in a loop over Accelerate."""
    from accelerate import Accelerator

    made = Accelerator(mixed_precision="bf16", cpu=job.device == "cpu")
    model = job.llama()
    if job.fp8:
        octavo.convert(model)
    model, optimizer = made.prepare(model, job.adamw(model))
    if job.resumes:
        made.load_state(str(job.folder))
    _loop(job, model, optimizer, lambda: made.save_state(str(job.folder)), backward=made.backward, autocast=False)
    return model  # type: ignore[no-any-return]


def lora(job: Job) -> nn.Module:
    """Train PEFT's LoRA adapters over a frozen base, in BF16 or with one-byte weights."""
    from peft import LoraConfig, PeftModel, get_peft_model

    model = job.llama().bfloat16()
    if job.fp8:
        octavo.convert(model, policy=octavo.Policy(weights="fp8"))
    adapted: Any
    if job.resumes:
        adapted = PeftModel.from_pretrained(model, job.folder, is_trainable=True)
    else:
        torch.manual_seed(1)
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        adapted = get_peft_model(model, LoraConfig(r=16, target_modules=targets, lora_dropout=0.0))
    optimizer = job.adamw(adapted, faster=10)
    if job.resumes:
        optimizer.load_state_dict(job.kept["optimizer"])

    def save() -> None:
        adapted.save_pretrained(job.folder)
        job.kept["optimizer"] = deepcopy(optimizer.state_dict())

    _loop(job, adapted, optimizer, save)
    return adapted  # type: ignore[no-any-return]


def zero3(job: Job) -> nn.Module:
    """Train by DeepSpeed's engine, ZeRO-3."""
    import deepspeed

    model = job.llama(compiled=False)  # its hooks cannot be compiled
    if job.fp8:
        octavo.convert(model)
    if job.device == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes
    settings = {
        "train_micro_batch_size_per_gpu": job.size.batch,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=job.adamw(model), config=settings)
    if job.resumes:
        engine.load_checkpoint(str(job.folder), "half")
    stepped = SimpleNamespace(step=engine.step, zero_grad=lambda: None)
    _loop(job, engine, stepped, lambda: engine.save_checkpoint(str(job.folder), "half"), backward=engine.backward)
    weights = list(model.parameters())
    with deepspeed.zero.GatheredParameters(weights):
        whole = [p.detach().clone() for p in weights]
    for p, value in zip(weights, whole, strict=True):
        p.data = value
    return model  # type: ignore[no-any-return]


def torchtitan(job: Job) -> nn.Module:
    """Train torchtitan's Llama by its own Trainer, with FSDP and full activation checkpointing."""
    from octavo_bench.titan import train

    return train(job)


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """A library and its training loop."""

    library: str
    loop: Callable[[Job], nn.Module]
    lines: int
    """Lines that users add or change, as documented."""
    is_distributed: bool = False
    """Whether it starts a process group even for one rank."""


CLIENTS = {
    "script": Client(library="torch", loop=script, lines=1),
    "Trainer": Client(library="transformers", loop=trainer, lines=2),
    "SFTTrainer": Client(library="trl", loop=sft, lines=2),
    "Lightning": Client(library="lightning", loop=lightning, lines=2),
    "Fabric": Client(library="lightning", loop=fabric, lines=2),
    "Accelerate": Client(library="accelerate", loop=accelerate, lines=1),
    "ZeRO-3": Client(library="deepspeed", loop=zero3, lines=1, is_distributed=True),
    "LoRA": Client(library="peft", loop=lora, lines=2),
    "torchtitan": Client(library="torchtitan", loop=torchtitan, lines=2, is_distributed=True),
}


@contextmanager
def one_rank() -> Iterator[None]:
    """Set the environment of a one-rank process group; only for libraries that start one, as others then would too."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    before = {name: os.environ.get(name) for name in place}
    os.environ.update(place)
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def timed(clock: Clock) -> Iterator[None]:
    """Let a clock count the outermost optimizer steps in the context."""
    remove = after_outermost_step(clock.step)
    try:
        yield
    finally:
        remove()


def measure(client: Client, size: Size, device: str, steps: int, resume: bool = True) -> Row:
    """Return the figures of a client: BF16 and FP8 side by side, and whether a resumed run is bitwise equal.

    Args:
        resume: whether to save the FP8 run half-way and to repeat its second half from there.
    """
    with tempfile.TemporaryDirectory() as name, one_rank() if client.is_distributed else nullcontext():
        job = Job(size=size, device=device, steps=steps, fp8=False, clock=Clock(steps), folder=Path(name))
        bf16, _ = _run(client, job)
        job = replace(job, fp8=True, saves=resume, clock=Clock(steps))
        fp8, weights = _run(client, job)
        found = {"resumes": _resumes(client, job, weights)} if resume else {}
    return {
        "lines": client.lines,
        **found,
        "gap_percent": 100 * (fp8["loss"] / bf16["loss"] - 1),
        "ratio_to_bf16": bf16["ms"] / fp8["ms"],
        **fp8,
        **{f"bf16_{key}": value for key, value in bf16.items() if key != "fp8_layers"},
    }


def _resumes(client: Client, job: Job, weights: list[Tensor]) -> bool:
    """Return whether a run resumed from the checkpoint takes half of the steps and ends with the same weights."""
    again = replace(job, saves=False, resumes=True, clock=Clock(job.steps - job.half))
    _, found = _run(client, again)
    same = len(weights) == len(found) and all(torch.equal(p, q) for p, q in zip(weights, found, strict=True))
    return same and len(again.clock.losses) == job.steps - job.half


def _run(client: Client, job: Job) -> tuple[Row, list[Tensor]]:
    """Return the figures of one run, and its trained weights."""
    free(job.device)
    torch._dynamo.utils.counters.clear()
    with timed(job.clock):
        model = client.loop(job)
    counters = torch._dynamo.utils.counters
    losses = job.clock.losses
    row = {
        "loss": float(torch.stack(losses[-LAST:]).mean()),
        "first_loss": float(losses[0]),
        "ms": job.clock.ms,
        "fp8_layers": fp8_layers(model),
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
    }
    if job.device == "cuda":
        row["peak_gib"] = peak_gib(job.device)
    trained = [p.detach() for p in model.parameters() if p.requires_grad]
    return row, [(p.to_local() if isinstance(p, DTensor) else p).clone() for p in trained]


def fp8_layers(model: nn.Module) -> int:
    """Return the number of layers that compute in FP8: linear ones of every kind, convolutions and GEMMs of experts."""
    layers = (module for module in model.modules() if isinstance(module, LinearLayer | Convolution | GroupedLinear))
    return sum(layer.recipe.is_fp8 for layer in layers)


def bench_clients(
    only: Names = (),
    *,
    device: str,
    size: Size,
    steps: int,
    resume: bool = True,
) -> Iterator[Row]:
    """Yield a row per installed client, or per client of `only`; rows of failed ones have `error`."""
    for name, client in CLIENTS.items():
        version = version_of(client.library)
        if (only and name not in only) or (version is None and not only):
            continue
        row: Row = {"client": name, "library": client.library, "version": version or "not installed"}
        row |= {"dim": size.dim, "layers": size.layers, "tokens": size.tokens, "steps": steps}
        yield attempt(row, partial(measure, client, size, device, steps, resume))


def version_of(library: str) -> str | None:
    """Return the version of an installed library, or None."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def sized(size: Size, given: Mapping[str, int]) -> Size:
    """Return a size with its fields replaced by the non-zero numbers given."""
    return replace(size, **{name: positive(f"--{name}", value) for name, value in given.items() if value})


def command(
    *,
    only: Names = (),
    device: str = "auto",
    steps: int = 56,
    dim: int = 0,
    batch: int = 0,
    resume: bool | None = None,
    output: Output = TO_STDOUT,
) -> int:
    """Train with other libraries' training loops, in BF16 and FP8: loss, resumed runs, compiled graphs, time per step.

    Clients that are not installed are skipped. Exits with 1 if one failed, after measuring the others.

    Examples:

        octavo bench clients --write benchmarks/results
        octavo bench clients --only Trainer --only LoRA

    Parameters
    ----------
    only
        Clients to measure: script, Trainer, SFTTrainer, Lightning, Fabric, Accelerate, ZeRO-3, LoRA, torchtitan. All
        installed ones by default.
    device
        cuda or cpu; auto takes the GPU if there is one.
    steps
        Steps to train; the first 20 are not timed.
    dim
        Width of the model: 2048 on a GPU, 128 on a CPU by default.
    batch
        Sequences per step: 8 on a GPU, 4 on a CPU by default.
    resume
        Also resume the FP8 run from a checkpoint; by default on a CPU, where checkpoints are small.
    """
    for name in only:
        known("--only", name, list(CLIENTS), "client")
    device, steps = device_named(device), 2 * (positive("--steps", steps) // 2)
    size = sized(SIZES[device], {"dim": dim, "batch": batch})
    resume = device == "cpu" if resume is None else resume
    rows = bench_clients(only, device=device, size=size, steps=steps, resume=resume)
    flags = {"only": only, "steps": steps, "dim": dim or None, "batch": batch or None}
    return output.finish(KIND, rows, device=device, **flags, resume=resume and device == "cuda")
