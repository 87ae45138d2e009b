"""Reinforcement learning: changed weights, as codes, into a running engine, and the mismatch of trainer and engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError, UnsupportedError
from octavo.serving.exporting import served_tensors
from octavo.serving.formats import COMPRESSED_TENSORS


class WeightPush:
    """The weights of a model in training as an engine loads them: the tensors of `octavo.export`, without files.

    Iterating makes a fresh pass over all of them, `(name, tensor)`, on the model's device: what vLLM's `WeightSource`
    and the weight loaders of other engines take. The engine was started from an export of the model in this format.

    Args:
        model: converted by `octavo.convert`, not sharded.
        format: format of the export.
        dtype: dtype of everything not in FP8.
    """

    def __init__(
        self, model: nn.Module, format: str = COMPRESSED_TENSORS, *, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.model, self.format, self.dtype = model, format, dtype
        self._pushed: dict[str, list[int]] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return served_tensors(self.model, self.format, dtype=self.dtype)

    def changed(self) -> list[tuple[str, Tensor]]:
        """Return the tensors of all modules in which a bit changed since the last call; at first all tensors.

        Layers beside each other, such as q, k and v, come together: engines fuse them, and load all of them or none.
        """
        found, digests = self._changes()
        self._pushed |= digests
        return found

    def _changes(self) -> tuple[list[tuple[str, Tensor]], dict[str, list[int]]]:
        """Return the tensors of changed modules, and the digests to remember once they are loaded."""
        found: list[tuple[str, Tensor]] = []
        changed: dict[str, list[int]] = {}
        for _, group in groupby(self, lambda each: each[0].rsplit(".", 2)[0]):
            tensors = list(group)
            first, digests = tensors[0][0], [_digest(tensor) for _, tensor in tensors]
            if self._pushed.get(first) != digests:
                changed[first] = digests
                found += tensors
        return found, changed

    def to_vllm(self, llm: Any) -> int:
        """Load the changed tensors into a running vLLM, and return their number.

        vLLM 0.32 loads them layer by layer (`reload_weights`, vllm/model_executor/model_loader/reload/layerwise.py):
        into the memory that its kernels and CUDA graphs read, from codes in checkpoint format. Cached prefixes of the
        old weights are dropped. After a load that failed, the next push has its tensors again.

        Args:
            llm: a `vllm.LLM`; of one process (VLLM_ENABLE_V1_MULTIPROCESSING=0) without a copy.

        Raises:
            UnsupportedError: it has no `collective_rpc`. Export a checkpoint instead.
        """
        if not hasattr(llm, "collective_rpc"):
            raise UnsupportedError(
                f"push: {type(llm).__name__} has no collective_rpc. Pass a vllm.LLM, load `WeightPush.changed()` with "
                "the engine's own weight loader, or let it load an export: octavo.export(model, directory)."
            )
        tensors, digests = self._changes()
        if tensors:
            for first in digests:  # a load that fails midway leaves neither the old weights nor the new ones
                self._pushed.pop(first, None)
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
            llm.reset_prefix_cache()
            self._pushed |= digests
        return len(tensors)


def _digest(tensor: Tensor) -> int:
    """Return 64 bits that differ, but for chance, if any bit of a tensor does."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    words = nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    odd = torch.arange(words.numel(), device=words.device) * -7046029254386353131 | 1  # 2^64 / golden ratio
    return int(((words ^ (words >> 29)) * odd).sum())


class Mismatch(NamedTuple):
    """Distance of the policy that sampled from the policy that is trained, per token."""

    kl: float
    """KL(engine || trainer), nats per token: the mean of r - 1 - log r, r = p_trainer / p_engine."""
    error: float
    """Standard error of `kl`."""
    largest: float
    """Largest |log p_trainer - log p_engine|."""
    tokens: int

    def __str__(self) -> str:
        return (
            f"mismatch KL {self.kl:.2e} ± {self.error:.0e} nats per token, at most {self.largest:.2e} ({self.tokens:,})"
        )


def mismatch(trainer: Tensor, engine: Tensor, mask: Tensor | None = None) -> Mismatch:
    """Return the mismatch of a trainer and the engine that sampled its tokens.

    The estimator is unbiased, and no token's share is negative (k3 in J. Schulman, 'Approximating KL divergence').

    Args:
        trainer: log-probabilities of the sampled tokens, any shape.
        engine: those that the engine reported when it sampled them, of the same shape and temperature.
        mask: tokens that count; by default all.

    Raises:
        ConfigError: the shapes differ, or no token counts.
    """
    if trainer.shape != engine.shape or (mask is not None and mask.shape != engine.shape):
        raise ConfigError(f"mismatch: shapes differ: {tuple(trainer.shape)} of the trainer, {tuple(engine.shape)}.")
    log_ratio = trainer.detach().double().cpu() - engine.detach().double().cpu()
    log_ratio = log_ratio.flatten() if mask is None else log_ratio[mask.cpu().bool()]
    if not log_ratio.numel():
        raise ConfigError("mismatch: no token counts. Pass the log-probabilities of sampled tokens.")
    parts = torch.expm1(log_ratio) - log_ratio
    error = float(parts.std()) / math.sqrt(len(parts)) if len(parts) > 1 else math.inf
    return Mismatch(float(parts.mean()), error, float(log_ratio.abs().max()), len(parts))
