"""FP8-LM's ablation of optimizer precision (arXiv 2310.18313, table 6), in small: which storage holds and which fails.

A network of bytes is trained from the same weights on the same batches with one choice of storage after another. It is
small and made mostly of an embedding, whose rows see a gradient only now and then: harsher on a second moment than a
large model is, so that what fails at scale fails here within minutes on a CPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kernels.storage import Storage
from octavo.optim import TIERS, AdamW, States, keep_none

Row = dict[str, Any]

_E4M3, _FP16 = Storage("e4m3", "tensor"), Storage("fp16", "tensor")
_FP32 = Storage("fp32")


def _fp8_lm(number: str, about: str, master: Storage, second: Storage) -> States:
    return States(name=f"FP8-LM {number}", about=about, first=_E4M3, second=second, master=master)


CHOICES = (
    States(name="FP32", about="all in FP32", first=_FP32, second=_FP32, master=_FP32),
    _fp8_lm("#2a", "master FP16 scaled, m E4M3, v FP16", _FP16, _FP16),
    _fp8_lm("#2b", "master BF16", Storage("bf16"), _FP16),
    _fp8_lm("#3", "master E4M3", _E4M3, _FP16),
    _fp8_lm("#4", "v E4M3, one scale a tensor", _FP16, _E4M3),
    TIERS["exact"],
    TIERS["fp8"],
    TIERS["fp8-min"],
)
"""All with BF16 weights; GEMMs in FP32, so that nothing but the storage differs."""

CONTEXT, WIDTH, HIDDEN, BATCH, LR = 8, 24, 192, 256, 2e-3


def run_ablation(
    choices: Sequence[States] = CHOICES,
    *,
    steps: int = 1000,
    seeds: Sequence[int] = (0, 1),
    beta2: float = 0.95,
    report: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Return one row a choice and seed, as the result kind `ablation` has them: held-out loss, or that it diverged.

    What the paper has is rounded to nearest, as it does; Octavo's tiers stochastically, as they do.
    """
    text = _text()
    rows: list[Row] = []
    for states in choices:
        for seed in seeds:
            loss = _train(states, text, steps=steps, seed=seed, beta2=beta2)
            row: Row = {"states": states.name, "about": states.about, "seed": seed, "steps": steps, "beta2": beta2}
            rows.append(row | ({"heldout_loss": round(loss, 5)} if math.isfinite(loss) else {"error": "diverged"}))
            report(rows[-1])
    return rows


def _train(states: States, text: Tensor, *, steps: int, seed: int, beta2: float) -> float:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(256, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 256)
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    rounding = "stochastic" if states.name in TIERS else "nearest"
    settings: dict[str, Any] = {
        "betas": (0.9, beta2),
        "weight_decay": 0.0,
        "states": states,
        "rounding": rounding,
        "seed": seed,
    }
    optimizer = AdamW(model.parameters(), lr=LR, keep=keep_none, max_update=math.inf, **settings)
    training, heldout = text[: -len(text) // 10], text[-len(text) // 10 :]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        at = torch.randint(len(training) - CONTEXT, (BATCH,))
        _loss(model, training, at).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(_loss(model, heldout, torch.arange(0, len(heldout) - CONTEXT, 7)[:8192]))


def _loss(model: nn.Module, text: Tensor, at: Tensor) -> Tensor:
    windows = text[at[:, None] + torch.arange(CONTEXT + 1)]
    exact = {name: parameter.float() for name, parameter in model.named_parameters()}
    logits = torch.func.functional_call(model, exact, (windows[:, :-1],))
    return F.cross_entropy(logits, windows[:, -1])


def _text() -> Tensor:
    """Return the bytes of some modules of the standard library."""
    named = ("argparse", "ast", "datetime", "decimal", "doctest", "inspect", "pickle", "tarfile", "typing")
    found = [Path(argparse.__file__).with_name(f"{name}.py") for name in named]
    joined = b"".join(path.read_bytes() for path in found if path.exists())
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()
