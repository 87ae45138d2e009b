"""Output heads of a model, by what the model says of them and not by their names.

A small error of a head's GEMM goes straight into the loss. These are heads:

- the layer that `get_output_embeddings()` returns (transformers), or `get_classifier()` (timm);
- a layer whose weight is that of an embedding;
- in a model of transformers, every layer outside of its base model (`base_model_prefix`), as classifiers are.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def find_heads(model: nn.Module) -> set[int]:
    """Return the `id` of each module that is an output head, or lies in one."""
    found = {id(part) for module in model.modules() for head in _heads_of(module) for part in head.modules()}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return found | {id(m) for m in model.modules() if isinstance(m, nn.Linear) and id(m.weight) in embeddings}


def _heads_of(module: nn.Module) -> Iterator[nn.Module]:
    for name in ("get_output_embeddings", "get_classifier"):
        try:
            head = getattr(module, name, lambda: None)()
        except (AttributeError, NotImplementedError, TypeError):  # not every model of a library has one
            continue
        yield from (part for part in (head if isinstance(head, tuple) else [head]) if isinstance(part, nn.Module))
    base = getattr(module, getattr(module, "base_model_prefix", None) or " ", None)
    if isinstance(base, nn.Module):
        inside = {id(part) for part in base.modules()}
        yield from (child for child in module.children() if not inside & {id(part) for part in child.modules()})
