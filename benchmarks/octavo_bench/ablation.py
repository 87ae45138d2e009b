"""FP8-LM's ablation of optimizer precision (arXiv 2310.18313, table 6) on a small model: which storage converges.

A byte-level network is trained from the same weights on the same batches with each choice of storage. It is small and
mostly an embedding, whose rows receive gradients only occasionally: harder on second moments than a large model, so
that storage that fails at scale fails here within minutes on a CPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kernels.storage import Storage
from octavo.optim import TIERS, AdamW, States, keep_none
from octavo.tensor import FP8Tensor
from octavo_bench.render import grouped, table
from octavo_bench.results import Row

_E4M3, _FP16 = Storage("e4m3", "tensor"), Storage("fp16", "tensor")
_FP32 = Storage("fp32")


class Choice(NamedTuple):
    """The storage of states, gradients and weights."""

    states: States
    gradients: Literal["wide", "fp8"] = "wide"
    weights: Literal["bf16", "fp8"] = "bf16"

    @property
    def name(self) -> str:
        """The cell of the column `states`."""
        return f"{self.states.name}, FP8 weights" if self.weights == "fp8" else self.states.name

    @property
    def about(self) -> str:
        """One line for tables."""
        if self.states.name not in TIERS:
            return self.states.about
        if self.weights == "fp8":
            return f"FP8 weights with {self.states.fp8_remainder_bits} bits, FP8 gradients, moments of one byte"
        bits = self.states.remainder_bits
        kept = f"BF16 weights with {bits} bits" if bits else "BF16 weights, rounded stochastically"
        return f"{kept}, moments in {'BF16' if self.states.name == 'exact' else 'one byte'}"


def _fp8_lm(number: str, about: str, master: Storage, second: Storage) -> Choice:
    states = States(
        name=f"FP8-LM {number}",
        about=about,
        first=_E4M3,
        second=second,
        master=master,
        gradient=TIERS["fp8-lm"].gradient,
    )
    return Choice(states, gradients="fp8")


CHOICES = (
    Choice(States(name="FP32", about="all in FP32", first=_FP32, second=_FP32, master=_FP32)),
    _fp8_lm("#2a", "master FP16 scaled, m E4M3, v FP16, gradients E4M3", _FP16, _FP16),
    _fp8_lm("#2b", "master BF16", Storage("bf16"), _FP16),
    _fp8_lm("#3", "master E4M3", _E4M3, _FP16),
    _fp8_lm("#4", "v E4M3, one scale per tensor", _FP16, _E4M3),
    *(Choice(TIERS[name]) for name in ("exact", "fp8", "fp8-min")),
    *(Choice(TIERS[name], "fp8", "fp8") for name in ("fp8", "fp8-min")),
)
"""BF16 weights, FP8 in the last line; GEMMs in FP32, so that only storage differs."""


def by_storage(rows: Sequence[Row]) -> str:
    """Return one line per choice of storage: held-out loss of each seed, or that it diverged, and the gap to FP32."""
    seeds = sorted({row["seed"] for row in rows})
    losses = {(row["states"], row["seed"]): row.get("heldout_loss", math.nan) for row in rows}
    first = rows[0]["states"]
    body = []
    for (states,), own in grouped(rows, "states").items():
        found = [losses.get((states, seed), math.nan) for seed in seeds]
        gap = fmean(loss - losses[first, seed] for loss, seed in zip(found, seeds, strict=True))
        cells = [f"{loss:.4f}" if math.isfinite(loss) else "diverged" for loss in found]
        body.append((states, own[0].get("about", ""), *cells, f"{gap:+z.4f}" if math.isfinite(gap) else ""))
    return table(("states", "storage", *(f"seed {seed}" for seed in seeds), f"gap to {first}"), body)


FLOOR, DECADE = 1e-3, 16
"""Start of the bars in nats, and characters per factor of ten."""


def bars(rows: Sequence[Row]) -> str:
    """Return the gaps to FP32 as bars on a logarithmic scale: mean and range over seeds, per choice."""
    exact = {row["seed"]: row["heldout_loss"] for row in rows if row["states"] == rows[0]["states"]}
    groups = grouped(rows[len(exact) :], "states")
    width = max(len(states) for (states,) in groups)
    lines = [f"{'':{width}}  held-out loss above FP32's, nats; {DECADE} characters are a factor of ten, from {FLOOR}"]
    for (states,), own in groups.items():
        gaps = [row["heldout_loss"] - exact[row["seed"]] for row in own if "heldout_loss" in row]
        if len(gaps) < len(own):
            failed = f"diverged: {len(own) - len(gaps)} of {len(own)} seeds"
            lines.append(f"{states:{width}}  {'x' * 3 * DECADE} {failed}")
            continue
        gap = fmean(gaps)
        bar = "█" * round(DECADE * math.log10(max(gap / FLOOR, 1.0)))
        lines.append(
            f"{states:{width}}  {bar}{' ' if bar else ''}{gap:+z.4f}  ({min(gaps):+z.4f} to {max(gaps):+z.4f})"
        )
    return "\n".join(("```text", *lines, "```"))


CONTEXT, WIDTH, HIDDEN, BATCH, LR = 8, 24, 192, 256, 2e-3


def run_ablation(
    choices: Sequence[Choice] = CHOICES,
    *,
    steps: int = 1000,
    seeds: Sequence[int] = (0, 1),
    beta2: float = 0.95,
) -> Iterator[Row]:
    """Yield one row per choice and seed: held-out loss, or that it diverged.

    The paper's choices are rounded to nearest, as it does; Octavo's tiers stochastically.
    """
    text = _text()
    for choice in choices:
        for seed in seeds:
            loss = _train(choice, text, steps=steps, seed=seed, beta2=beta2)
            row: Row = {"states": choice.name, "about": choice.about, "seed": seed, "steps": steps, "beta2": beta2}
            yield row | ({"heldout_loss": round(loss, 5)} if math.isfinite(loss) else {"error": "diverged"})


def _train(choice: Choice, text: Tensor, *, steps: int, seed: int, beta2: float) -> float:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(256, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 256)
    )
    weights = {name: _weight(value, choice) for name, value in model.named_parameters()}
    settings: dict[str, Any] = {
        "betas": (0.9, beta2),
        "weight_decay": 0.0,
        "states": choice.states,
        "gradients": choice.gradients,
        "rounding": "stochastic" if choice.states.name in TIERS else "nearest",
        "seed": seed,
    }
    optimizer = AdamW(weights.values(), lr=LR, keep=keep_none, max_update=math.inf, **settings)
    training, heldout = text[: -len(text) // 10], text[-len(text) // 10 :]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        at = torch.randint(len(training) - CONTEXT, (BATCH,))
        values = {name: _value(weight).requires_grad_() for name, weight in weights.items()}
        _loss(model, values, training, at).backward()
        for name, weight in weights.items():
            gradient = values[name].grad
            weight.grad = None if gradient is None else gradient.bfloat16()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        values = {name: _value(weight) for name, weight in weights.items()}
        return float(_loss(model, values, heldout, torch.arange(0, len(heldout) - CONTEXT, 7)[:8192]))


def _weight(value: Tensor, choice: Choice) -> nn.Parameter:
    half = value.detach().bfloat16()
    return nn.Parameter(FP8Tensor.from_tensor(half) if choice.weights == "fp8" and half.dim() == 2 else half)


def _value(weight: nn.Parameter) -> Tensor:
    """Return the value for computation, FP32."""
    value = weight.dequantize(torch.float32) if isinstance(weight, FP8Tensor) else weight.float()
    return value.detach()


def _loss(model: nn.Module, values: dict[str, Tensor], text: Tensor, at: Tensor) -> Tensor:
    windows = text[at[:, None] + torch.arange(CONTEXT + 1)]
    logits = torch.func.functional_call(model, values, (windows[:, :-1],))
    return F.cross_entropy(logits, windows[:, -1])


def _text() -> Tensor:
    """Return the bytes of some modules of the standard library."""
    named = ("argparse", "ast", "datetime", "decimal", "doctest", "inspect", "pickle", "tarfile", "typing")
    found = [Path(argparse.__file__).with_name(f"{name}.py") for name in named]
    joined = b"".join(path.read_bytes() for path in found if path.exists())
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()
