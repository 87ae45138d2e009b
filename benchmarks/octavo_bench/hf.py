"""Train a Qwen3-shaped model with transformers' Trainer: BF16, torchao and Octavo, eager and compiled.

The Trainer runs as for users: `bf16=True`, weights in FP32 under autocast or in BF16 by the model, fused AdamW. Octavo
and torchao each convert the model by one call before it. Time is wall time from the end of the warm-up to the end of
the last step, including the Trainer's work between steps.

The mode `torch_compile` compiles the whole model, `blocks` each of its blocks by `octavo.compile`, in every
implementation, BF16 included, as `OctavoCallback(compile=True)` does.

Under compilation transformers passes attention a mask of all pairs of tokens, since it cannot detect packed sequences
there, and attention takes several times as long. The mode `torch_compile_causal` has the same attention without the
mask, in every implementation.

`+ fusions` are those of `Policy(fuse="all")`, for BF16 as for FP8: norms, rotary embeddings and activations are one
kernel each way. With `+ loss` the head computes the loss by chunks of tokens as well. Both stand beside BF16 as it is,
and beside BF16 with the same fusions, which shows the share that FP8 has.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import octavo
from octavo.errors import NonFiniteError, UnsupportedError
from octavo.lab.train.timing import synchronize
from octavo_bench.implementations import BF16, TORCHAO, convert_torchao
from octavo_bench.kind import TO_STDOUT, Kind, Names, Output, device_named, known, positive
from octavo_bench.results import Row
from octavo_bench.timing import attempts, beside_first, peak_gib

WARM_UP = 4
"""Untimed first steps, which compile and autotune."""
MODES = ("eager", "torch_compile", "torch_compile_causal", "blocks")
FUSIONS, LOSS = " + fusions", " + loss"
"""Suffixes of implementations; those with one of them run in no mode that compiles the whole model."""
CAUSAL = "sdpa_causal"
"""Name that registers transformers' own attention function without a mask."""
KIND = Kind(
    name="hf",
    keys={
        "model": str, "mode": str, "implementation": str, "tokens_per_s": float, "ratio_to_bf16": float,
        "peak_gib": float,
    },
    columns=(
        ("model", "{model}"),
        ("mode", "{mode}"),
        ("implementation", "{implementation}"),
        ("tokens/s", "{tokens_per_s:,.0f}"),
        ("times BF16's speed", "{ratio_to_bf16:.2f}"),
        ("times that of BF16 with the same fusions", "{ratio_to_bf16_alike:.2f}"),
        ("peak GiB", "{peak_gib:.1f}"),
    ),
    names=3,
    told=(("loss", "{loss:.4f}"),),
    session=("hardware", "model", "mode"),  # each beside BF16 of its own
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """Shape of a Qwen3 and of its batch."""

    name: str
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    batch: int
    sequence: int
    weights: str = "fp32"
    """fp32, which autocast rounds, or bf16."""


MODELS = {
    model.name: model
    for model in (
        Model(name="qwen3-2048", dim=2048, ffn=6144, heads=16, kv_heads=8, head_dim=128, layers=6, vocab=32768,
              batch=4, sequence=4096),
        Model(name="qwen3-2048-bf16", dim=2048, ffn=6144, heads=16, kv_heads=8, head_dim=128, layers=8, vocab=32768,
              batch=4, sequence=4096, weights="bf16"),
        Model(name="tiny", dim=64, ffn=128, heads=2, kv_heads=1, head_dim=32, layers=1, vocab=64, batch=2, sequence=32),
        Model(name="tiny-bf16", dim=64, ffn=128, heads=2, kv_heads=1, head_dim=32, layers=2, vocab=64, batch=2,
              sequence=32, weights="bf16"),
    )
}  # fmt: skip
"""By name: blocks of Qwen3-1.7B with a small vocabulary; those for tests."""


def implementations(tokens: int) -> dict[str, Callable[[nn.Module], object]]:
    """Return the conversion of each implementation by name, for `tokens` per step; the baseline first."""
    found: dict[str, Callable[[nn.Module], object]] = {BF16: lambda model: None, **_fused(BF16, "bf16", tokens)}
    if importlib.util.find_spec("torchao") is not None:
        found[TORCHAO] = convert_torchao
    for recipe in ("folded", "folded_fast", "rotated", "rotated_fast"):
        found[f"octavo {recipe}"] = partial(octavo.convert, recipe=recipe, tokens=tokens)
    with_head = octavo.Policy(keep_defaults=False)
    for recipe in ("folded_fast", "rotated_fast"):
        found[f"octavo {recipe} + fp8 head"] = partial(octavo.convert, recipe=recipe, policy=with_head)
    for recipe in ("folded", "rotated"):
        found |= _fused(f"octavo {recipe}", recipe, tokens)
    return found


def _fused(name: str, recipe: str, tokens: int) -> dict[str, Callable[[nn.Module], object]]:
    """Return the conversions of an implementation by names that say what is fused."""
    return {
        name + suffix: partial(_fuse, recipe=recipe, tokens=tokens, loss=suffix.endswith(LOSS))
        for suffix in (FUSIONS, FUSIONS + LOSS)
    }


def _fuse(model: nn.Module, recipe: str, tokens: int, loss: bool) -> None:
    """Convert a model with all fusions, and fuse its loss with its head if asked to."""
    from octavo.integrations.head_loss import fuse_head_and_loss

    octavo.convert(model, recipe, policy=octavo.Policy(fuse="all"), tokens=tokens)
    if loss:
        fuse_head_and_loss(model)


def bench_hf(
    model: Model,
    only: Sequence[str] = (),
    modes: Sequence[str] = MODES,
    *,
    device: str = "cuda",
    steps: int = 12,
) -> Iterator[Row]:
    """Yield a row per mode and implementation; rows of failed ones have `error`.

    Args:
        only: implementations besides BF16; all if empty.
        steps: timed steps, after `WARM_UP` untimed ones.

    Raises:
        ConfigError: an unknown name.
        UnsupportedError: transformers or accelerate is not installed.
    """
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UnsupportedError(f"octavo bench hf needs {package}, which is not installed: pip install {package}.")
    found = implementations(model.batch * model.sequence)
    chosen = {BF16, *(known("--only", name, list(found), "implementation") for name in only or found)}
    for mode in modes:
        cases = (
            ({"model": model.name, "mode": mode, "implementation": name, "shape": asdict(model)},
             partial(_measure, model, convert, mode, device, steps))
            for name, convert in found.items()
            if name in chosen and not (mode.startswith("torch_compile") and FUSIONS in name)
        )  # fmt: skip
        yield from _beside_alike(beside_first(attempts(cases, device)))


def _beside_alike(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows, each but BF16's with its speed beside BF16 with the same fusions, if that was measured."""
    baselines: dict[str, float] = {}
    for row in rows:
        name, plus, suffix = row["implementation"].partition(FUSIONS)
        alike = plus + suffix
        if "ms" in row and name == BF16:
            baselines[alike] = row["ms"]
        elif "ms" in row and alike and alike in baselines:
            row |= {"ratio_to_bf16_alike": round(baselines[alike] / row["ms"], 3)}
        yield row


def _measure(model: Model, convert: Callable[[nn.Module], object], mode: str, device: str, steps: int) -> Row:
    torch.manual_seed(0)
    made = _make(model, device)
    convert(made)
    return train(made, model.batch, model.sequence, mode, device=device, steps=steps)


def train(model: Any, batch: int, sequence: int, mode: str, *, device: str, steps: int) -> Row:
    """Train a model of transformers by its Trainer on random tokens; return speed, peak memory and loss.

    Args:
        batch: sequences per step.
        mode: one of `MODES`.
        steps: timed steps, after `WARM_UP` untimed ones.

    Raises:
        NonFiniteError: the loss is not finite.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from octavo.integrations.full_masks import mark_full_masks

    class Clock(TrainerCallback):
        """Records the end of the warm-up and of training, each synchronised with the device."""

        def __init__(self) -> None:
            self.began = self.ended = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (WARM_UP, WARM_UP + steps):
                synchronize(device)
                self.began, self.ended = self.ended, time.perf_counter()

    clock = Clock()
    if mode == "torch_compile_causal":
        leave_out_mask(model)
    if mode == "blocks":
        mark_full_masks(model)
        octavo.compile(model)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=WARM_UP + steps,
            per_device_train_batch_size=batch,
            learning_rate=1e-4,
            optim="adamw_torch_fused",
            bf16=True,
            torch_compile=mode.startswith("torch_compile"),
            use_cpu=device == "cpu",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        shape, draw = (batch * (WARM_UP + steps), sequence), torch.Generator().manual_seed(0)
        tokens = torch.randint(model.config.vocab_size, shape, generator=draw)
        data: Any = [{"input_ids": ids, "labels": ids} for ids in tokens]
        result = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[clock]).train()
    if not math.isfinite(result.training_loss):  # NaN draws less power than numbers: its time would be too short
        raise NonFiniteError("its loss is not finite, so its time is meaningless.")
    seconds = clock.ended - clock.began
    return {
        "tokens_per_s": round(steps * batch * sequence / seconds),
        "ms": round(1e3 * seconds / steps, 2),
        "peak_gib": round(peak_gib(device), 2),
        "loss": round(result.training_loss, 6),
    }


def _make(model: Model, device: str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=model.vocab,
        hidden_size=model.dim,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.sequence,
        use_cache=False,
    )
    with torch.device(device):
        made = Qwen3ForCausalLM(config)
    return made.bfloat16() if model.weights == "bf16" else made


def leave_out_mask(model: Any) -> None:
    """Set a model's usual attention under a name for which transformers makes no mask: it is then causal."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(CAUSAL, sdpa_attention_forward)
    model.set_attn_implementation(CAUSAL)


def command(
    *,
    model: str = "qwen3-2048",
    mode: Names = MODES,
    only: Names = (),
    device: str = "auto",
    steps: int = 12,
    output: Output = TO_STDOUT,
) -> int:
    """Train a Qwen3-shaped model with transformers' Trainer, eager and compiled: BF16, torchao if present, Octavo.

    Exits with 1 if an implementation failed, after measuring the others.

    Examples:

        octavo bench hf
        octavo bench hf --mode eager --only "octavo folded" --write benchmarks/results
        octavo bench hf --model qwen3-2048-bf16 --mode eager --mode blocks --only "octavo folded"
        octavo bench hf --model qwen3-2048-bf16 --mode eager --only "bf16 + fusions" --only "octavo rotated + fusions"

    Parameters
    ----------
    model
        qwen3-2048 (six blocks of Qwen3-1.7B, 4 x 4,096 tokens), qwen3-2048-bf16 (eight, with weights in BF16), tiny or
        tiny-bf16.
    mode
        eager, torch_compile (the Trainer's option), torch_compile_causal (the same without an attention mask) or blocks
        (each compiled by octavo.compile); all by default.
    only
        Implementations to run besides BF16; all by default.
    device
        cuda or cpu; auto takes the GPU if there is one.
    steps
        Timed steps, after a warm-up.
    """
    chosen = MODELS[known("--model", model, list(MODELS), "model")]
    modes = tuple(known("--mode", one, MODES, "mode") for one in mode)
    device, steps = device_named(device), positive("--steps", steps)
    rows = bench_hf(chosen, only, modes, device=device, steps=steps)
    return output.finish(KIND, rows, device=device, model=model, mode=mode, only=only, steps=steps)
