"""Train a Qwen3-shaped model by transformers' own Trainer: BF16, torchao and Octavo, eager and compiled.

The Trainer is left as users have it: `bf16=True`, weights in FP32 under autocast, fused AdamW, `torch_compile` for the
whole model. Octavo and torchao each change the model by one call before it. Time is by the clock, from the end of the
warm-up to the end of the last step, so that what the Trainer does between steps counts.

While it is compiled, transformers gives attention a mask of all pairs of tokens, since it cannot tell packed sequences
from others there, and attention takes several times as long. The mode `torch_compile_causal` has the same attention
without the mask, in every implementation.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import octavo
from octavo.errors import NonFiniteError, UnsupportedError
from octavo.train.timing import synchronize
from octavo_bench.cli import TO_STDOUT, Names, Output, command_line, device_named, known, positive
from octavo_bench.implementations import BF16, is_no_head
from octavo_bench.results import Row, failure

WARM_UP = 4
"""Steps before the time begins: the first ones compile and tune."""
MODES = ("eager", "torch_compile", "torch_compile_causal")
CAUSAL = "sdpa_causal"
"""Name of transformers' own attention function where no mask is made for it."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The shape of a Qwen3, and of the batch that goes through it."""

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


MODELS = {
    model.name: model
    for model in (
        Model(name="qwen3-2048", dim=2048, ffn=6144, heads=16, kv_heads=8, head_dim=128, layers=6, vocab=32768,
              batch=4, sequence=4096),
        Model(name="tiny", dim=64, ffn=128, heads=2, kv_heads=1, head_dim=32, layers=1, vocab=64, batch=2, sequence=32),
    )
}  # fmt: skip
"""By name: Qwen3-1.7B's blocks, six of them with a small vocabulary; one for tests."""


def implementations(tokens: int) -> dict[str, Callable[[nn.Module], object]]:
    """Return what each implementation does to a model of that many tokens per step, by name; the baseline first."""
    found: dict[str, Callable[[nn.Module], object]] = {BF16: lambda model: None}
    if importlib.util.find_spec("torchao") is not None:
        found["torchao tensorwise"] = _convert_torchao
    for recipe in ("folded", "folded_fast"):
        found[f"octavo {recipe}"] = partial(octavo.convert, recipe=recipe, tokens=tokens)
    with_head = octavo.Policy(keep_defaults=False)
    found["octavo folded_fast + fp8 head"] = partial(octavo.convert, recipe="folded_fast", policy=with_head)
    return found


def _convert_torchao(model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, name: is_no_head(name, layer))


def bench_hf(
    model: Model,
    only: Sequence[str] = (),
    modes: Sequence[str] = MODES,
    *,
    device: str = "cuda",
    steps: int = 12,
    report: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Return a row per mode and implementation, as the result kind `hf` has them; one that fails has `error`.

    Args:
        only: implementations beside BF16; all if empty.
        steps: timed steps, after `WARM_UP` others.

    Raises:
        UnsupportedError: transformers or accelerate is not installed, or a name that is not there.
    """
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UnsupportedError(f"octavo bench hf needs {package}, which is not installed: pip install {package}.")
    found = implementations(model.batch * model.sequence)
    for name in only:
        known("--only", name, list(found), "implementation")
    rows: list[Row] = []
    for mode in modes:
        baseline: float | None = None
        for name in [name for name in found if name == BF16 or not only or name in only]:
            row: Row = {"model": model.name, "mode": mode, "implementation": name, "shape": asdict(model)}
            try:
                row |= _measure(model, found[name], mode, device, steps)
                baseline = row["tokens_per_s"] if name == BF16 else baseline
                if baseline is None:
                    raise UnsupportedError("BF16 of this mode failed, and there is nothing to compare with")
                row["ratio_to_bf16"] = round(row["tokens_per_s"] / baseline, 3)
            except Exception as error:  # one that fails must not lose the others
                row["error"] = failure(error)
            finally:
                _free(device)
            rows.append(row)
            report(row)
    return rows


def _measure(model: Model, convert: Callable[[nn.Module], object], mode: str, device: str, steps: int) -> Row:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        """Notes when the warm-up ended and when training did, each once the device is done."""

        def __init__(self) -> None:
            self.began = self.ended = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in (WARM_UP, WARM_UP + steps):
                synchronize(device)
                self.began, self.ended = self.ended, time.perf_counter()

    torch.manual_seed(0)
    made, clock = _make(model, device), Clock()
    convert(made)
    if mode == "torch_compile_causal":
        leave_out_mask(made)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=WARM_UP + steps,
            per_device_train_batch_size=model.batch,
            learning_rate=1e-4,
            optim="adamw_torch_fused",
            bf16=True,
            torch_compile=mode != "eager",
            use_cpu=device == "cpu",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        data = RandomTokens(model.vocab, model.sequence, model.batch * (WARM_UP + steps))
        result = Trainer(model=made, args=arguments, train_dataset=data, callbacks=[clock]).train()
    if not math.isfinite(result.training_loss):  # NaN draws less power than numbers: its time would be too good
        raise NonFiniteError("its loss is not finite, so its time means nothing.")
    seconds = clock.ended - clock.began
    return {
        "tokens_per_s": round(steps * model.batch * model.sequence / seconds),
        "ms": round(1e3 * seconds / steps, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if device == "cuda" else 0.0,
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
        return Qwen3ForCausalLM(config)


def leave_out_mask(model: Any) -> None:
    """Give a model of transformers its usual attention under a name that no mask is made for: it is causal."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(CAUSAL, sdpa_attention_forward)
    model.set_attn_implementation(CAUSAL)


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Sequences of random tokens, each its own labels."""

    def __init__(self, vocab: int, sequence: int, count: int) -> None:
        self._tokens = torch.randint(vocab, (count, sequence), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def _free(device: str) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def command(
    *,
    model: str = "qwen3-2048",
    mode: Names = MODES,
    only: Names = (),
    device: str = "auto",
    steps: int = 12,
    output: Output = TO_STDOUT,
) -> int:
    """Train a Qwen3-shaped model by transformers' own Trainer, eager and compiled: BF16, torchao if present, Octavo.

    Exits with 1 if an implementation failed; the others are measured all the same.

    Examples:

        octavo bench hf
        octavo bench hf --mode eager --only "octavo folded" --write benchmarks/results

    Parameters
    ----------
    model
        qwen3-2048 (six blocks of Qwen3-1.7B, 4 x 4,096 tokens) or tiny.
    mode
        eager, torch_compile (the Trainer's option) or torch_compile_causal (the same, and no mask for attention); all
        by default.
    only
        Implementations to run beside BF16; all by default.
    device
        cuda or cpu; auto takes the GPU if there is one.
    steps
        Steps timed, after a warm-up.
    """
    chosen = MODELS[known("--model", model, list(MODELS), "model")]
    modes = tuple(known("--mode", one, MODES, "mode") for one in mode)
    device, steps = device_named(device), positive("--steps", steps)
    rows = bench_hf(chosen, only, modes, device=device, steps=steps, report=output.lines(_name, _figures))
    line = command_line("octavo bench hf", model=model, mode=mode, only=only, steps=steps)
    return output.finish("hf", rows, line, device=device)


def _name(row: Row) -> str:
    return f"{row['model']:<11} {row['mode']:<21} {row['implementation']:<30}"


def _figures(row: Row) -> str:
    speed = f"{row['tokens_per_s']:>9,} tokens/s  {row['ratio_to_bf16']:.2f} x BF16"
    return f"{speed}  {row['peak_gib']:.1f} GiB  loss {row['loss']:.4f}"
