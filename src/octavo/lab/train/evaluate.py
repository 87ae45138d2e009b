"""Losses on held-out text: the same batches for every model and precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor

from octavo.kernels.runtime.transfers import upload
from octavo.lab.data.loader import Batch
from octavo.lab.train.train_state import TrainState
from octavo.nn.cross_entropy import count_targets, weighted

_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.959964


def heldout_losses(state: TrainState, batches: Iterable[Batch]) -> Tensor:
    """Return the loss in nats per token of each sequence in `(inputs_BT, targets_BT)` batches; float64 on the CPU.

    The held-out loss is the mean of the result, and that over all targets, whatever the batches. Sequences of packed
    conversations, which differ in their number of targets, are weighted by it, relative to the mean number. On several
    ranks all call it; each computes its part of each batch and gets all losses.
    """
    return _by_sequence(state, batches, by_sequence=True)


def heldout_scores(state: TrainState, batches: Iterable[Batch]) -> Tensor:
    """Return per sequence the loss and the share of targets predicted as most likely: (S, 2). One process only.

    Both are weighted as in `heldout_losses`.
    """
    return _by_sequence(state, batches, hits=True)


@torch.no_grad()
def _by_sequence(state: TrainState, batches: Iterable[Batch], **options: bool) -> Tensor:
    state.make_room()
    state.model.eval()
    own: list[Tensor] = []
    counts: list[Tensor] = []
    for inputs_BT, targets_BT in batches:  # before any collective, so that pipeline ranks overlap
        # Smaller batches are padded to the first, so that a compiled model compiles once.
        rows = state.ranks.own_rows(len(inputs_BT), len(counts[0]) if counts else 0)
        values = state.loss(upload(inputs_BT[rows], state.device), upload(targets_BT[rows], state.device), **options)
        own.append(values if state.context is None else state.context.mean(values))
        counts.append(count_targets(targets_BT, len(targets_BT)))
    state.model.train()
    found = [state.ranks.gather_rows(x.double(), len(count)) for x, count in zip(own, counts, strict=True)]
    values, count_S = torch.cat(found).cpu(), torch.cat(counts).double().cpu()
    return weighted(values.movedim(0, -1), count_S / count_S.mean()).movedim(-1, 0)


@torch.no_grad()
def answers_given(state: TrainState, batches: Iterable[Batch]) -> Tensor:
    """Return for each packed conversation whether greedy decoding gives its answers: bool (conversations,).

    It does if each target is the likeliest id after those before it. On several ranks all call it, with all batches.
    """
    state.make_room()
    state.model.eval()
    found = []
    for inputs_BT, targets_BT in batches:
        for inputs_1T, targets_T in zip(inputs_BT.split(1), targets_BT, strict=True):
            likeliest_T = state.logits(upload(inputs_1T, state.device))[0].argmax(dim=-1).cpu()
            document_T = (inputs_1T[0] < 0).cumsum(0) - 1
            counted = torch.bincount(document_T, (targets_T >= 0).double())
            right = torch.bincount(document_T, (likeliest_T == targets_T).double())
            found.append((right == counted)[counted > 0])  # without the filling
    state.model.train()
    return torch.cat(found)


def accuracy_by_task(tasks: Sequence[str], right: Mapping[str, Tensor]) -> dict[str, dict[str, float | None]]:
    """Return for each task the accuracy of each model and of FP8 minus BF16, paired, with standard errors (`_error`).

    Args:
        tasks: task of each conversation.
        right: by model: whether each conversation was answered, bool.
    """
    found: dict[str, dict[str, float | None]] = {}
    for task in dict.fromkeys(tasks):
        of_task = torch.tensor([name == task for name in tasks])
        found[task or "answers"] = compared({model: answered[of_task] for model, answered in right.items()})
    return found


def compared(values: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Return the mean of each model's values per sample, and of the first's less the second's, with standard errors."""
    first, *others = values.values()
    means = dict(values)
    if others:
        means["difference"] = first.double() - others[0].double()
    row: dict[str, float | None] = {"samples": len(first)}
    for name, x in means.items():
        row |= {name: float(x.double().mean()), f"{name}_error": standard_error(x.double())}
    return row


def within(error: float | None, samples: float, form: str = "") -> str:
    """Return ` ± error` for a text, or that a single sample has none."""
    return f" ± {error:{form}}" if samples > 1 else " (one sample)"


def standard_error(values: Tensor) -> float | None:
    """Return the standard error of the mean of independent values; None for a single one."""
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None


def perplexity(loss: float) -> float:
    """Return `exp(loss)`; infinite above 700 nats."""
    return math.exp(loss) if loss < 700 else math.inf


def student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t with `freedom` degrees of freedom, to 3 decimals.

    From a table up to 10, from there by the expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5).
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def paired_interval(losses: Sequence[float], reference: Sequence[float], block: int = 16) -> tuple[float, float | None]:
    """Return the mean of `losses - reference`, paired by sequence, and half of its 95 % confidence interval.

    Neighbouring sequences often come from one document and are correlated, so `block` of them count as one observation,
    fewer if there would be less than 8 observations. The half width is None for a single sequence.
    """
    differences = [a - b for a, b in zip(losses, reference, strict=True)]
    block = max(1, min(block, len(differences) // 8))
    blocks = [fmean(differences[start : start + block]) for start in range(0, len(differences) - block + 1, block)]
    if len(blocks) < 2:
        return fmean(differences), None
    return fmean(differences), student(len(blocks) - 1) * stdev(blocks) / math.sqrt(len(blocks))
