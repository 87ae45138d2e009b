"""What to know before a model is served: where engines make something else of it than Octavo did."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from octavo.serving.layers import ServedLayer

_AS_ONE = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM computes as one."""


def notes(layers: Sequence[ServedLayer], others: Collection[str], tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return each note once, about the first that it is true of. All names are those outside.

    Args:
        layers: in FP8.
        others: layers that are not.
        tensors: all that is written.
    """
    kinds = _mixed(layers, others), _rounded_again(layers), _stacked(tensors)
    return tuple(note for kind in kinds if (note := next(kind, None)) is not None)


def _mixed(layers: Sequence[ServedLayer], others: Collection[str]) -> Iterator[str]:
    in_fp8 = [layer.name for layer in layers]
    for members in _computed_as_one([*in_fp8, *others]):
        kept = [name for name in members if name not in in_fp8]
        if 0 < len(kept) < len(members):
            yield (
                f"vLLM computes {kept[0]} as one with its neighbours, which are in FP8: it wants all of them in FP8 or "
                "none (octavo.Policy(min_gain=0))."
            )


def _rounded_again(layers: Sequence[ServedLayer]) -> Iterator[str]:
    scales = {layer.name: float(layer.weight.scale) for layer in layers if layer.target.granularity == "tensor"}
    for members in _computed_as_one(scales):
        if len({scales[name] for name in members}) > 1:
            yield (
                f"layers of {members[0].rpartition('.')[0]} have a scale each, and vLLM computes them as one: it "
                "rounds them again, to the largest. Let octavo.convert compute them as one (octavo.Policy(fuse=True))."
            )


def _stacked(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in tensors.items():
        if tensor.dim() == 3 and ".experts." in name:
            yield (
                f"{name} holds all experts in one tensor, as transformers does in memory. It loads that; other engines "
                "look for a tensor an expert."
            )


def _computed_as_one(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield of these layers those that vLLM computes as one."""
    parents: dict[str, list[str]] = {}
    for name in names:
        parents.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, inside in parents.items():
        for members in _AS_ONE:
            together = [f"{parent}.{member}" for member in members if f"{parent}.{member}" in inside]
            if together:
                yield together
