"""Training loops of other libraries, in BF16 and with the lines that Octavo's users add: loss and time per step.

    python -m octavo_bench.clients --out clients.json --dim 2048

Each client trains the same small Llama of transformers on the same sequences, its blocks compiled. The time per step is
the mean after the first `WARM_UP` steps, between two synchronisations. A client that is not installed is left out, with
the reason.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import octavo
from octavo.nn import Linear

WARM_UP = 20
VOCABULARY = 8192


class Sequences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that count up by 1 to 16 from a random token: a model learns them, and no text is needed."""

    def __init__(self, count: int, length: int) -> None:
        draw = torch.Generator().manual_seed(0)
        start = torch.randint(VOCABULARY, (count, 1), generator=draw)
        self.ids = (start + torch.arange(length) * torch.randint(1, 17, (count, 1), generator=draw)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Clock:
    """Optimizer steps of a run: their number, the time after the warm-up, and the losses that its loop reports."""

    def __init__(self, steps: int) -> None:
        self.last, self.steps, self.losses = steps, 0, list[Tensor]()
        self.started = self.ended = 0.0

    def step(self, *_: Any) -> None:
        """Count an optimizer step; wait for the device at the ends of what is timed, and nowhere else."""
        self.steps += 1
        if self.steps in (WARM_UP, self.last):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.started, self.ended = (now, 0.0) if self.steps == WARM_UP else (self.started, now)

    def keep(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the loss of a forward, without waiting for it."""
        if output.loss is not None:
            self.losses.append(output.loss.detach())

    @property
    def ms(self) -> float:
        """Milliseconds per step."""
        return 1e3 * (self.ended - self.started) / max(self.last - WARM_UP, 1)


@contextmanager
def timed(clock: Clock, model: nn.Module) -> Iterator[None]:
    """Let a clock see the steps of any optimizer and the losses of a model inside the block."""
    handles: list[Any] = [register_optimizer_step_post_hook(clock.step), model.register_forward_hook(clock.keep)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def llama(dim: int, layers: int, compiled: bool) -> Any:
    """Return the model, on its device, with each block compiled at its first call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=dim, intermediate_size=4 * dim, num_hidden_layers=layers,
        num_attention_heads=dim // 128, num_key_value_heads=dim // 128, use_cache=False,
    )  # fmt: skip
    made: Any = LlamaForCausalLM(config)
    model = made.to("cuda" if torch.cuda.is_available() else "cpu")
    for layer in model.model.layers if compiled else ():
        layer.compile()
    return model


def trainer(model: Any, data: Sequences, batch: int, steps: int, fp8: bool) -> None:
    """Train by transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    from octavo.integrations.transformers import OctavoCallback

    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out, max_steps=steps, per_device_train_batch_size=batch, bf16=True, logging_steps=1000,
            learning_rate=3e-4, save_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=0.0,
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        callbacks: list[Any] = [OctavoCallback()] if fp8 else []
        Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks).train()


def lightning(model: Any, data: Sequences, batch: int, steps: int, fp8: bool) -> None:
    """Train by Lightning's Trainer."""
    import lightning

    from octavo.integrations.lightning import OctavoPrecision

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]  # without lightning
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-4)

    off = ("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary")
    quiet: dict[str, Any] = dict.fromkeys(off, False)
    precision: Any = {"plugins": OctavoPrecision()} if fp8 else {"precision": "bf16-mixed"}
    loader = torch.utils.data.DataLoader(data, batch_size=batch)
    lightning.Trainer(max_steps=steps, devices=1, **quiet, **precision).fit(Module(), loader)


def script(model: Any, data: Sequences, batch: int, steps: int, fp8: bool) -> None:
    """Train in a loop without a library."""
    if fp8:
        octavo.convert(model)
    _loop(model, data, batch, steps)


def lora(model: Any, data: Sequences, batch: int, steps: int, fp8: bool) -> None:
    """Train adapters of PEFT over a frozen base: in BF16, or its weights in one byte each."""
    from peft import LoraConfig, get_peft_model

    model.bfloat16()
    if fp8:
        octavo.convert(model, policy=octavo.Policy(weights="fp8"))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    adapted: Any = get_peft_model(model, LoraConfig(r=16, target_modules=targets, lora_dropout=0.0))
    _loop(adapted, data, batch, steps)


def _loop(model: Any, data: Sequences, batch: int, steps: int) -> None:
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    for _, given in zip(range(steps), torch.utils.data.DataLoader(data, batch_size=batch), strict=False):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**{name: x.to(device, non_blocking=True) for name, x in given.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


Loop = Callable[[Any, Sequences, int, int, bool], None]
CLIENTS: dict[str, tuple[str, Loop, int]] = {
    "script": ("torch", script, 1),
    "trainer": ("transformers", trainer, 2),
    "lightning": ("lightning", lightning, 2),
    "lora": ("peft", lora, 1),
}
"""Name -> the library, the loop, and the lines that a user writes or changes."""


def measure(name: str, dim: int, layers: int, length: int, batch: int, steps: int, compiled: bool) -> dict[str, Any]:
    """Return the row of a client: loss and milliseconds per step of both precisions, and their peaks of memory."""
    library, loop, lines = CLIENTS[name]
    row: dict[str, Any] = {"client": name, "library": library, "lines": lines, "dim": dim, "tokens": batch * length}
    try:
        row["version"] = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return {**row, "skipped": f"{library} is not installed"}
    data = Sequences(batch * steps, length)
    for precision in ("bf16", "fp8"):
        torch._dynamo.reset()
        model, clock = llama(dim, layers, compiled), Clock(steps)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with timed(clock, model):
            loop(model, data, batch, steps, precision == "fp8")
        row[precision] = {"loss": float(torch.stack(clock.losses[-5:]).mean()), "ms": clock.ms}
        if torch.cuda.is_available():
            row[precision]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row[precision]["fp8_layers"] = sum(isinstance(module, Linear) for module in model.modules())
        row[precision]["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        del model
    row["gap"] = row["fp8"]["loss"] / row["bf16"]["loss"] - 1
    row["speedup"] = row["bf16"]["ms"] / row["fp8"]["ms"]
    return row


def main() -> None:
    """Measure, print a table, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clients", nargs="*", default=list(CLIENTS), choices=list(CLIENTS))
    for name, default in {"dim": 2048, "layers": 4, "length": 2048, "batch": 4, "steps": 55}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    sizes = given.dim, given.layers, given.length, given.batch, given.steps
    rows = [measure(name, *sizes, not given.eager) for name in given.clients]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    result = {"device": device, "torch": torch.__version__, "rows": rows}
    given.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    for row in rows:
        if "skipped" in row:
            print(f"{row['client']:10} {row['skipped']}")
            continue
        print(
            f"{row['client']:10} {row['version']:12} {row['fp8']['fp8_layers']} layers, {row['fp8']['graphs']} graphs, "
            f"gap {row['gap']:+.2%}, {row['bf16']['ms']:.1f} -> {row['fp8']['ms']:.1f} ms: {row['speedup']:.2f} times"
        )


if __name__ == "__main__":
    main()
