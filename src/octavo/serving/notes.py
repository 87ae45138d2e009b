"""Notes for serving: differences between engines and Octavo."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from octavo.serving.layers import ServedLayer

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM fuses."""


def notes(layers: Sequence[ServedLayer], others: Collection[str], tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return each note once, for the first layer concerned. All names are exported names.

    Args:
        layers: layers in FP8.
        others: other layers.
        tensors: all stored tensors.
    """
    kinds = _mixed(layers, others), _requantised(layers), _stacked(tensors), _experts(layers), _rotated(layers, tensors)
    return tuple(note for kind in kinds if (note := next(kind, None)) is not None)


def _mixed(layers: Sequence[ServedLayer], others: Collection[str]) -> Iterator[str]:
    in_fp8 = [layer.name for layer in layers]
    for members in _fused_groups([*in_fp8, *others]):
        kept = [name for name in members if name not in in_fp8]
        if 0 < len(kept) < len(members):
            yield (
                f"vLLM fuses {kept[0]} with its neighbours, which are in FP8: it requires all or none of them in FP8 "
                "(octavo.Policy(min_gain=0))."
            )


def _requantised(layers: Sequence[ServedLayer]) -> Iterator[str]:
    scales = {layer.name: float(layer.weight.scale) for layer in layers if layer.target.granularity == "tensor"}
    for members in _fused_groups(scales):
        if len({scales[name] for name in members}) > 1:
            yield (
                f"layers of {members[0].rpartition('.')[0]} have separate scales, and vLLM fuses them: it requantises "
                "them to the largest scale. Let octavo.convert fuse them (octavo.Policy(fuse=True))."
            )


def _stacked(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        if tensor.dim() == 3 and ".experts." in name:
            yield (
                f"{name} contains all experts in one tensor, as in transformers, which loads it; other engines expect "
                "one tensor per expert."
            )


def _experts(layers: Sequence[ServedLayer]) -> Iterator[str]:
    for layer in layers:
        if re.search(r"\.experts\.\d+\.", layer.name):
            yield (
                f"{layer.name} is in FP8, one tensor per expert, as vLLM and SGLang load it; transformers loads "
                "experts in high precision only (octavo.Policy(keep=['*.experts']), or the format 'plain')."
            )


def _rotated(layers: Sequence[ServedLayer], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    names = [layer.name for layer in layers if layer.rotation]
    if names:
        biased = next((name for name in names if f"{name}.bias" in tensors), None)
        refused = "" if biased is None else f", and no layer with a bias, as {biased}"
        yield (
            f"the input of {names[0]} is rotated as transform_config says. vLLM reads it (on one GPU, not with tensor "
            f"parallelism{refused}). transformers ignores it and computes other results without an error: call "
            "octavo.serving.rotate_inputs(model, directory) after from_pretrained, as octavo eval does."
        )


def _fused_groups(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the groups of layers that vLLM fuses."""
    parents: dict[str, list[str]] = {}
    for name in names:
        parents.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, inside in parents.items():
        for members in _FUSED:
            together = [f"{parent}.{member}" for member in members if f"{parent}.{member}" in inside]
            if together:
                yield together
