"""Decoding of an exported model by Octavo's kernels, beside the model in BF16: tokens per second by batch.

The model is written by `octavo.export`, and decoded by the codes that are in the file: the weights are quantised once,
and compared with it byte by byte. One step gives each sequence of a batch one more token, with keys and values of its
context in a cache; each step has the same context. On a GPU the step is a CUDA graph, as in engines, so that Python
takes no part in its time.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from octavo.conversion import Policy, convert
from octavo.errors import RunError
from octavo.lab.train.subject import Subject
from octavo.lab.train.timing import milliseconds, warm_up
from octavo.nn.code_reuse import quantising_layers, reuse_weight_codes
from octavo.nn.fused import fusion_groups
from octavo.nn.linear import LinearLayer
from octavo.numerics import Quantized
from octavo.serving import export
from octavo.serving.formats import COMPRESSED_TENSORS
from octavo_bench.results import Row

CONTEXT = 512
"""Tokens in the cache of each sequence."""
STEPS = 50
"""Steps over which the median is taken."""
Step = Callable[[], Any]


def decoding_rows(
    workload: str, subject: Subject, recipes: Sequence[str], batches: Sequence[int], device: torch.device,
    context: int = CONTEXT,
) -> Iterator[Row]:  # fmt: skip
    """Yield a row per batch and precision, `bf16` first: ms per step, tokens per second, bytes of the exported files.

    Args:
        workload: name of the model in the rows.
        subject: builds a causal language model of transformers.
        recipes: those of exports in eight bits.
        batches: numbers of sequences.
        device: where it is decoded.
        context: tokens before the one that is decoded.

    Raises:
        RunError: a weight is decoded by other codes than the file has.
    """
    torch.manual_seed(0)
    plain = subject.build().to(device, torch.bfloat16).eval()
    base: dict[int, float] = {}
    for name in ("bf16", *recipes):
        with tempfile.TemporaryDirectory() as folder:
            model = plain if name == "bf16" else copy.deepcopy(plain)
            if name != "bf16":
                convert(
                    model, name, policy=Policy(min_gain=0.0), tokens=max(batches), allow_reference=device.type == "cpu"
                )
            export(model, folder, format="plain" if name == "bf16" else COMPRESSED_TENSORS, dtype=torch.bfloat16)
            size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
            with torch.no_grad(), reuse_weight_codes(model):
                check_codes(model, Path(folder))
                for batch in batches:
                    ms = _milliseconds(model, batch, context)
                    base.setdefault(batch, ms)
                    yield {
                        "workload": f"{workload}, exported, {batch} sequences of {context}", "implementation": name,
                        "ms": round(ms, 4), "ratio_to_bf16": round(base[batch] / ms, 4), "batch": batch,
                        "sequence": context, "tokens_per_s": round(1e3 * batch / ms, 1), "exported_bytes": size,
                        "phases": {"decode": round(ms, 4)}, "speedups": {"decode": round(base[batch] / ms, 3)},
                    }  # fmt: skip
        del model


def check_codes(model: nn.Module, directory: Path) -> None:
    """Check that layers read the codes of an export, inside a block of `reuse_weight_codes`.

    Raises:
        RunError: one does not.
    """
    names = {id(module): name for name, module in model.named_modules()}
    layers = [layer for layer in quantising_layers(model) if isinstance(layer, LinearLayer)]
    for group in fusion_groups(model, layers):
        codes = group[0].weight_codes
        parts: Sequence[Quantized | None] | None = None if codes is None else codes.parts()
        for layer, part in zip(group, parts or [None] * len(group), strict=True):
            name = names[id(layer)]
            if part is None or not torch.equal(_read(directory, f"{name}.weight"), part.codes.cpu().view(torch.uint8)):
                raise RunError(f"{directory}: {name} is exported with other codes than it is decoded by.")


def _read(directory: Path, name: str) -> Tensor:
    """Return the bytes of a tensor of an export."""
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 - not a dict
                found: Tensor = tensors.get_tensor(name).view(torch.uint8)
                return found
    raise RunError(f"{directory}: has no tensor '{name}'.")


def decoding_step(model: nn.Module, ids_BT: Tensor) -> Step:
    """Return a function that decodes the last token of each sequence in the context of the others: logits (B, 1, V).

    Each call writes its keys and values over those of the last one, so that all calls are the same.
    """
    cache = model(input_ids=ids_BT[:, :-1], use_cache=True).past_key_values
    update, kept = cache.update, dict[int, tuple[Tensor, Tensor]]()

    def write(k: Tensor, v: Tensor, layer: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if layer not in kept:
            kept[layer] = update(k, v, layer, *args, **options)
        for whole, new in zip(kept[layer], (k, v), strict=True):
            whole[:, :, -1:] = new
        return kept[layer]

    def step() -> Tensor:
        logits_B1V: Tensor = model(input_ids=ids_BT[:, -1:], past_key_values=cache, use_cache=True).logits
        return logits_B1V

    cache.update = write
    step()
    cache.crop(-1)  # it has grown by the first call alone
    return step


def _milliseconds(model: nn.Module, batch: int, context: int) -> float:
    device = next(model.parameters()).device
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr,assignment]
    ids_BT = torch.randint(vocabulary, (batch, context), device=device)
    step = decoding_step(model, ids_BT)
    warm_up(step, device.type, calls=4, seconds=0.1)
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
        warm_up(step, device.type, seconds=0.05)
    return statistics.median(milliseconds(step, device.type, STEPS if device.type == "cuda" else 3))
