"""Layers whose place in a model keeps them in BF16 by default: output heads and routers.

A head feeds the loss, a router picks experts. An embedding is looked up and multiplies nothing; what a model calls
`embedder` is judged layer by layer, as anything else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from octavo.nn.adopted import is_taken, own_class
from octavo.nn.conv import AnyConvolution
from octavo.nn.linear import is_transposed
from octavo.nn.modules import unwrapped_name

HEAD = "output head: its error goes straight into the loss"
ROUTER = "router: a small error sends a token to another expert"
HEAD_NAMES = ("*lm_head", "output", "head", "fc", "classifier")
"""Names of heads: the first anywhere, the others at the top level."""
ROUTER_NAMES = ("*router", "*router.*")
_LARGEST_HEADS = 8
"""Most values per input feature of a projection by heads, (D, H, d), as XLNet's; a stack of experts, (E, N, K), has
more per expert."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_roles(model: nn.Module) -> dict[int, str]:
    """Return the `id` of each layer that is an output head or a router, and of each router's weight, with the reason.

    These are heads:

    - the layer that `get_output_embeddings()` returns (transformers), or `get_classifier()` (timm);
    - a layer that shares its weight with an embedding;
    - in a model of transformers, the layers outside of its base model (`base_model_prefix`). Of a part there that has
      blocks of its own, such as the decoder of a masked autoencoder, only the last layer behind them;
    - in a model with none of these, and none of their names: the last layer behind all blocks (`_last_behind`).

    A router has as many outputs as there are experts in the module around it.
    """
    heads = find_heads(model)
    return dict.fromkeys(_find_routers(model), ROUTER) | dict.fromkeys(heads, HEAD)


def find_heads(model: nn.Module) -> set[int]:
    """Return the `id` of each output head and of each module inside one; see `find_roles`."""
    blocks = inside_blocks(model)
    found = {id(part) for module in model.modules() for head in _declared(module, blocks) for part in head.modules()}
    found |= {id(layer) for module in model.modules() for layer in _outside_base_model(module, blocks)}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found |= {id(module) for module in model.modules() if isinstance(module, nn.Linear) and id(module.weight) in tables}
    if found or any(_is_named_head(name) for name, module in model.named_modules() if is_layer(module)):
        return found
    inside = {id(part) for module in model.modules() if _is_base_model(module) for part in module.modules()}
    return {id(layer) for layer in _last_behind(model, blocks) if id(layer) not in inside}


def _is_named_head(name: str) -> bool:
    return any(fnmatchcase(unwrapped_name(name), pattern) for pattern in HEAD_NAMES)


def _declared(module: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    """Yield the heads that a model names by a method; for a table (FSMT), the layer of its shape behind all blocks."""
    for name in ("get_output_embeddings", "get_classifier"):
        try:
            head = getattr(module, name, lambda: None)()
        except (AttributeError, NotImplementedError, TypeError):  # not every model of a library has one
            continue
        for part in head if isinstance(head, tuple) else [head]:
            if isinstance(part, nn.Embedding):
                last = _last_behind(module, blocks)
                yield from (layer for layer in last if layer.weight.shape == part.weight.shape)
            elif isinstance(part, nn.Module):
                yield part


def _outside_base_model(module: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    """Yield the layers of a model of transformers outside of its base model."""
    base = getattr(module, getattr(module, "base_model_prefix", None) or " ", None)
    if not isinstance(base, nn.Module):
        return
    inside = {id(part) for part in base.modules()}
    for child in module.children():
        parts = list(child.modules())
        if inside & {id(part) for part in parts}:
            continue
        has_blocks = any(id(part) in blocks for part in parts)
        yield from _last_behind(child, blocks) if has_blocks else parts


def _is_base_model(module: nn.Module) -> bool:
    """Return whether a model of transformers is one without a head: others hold it by the name of their prefix."""
    prefix = getattr(module, "base_model_prefix", None)
    return isinstance(prefix, str) and bool(prefix) and not hasattr(module, prefix)


def inside_blocks(model: nn.Module) -> set[int]:
    """Return the `id` of each module in a block: an element, with layers inside, of a container of its like."""
    found: set[int] = set()
    for module in model.modules():
        elements = [child for child in module.children() if any(True for _ in child.children())]
        if not isinstance(module, nn.ModuleList):
            elements = [child for child in elements if not isinstance(child, _CONTAINERS)]
        of_one_class = len({_class_of(child) for child in module.children()}) == 1
        repeats = len({_class_of(child) for child in elements}) < len(elements)
        if isinstance(module, nn.ModuleList) or (isinstance(module, _CONTAINERS) and (of_one_class or repeats)):
            found |= {id(part) for element in elements for part in element.modules()}
    return found


def _last_behind(module: nn.Module, blocks: set[int]) -> list[nn.Module]:
    """Return the last layer behind the last block inside a module; none without blocks or such a layer.

    Also the last one there that stands beside the blocks, and not in a module of its own, if that is another: the order
    is that of creation, and PixArt makes the projection of its captions after its head.
    """
    parts = list(module.modules())
    last = max((place for place, part in enumerate(parts) if id(part) in blocks), default=len(parts))
    behind = [part for part in parts[last + 1 :] if is_layer(part)]
    around = [part for part in parts if id(part) not in blocks and any(id(inner) in blocks for inner in part.modules())]
    beside = {id(child) for part in around for child in part.children()}
    return [*{id(found[-1]): found[-1] for found in (behind, [x for x in behind if id(x) in beside]) if found}.values()]


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer with a GEMM: linear, or a convolution."""
    return isinstance(module, nn.Linear | AnyConvolution) or is_transposed(module)


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before its conversion."""
    kind: type[nn.Module] = own_class(module).parent if is_taken(module) else type(module)
    return kind


def _find_routers(model: nn.Module) -> Iterator[int]:
    """Yield the `id` of each router and of its weight."""
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    for module in model.modules():
        for count in _experts_in(module):
            around = parents.get(id(module), module)
            routers = _with_outputs(count, around, module) or _with_outputs(count, parents.get(id(around)), around)
            yield from itertools.chain.from_iterable((id(router), id(router.weight)) for router in routers)


def _experts_in(module: nn.Module) -> set[int]:
    """Return the numbers of experts that a module may hold: matrices in one tensor, or modules of one class."""
    stacks = [p.shape for p in module._parameters.values() if p is not None and p.dim() == 3]
    counts = {shape[0] for shape in stacks if math.prod(shape[1:]) > _LARGEST_HEADS * shape[0]}
    children = list(module.children())
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and len({_class_of(child) for child in children}) == 1:
        counts |= {len(children)} if any(True for _ in children[0].children()) else set()
    return set() if isinstance(module, AnyConvolution) else counts - {0, 1}


def _with_outputs(count: int, around: nn.Module | None, experts: nn.Module) -> list[nn.Module]:
    """Return the modules with a weight (count, K) around experts, not among them."""
    if around is None:
        return []
    inside = {id(part) for part in experts.modules()} if isinstance(experts, _CONTAINERS) else set()
    parts = (part for part in around.modules() if id(part) not in inside and not isinstance(part, nn.Embedding))
    return [part for part in parts if _rows(part._parameters) == count]


def _rows(parameters: Mapping[str, Tensor | None]) -> int | None:
    """Return N of a weight (N, K); None if there is none."""
    weight = parameters.get("weight")
    return weight.shape[0] if weight is not None and weight.dim() == 2 else None
